"""Images of prompts in the report: small copies, as many as the page has room for."""

from __future__ import annotations

import base64
import io
from datetime import datetime

import numpy as np
import pytest
from browser import CHROMIUM, browser
from PIL import Image, PngImagePlugin
from reading import read_page
from synthetic import group, write_run, write_step

from rloo_cli.inspect.thumbnails import LONGEST_SIDE, make_thumbnail
from rloo_cli.report import page, sample
from rloo_cli.report.page import render
from rloo_cli.report.run_view import view_runs
from rloo_cli.report.sample import MOST_IMAGES, sample_rollouts
from rloo_cli.report.write import write_report
from rloo_cli.types import EncodedImage

NOW = datetime(2026, 1, 31, 17, 45)
MARK = "<script>alert(1)</script>"


def file_of(seed=0, size=(8, 8), kind="PNG", **options) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format=kind, **options)
    return buffer.getvalue()


def encoded(*files):
    return tuple(EncodedImage(data=data, name="", digest="") for data in files)


def with_images(prompt_row, rewards, *files):
    first, *rest = rewards
    both = group(prompt_row, [first, *rest], images=encoded(*files))
    plain = group(prompt_row, [first, *rest])
    return [both[0], *plain[1:]]


def groups_of(folder, **arguments):
    (step,) = sample_rollouts(view_runs([folder])[0], **arguments).steps
    return step["groups"]


def opened(uri: str) -> Image.Image:
    head, _, content = uri.partition(",")
    assert head in ("data:image/png;base64", "data:image/jpeg;base64")
    return Image.open(io.BytesIO(base64.b64decode(content, validate=True)))


def test_a_tiny_image_keeps_every_pixel_and_a_large_one_is_scaled_down():
    tiny = make_thumbnail(file_of())
    assert np.array_equal(np.asarray(opened(tiny.uri)), np.asarray(Image.open(io.BytesIO(file_of()))))
    large = make_thumbnail(file_of(size=(1200, 600)))
    assert (large.width, large.height) == (1200, 600)
    assert opened(large.uri).size == (LONGEST_SIDE, LONGEST_SIDE // 2)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_nothing_but_the_pixels_of_a_file_comes_along(kind):
    text = PngImagePlugin.PngInfo()
    text.add_text("Comment", MARK)
    exif = Image.Exif()
    exif[0x010E] = MARK
    options = {"PNG": {"pnginfo": text, "exif": exif, "icc_profile": MARK.encode()}, "JPEG": {"comment": MARK, "exif": exif}}[kind]
    data = file_of(size=(100, 100), kind=kind, **options) + MARK.encode()
    assert data.count(MARK.encode()) >= 3
    copy = opened(make_thumbnail(data).uri)
    copy.load()
    assert MARK.encode() not in base64.b64decode(make_thumbnail(data).uri.partition(",")[2])
    assert set(copy.info) <= {"jfif", "jfif_version", "jfif_unit", "jfif_density"}


@pytest.mark.parametrize("data", [b"", b"<svg onload=alert(1)>", file_of()[:60], file_of(size=(90, 90), kind="JPEG")[:300]])
def test_what_is_no_image_has_no_small_copy(data):
    assert make_thumbnail(data) is None


def test_a_group_has_its_prompts_images_once(tmp_path):
    folder = write_run(tmp_path / "run", steps=12)
    many = [file_of(seed) for seed in range(MOST_IMAGES + 2)]
    rows = [*with_images(7, [1.0, 0.0], file_of(), b"no image"), *with_images(8, [0.0, 0.0], *many), *group(9, [1.0, 1.0])]
    write_step(folder, 3, rows)
    first, second, third = groups_of(folder)
    assert [image[1:] for image in first["im"]] == [[8, 8]]
    assert first["ni"] == 2
    assert (len(second["im"]), second["ni"]) == (MOST_IMAGES, MOST_IMAGES + 2)
    assert "im" not in third


def test_a_budget_leaves_the_images_of_the_worst_and_the_best_group(tmp_path):
    folder = write_run(tmp_path / "run", steps=12)
    write_step(folder, 3, [row for i in range(6) for row in with_images(i, [i / 6] * 2, file_of(i))])
    longest = max(len(make_thumbnail(file_of(i)).uri) for i in range(6))
    assert [len(each["im"]) for each in groups_of(folder, image_budget=2 * longest)] == [1, 0, 0, 0, 0, 1]
    assert [len(each["im"]) for each in groups_of(folder, image_budget=0)] == [0] * 6


def test_images_leave_a_full_page_before_texts_do(undrawn, tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run", steps=12)
    for step in range(1, 9):
        write_step(folder, step, [row for i in range(4) for row in with_images(i, [1.0, 0.0], file_of(9 * step + i, (150, 150)))])
    monkeypatch.setattr(page, "MOST_DATA", 250_000)
    small = read_page(render(view_runs([folder]), now=NOW))
    groups = [each for step in small.data["runs"][0]["steps"] for each in step["groups"]]
    assert len(small.scripts[0]) <= 250_000 * 4 / 3 + 4
    assert len(groups) == 32
    assert 0 < sum(len(each["im"]) for each in groups) < 32
    assert all(each["ni"] == 1 and len(each["c"]) == 2 for each in groups)


def test_a_long_run_with_large_images_makes_a_page_below_its_limit(undrawn, tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(sample, "make_thumbnail", lambda data: made.append(make_thumbnail(data)) or made[-1])
    folder = write_run(tmp_path / "run", steps=500)
    for step in range(20, 501, 20):
        write_step(folder, step, [row for i in range(12) for row in with_images(i, [1.0, 0.0], file_of(13 * step + i, (400, 300)))])
    html = render(view_runs([folder]), now=NOW)
    assert 1_000_000 < len(html.encode()) < 5_000_000
    assert len(made) <= 24 * 12  # none is made twice


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_browser_shows_them(tmp_path):
    folder = write_run(tmp_path / "run", steps=12)
    write_step(folder, 3, [*with_images(7, [1.0, 0.0], file_of(), file_of(1, (300, 200)), b"no image"), *group(8, [1.0, 0.0])])
    write_report([folder], tmp_path / "report.html", now=NOW)
    with browser(tmp_path / "profile") as chromium:
        chromium.open(tmp_path / "report.html")
        shown = chromium.value("[...document.querySelectorAll('#group .images img')].map(each => [each.naturalWidth, each.title])")
        assert shown == [[8, "8 × 8 pixels"], [LONGEST_SIDE, "300 × 200 pixels"]]
        assert chromium.value("getComputedStyle(document.querySelector('img.tiny')).imageRendering") == "pixelated"
        assert chromium.value("document.querySelector('#group .images span').textContent") == "1 of 3 images not shown"
        chromium.value("document.querySelectorAll('#groups button')[1].click()")
        assert chromium.value("document.querySelector('#group .images')") is None
        assert chromium.trouble == []
