"""The page in a browser: what the script does, and that nothing else happens."""

from __future__ import annotations

from datetime import datetime

import pytest
from browser import CHROMIUM, browser
from hostile import TEXTS, write_hostile_run
from synthetic import group, write_run, write_step

from rloo_cli.report.write import write_report

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
NOW = datetime(2026, 1, 31, 17, 45)


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("profile")) as found:
        found.show(width=1400)
        yield found


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    run = write_run(folder / "mine")
    write_step(run, 3, group(7, [1.0, 0.0]))
    write_step(run, 5, [*group(8, [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.5]), *group(9, [0.0, 0.0]), *group(10, [1.0, 1.0])])
    write_report([run], folder / "report.html", now=NOW)
    return folder / "report.html"


@pytest.fixture
def opened(chromium, page):
    chromium.trouble.clear()
    chromium.open(page)
    yield chromium
    assert chromium.trouble == []


def rows(opened) -> list[str]:
    return opened.value("[...document.querySelectorAll('#groups button .line span:first-child')].map(each => each.textContent)")


def set_field(opened, name: str, value: str) -> None:
    opened.value(
        f"(() => {{ const field = document.getElementById('f-{name}'); field.value = {value!r}; field.dispatchEvent(new Event('input')); }})()"
    )


def test_the_last_step_is_shown_and_a_click_shows_a_group(opened):
    assert rows(opened) == ["row 8 · mean 0.313", "row 9 · mean 0.000", "row 10 · mean 1.000"]
    assert opened.value("document.querySelectorAll('.card').length") == 8
    opened.value("document.querySelectorAll('#groups button')[1].click()")
    assert "prompt row 9" in opened.value("document.querySelector('#group h3').textContent")
    assert opened.value("[...document.querySelectorAll('.card .scores b')].map(each => each.textContent)") == ["0.000"] * 4


def test_filters_leave_what_is_like_that(opened):
    set_field(opened, "ended", "truncated")
    assert rows(opened) == ["row 8 · mean 0.313"]
    assert opened.value("document.querySelectorAll('.card:not(.dim)').length") == 1
    opened.value("document.getElementById('reset').click()")
    set_field(opened, "least", "1")
    assert len(rows(opened)) == 2
    set_field(opened, "longest", "5")
    assert opened.value("document.getElementById('count').textContent") == "2 of 3 groups, 2 completions match"
    set_field(opened, "text", "nobody wrote this")
    assert opened.value("document.getElementById('groups').textContent") == "No completion is like that."


def test_steps_and_orders(opened):
    set_field(opened, "order", "best")
    assert rows(opened)[0] == "row 10 · mean 1.000"
    set_field(opened, "step", "all")
    assert len(rows(opened)) == 4
    assert rows(opened)[0].startswith("step 5 · row 10")
    set_field(opened, "step", "1")
    opened.value("document.getElementById('before').click()")
    assert rows(opened) == ["row 7 · mean 0.500"]


def test_the_pointer_shows_values_at_a_step(opened):
    box = opened.value(
        "(() => { const box = document.querySelector('.plot').getBoundingClientRect(); return [box.left, box.top, box.width, box.height]; })()"
    )
    opened.value("window.scrollTo(0, 0)")
    opened.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0] + box[2] * 0.5, y=box[1] + box[3] * 0.5)
    opened.wait("document.querySelector('.tip')")
    assert opened.value("document.querySelector('.tip').textContent").startswith("step 27training0.")
    assert opened.value("document.querySelectorAll('.cursor').length") > 10


@pytest.mark.parametrize("width", [420, 1400])
def test_nothing_is_wider_than_the_window(opened, width):
    opened.show(width=width)
    assert opened.value("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    opened.show(width=1400)


def test_hostile_texts_are_shown_and_do_nothing(chromium, tmp_path):
    write_report([write_hostile_run(tmp_path)], tmp_path / "report.html", now=NOW)
    chromium.trouble.clear()
    chromium.open(tmp_path / "report.html")
    set_step = "document.getElementById('f-step').value = 'all'; document.getElementById('f-step').dispatchEvent(new Event('input'))"
    chromium.value(set_step)
    shown = chromium.value(
        "[...document.querySelectorAll('#groups button')].map(each => (each.click(), document.querySelector('.card .text').textContent))"
    )
    assert shown[:4] == TEXTS[:4]
    assert chromium.value("document.querySelectorAll('script').length") == 2
    assert chromium.trouble == []
