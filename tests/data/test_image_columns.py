"""The images of prompts: what a cell may hold, where they go in the messages, what the model gets."""

import base64
import io

import pytest
import torch
from datasets import Dataset, Features, List, Value
from datasets import Image as ImageFeature
from PIL import Image
from transformers import AutoConfig, AutoProcessor

from rloo_cli.data.chat import load_tokenizer
from rloo_cli.data.dataset import load_prompts
from rloo_cli.data.images import data_uri, decode_image, read_images
from rloo_cli.data.multimodal import in_parts
from rloo_cli.data.processor import visual_processor
from rloo_cli.errors import DataError
from rloo_cli.recipe.schema import DataSection, ModelSection
from tests import tiny
from tests.tiny_vision import FAMILIES, llava, png, qwen2_vl, write_rows

QUESTION = [{"role": "user", "content": "What is it?"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llava")
    llava(folder)
    return folder


def load(model, data, **fields):
    section = ModelSection(model_name_or_path=str(model))
    tokenizer = load_tokenizer(section)
    visual = visual_processor(section, AutoConfig.from_pretrained(model), tokenizer, trust_remote_code=False)
    section = DataSection(dataset_name=str(data), **fields)
    return load_prompts(section, split="train", tokenizer=tokenizer, max_prompt_tokens=500, max_samples=None, visual=visual)


def refused(model, tmp_path, rows, **fields):
    with pytest.raises(DataError) as caught:
        load(model, write_rows(tmp_path / "train.jsonl", rows), **fields)
    return caught.value.message


# --- what a cell may hold


def test_every_form_of_an_image_gives_the_same_bytes(tmp_path):
    data = png(1)
    (tmp_path / "a.png").write_bytes(data)
    uri = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    cells = ["a.png", str(tmp_path / "a.png"), data, {"bytes": data, "path": None}, {"bytes": None, "path": "a.png"}, uri]
    found = [read_images(cell, [tmp_path])[0] for cell in cells]
    assert {image.data for image in found} == {data}
    assert len({image.digest for image in found}) == 1
    assert data_uri(found[0]) == uri
    assert [len(read_images(cell, [tmp_path])) for cell in (None, [], ["a.png", data])] == [0, 0, 2]


def test_a_pil_image_becomes_a_png():
    (image,) = read_images(Image.open(io.BytesIO(png(2))), [])
    assert decode_image(image).tobytes() == Image.open(io.BytesIO(png(2))).tobytes()


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        ("missing.png", "names the image 'missing.png', which cannot be read: No such file or directory"),
        ("https://x.example/a.png", "names an address"),
        ("data:image/png;base64,%%%", "a data: URI that is not base64"),
        ("data:text/plain,hello", "a data: URI that is not base64"),
        ({"bytes": None, "path": None}, "without bytes and without a path"),
        (7, "expected an image .* got 7"),
        (".", "is no file"),
        ("a" * 5000, "cannot be read: File name too long"),
        ("~nobody_here/a.png", "cannot be read: No such file"),
        ({"bytes": 5, "path": "a"}, "`bytes` are no bytes: 5"),
        ({"bytes": "text", "path": None}, "`bytes` are no bytes: 'text'"),
    ],
)
def test_what_is_no_image(tmp_path, cell, reason):
    with pytest.raises(ValueError, match=reason):
        read_images(cell, [tmp_path])


def test_images_are_upright_in_rgb_and_over_white():
    picture = Image.new("RGBA", (2, 1), (255, 0, 0, 0))
    picture.putpixel((1, 0), (0, 0, 255, 255))
    (image,) = read_images(picture, [])
    assert decode_image(image).tobytes() == bytes([255, 255, 255, 0, 0, 255])
    turned = Image.new("RGB", (3, 1))
    exif = turned.getexif()
    exif[0x0112] = 6  # to be turned by a quarter
    buffer = io.BytesIO()
    turned.save(buffer, format="JPEG", exif=exif)
    assert decode_image(*read_images(buffer.getvalue(), [])).size == (1, 3)
    with pytest.raises(ValueError, match="bytes that are no image"):
        decode_image(*read_images(b"\x89PNG and so on", []))


# --- messages


def test_images_stand_before_the_text_of_the_first_user_message():
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, {"role": "user", "content": "v"}]
    parts = [message["content"] for message in in_parts(messages, 2)]
    assert parts == [
        [{"type": "text", "text": "s"}],
        [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "u"}],
        [{"type": "text", "text": "v"}],
    ]
    own = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}]
    assert in_parts(own, 1) == own
    with pytest.raises(ValueError, match=r"places for 1 image .* and the row 2"):
        in_parts(own, 2)
    with pytest.raises(ValueError, match="no user message"):
        in_parts([{"role": "assistant", "content": "a"}], 1)


# --- prompts


def test_rows_of_several_images_one_and_none(model, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.png").write_bytes(png(1))
    rows = [
        {"prompt": QUESTION, "images": ["in/a.png", "in/a.png"], "answer": "x"},
        {"prompt": QUESTION, "images": ["in/a.png"], "answer": "y"},
        {"prompt": QUESTION, "images": [], "answer": "z"},
        {"prompt": QUESTION, "answer": "z"},
    ]
    prompts = load(model, write_rows(tmp_path / "train.jsonl", rows))
    assert [0 if prompt.visual is None else len(prompt.visual.images) for prompt in (prompts[i] for i in range(4))] == [2, 1, 0, 0]
    assert prompts[0].text == "<|im_start|>user\n<image><image>What is it?<|im_end|>\n<|im_start|>assistant\n"
    place = AutoConfig.from_pretrained(model).image_token_id
    assert [prompts[i].token_ids.count(place) for i in range(4)] == [8, 4, 0, 0]
    assert prompts[0].content == QUESTION
    assert [prompts[i].columns["images"] for i in (1, 2)] == [[data_uri(*read_images(png(1), []))], []]
    assert prompts.columns == ("images", "answer")
    assert prompts.first_with_images == 0


@pytest.mark.parametrize("column", ["image", "images"])
def test_the_image_feature_of_datasets(model, tmp_path, column):
    picture = Image.open(io.BytesIO(png(3)))
    feature = ImageFeature() if column == "image" else List(ImageFeature())
    message = List({"role": Value("string"), "content": Value("string")})
    rows = {"prompt": [QUESTION], column: [picture if column == "image" else [picture]]}
    data = Dataset.from_dict(rows, features=Features({"prompt": message, column: feature}))
    data.save_to_disk(tmp_path / "saved")
    data.to_parquet(tmp_path / "table.parquet")
    found = [load(model, tmp_path / name) for name in ("saved", "table.parquet")]
    assert len({prompts.fingerprint for prompts in found}) == 1
    assert torch.equal(*(prompts[0].visual.tensors["pixel_values"] for prompts in found))


@pytest.mark.parametrize("family", list(FAMILIES))
def test_ids_and_pixels_are_those_of_the_models_own_processor(family, tmp_path):
    FAMILIES[family](tmp_path / "model")
    (tmp_path / "a.png").write_bytes(png(1, (20, 12)))
    (tmp_path / "b.png").write_bytes(png(2))
    prompts = load(tmp_path / "model", write_rows(tmp_path / "train.jsonl", [{"prompt": QUESTION, "images": ["a.png", "b.png"]}]))
    if family == "qwen2_vl":  # AutoProcessor wants torchvision for its videos
        from rloo_cli.data.processor import _images_only

        assert set(prompts[0].visual.tensors) == {"pixel_values", "image_grid_thw"}
        from transformers import Qwen2VLProcessor

        processor = _images_only(Qwen2VLProcessor).from_pretrained(tmp_path / "model")
    else:
        processor = AutoProcessor.from_pretrained(tmp_path / "model")
    pictures = [Image.open(tmp_path / name) for name in ("a.png", "b.png")]
    made = processor(text=[prompts[0].text], images=[pictures], return_tensors="pt", add_special_tokens=False)
    assert made["input_ids"][0].tolist() == list(prompts[0].token_ids)
    for name, tensor in prompts[0].visual.tensors.items():
        assert torch.equal(made[name], tensor)


def test_equal_questions_about_different_images_are_no_repetition(model, tmp_path):
    for i in range(3):
        (tmp_path / f"{i}.png").write_bytes(png(i % 2))
    prompts = load(model, write_rows(tmp_path / "train.jsonl", [{"prompt": QUESTION, "image": f"{i}.png"} for i in range(3)]))
    assert prompts.repeats() == (1, (0, 2))


def test_another_image_is_another_fingerprint_and_a_changed_file_is_noticed(model, tmp_path):
    file = tmp_path / "a.png"
    data = write_rows(tmp_path / "train.jsonl", [{"prompt": QUESTION, "image": "a.png"}])
    file.write_bytes(png(1))
    first = load(model, data)
    assert first[0].visual is not None
    file.write_bytes(png(2))
    assert load(model, data).fingerprint != first.fingerprint
    with pytest.raises(DataError, match="an image has changed since the prompts were loaded"):
        first[0]


def test_bad_rows_are_named_with_their_line(model, tmp_path):
    rows = [
        {"prompt": QUESTION, "image": "nowhere.png"},
        {"prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "image"}]}], "image": None},
    ]
    lines = refused(model, tmp_path, rows).splitlines()
    assert "train.jsonl:1: `image` names the image 'nowhere.png', which cannot be read" in lines[0]
    assert "train.jsonl:2: `image` has places for 2 images" in lines[1]
    (tmp_path / "broken.png").write_bytes(b"nothing")
    assert "train.jsonl:1: `image` holds bytes that are no image" in refused(model, tmp_path, [{"prompt": QUESTION, "image": "broken.png"}])
    assert "images need messages" in refused(model, tmp_path, [{"prompt": "What?", "image": "broken.png"}])
    assert "both an `image` and an `images` column" in refused(model, tmp_path, [{"prompt": QUESTION, "image": None, "images": None}])


def test_a_string_below_a_system_prompt_may_have_an_image(model, tmp_path):
    (tmp_path / "a.png").write_bytes(png(1))
    prompts = load(model, write_rows(tmp_path / "train.jsonl", [{"prompt": "What?", "image": "a.png"}]), system_prompt="Look.")
    assert prompts[0].text.startswith("<|im_start|>system\nLook.<|im_end|>\n<|im_start|>user\n<image>What?")


def test_a_model_of_text_takes_neither_images_nor_parts(tmp_path):
    tiny.qwen2().save_pretrained(tmp_path / "text")
    tiny.byte_tokenizer().save_pretrained(tmp_path / "text")
    (tmp_path / "a.png").write_bytes(png(1))
    told = refused(tmp_path / "text", tmp_path, [{"prompt": QUESTION, "image": "a.png"}])
    assert "column `image` holds images, and the model reads text only" in told
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    assert "content in parts, which is for vision-language models" in refused(tmp_path / "text", tmp_path, [{"prompt": parts}])
    parts = [{"role": "user", "content": [{"type": "image"}]}]
    assert "has places for images, and the model reads text only" in refused(tmp_path / "text", tmp_path, [{"prompt": parts}])


def test_text_alone_is_a_prompt_of_a_vision_language_model_too(tmp_path):
    qwen2_vl(tmp_path / "model")
    prompts = load(tmp_path / "model", write_rows(tmp_path / "train.jsonl", [{"prompt": QUESTION}]))
    assert prompts[0].visual is None
    assert prompts.image_column is None
    assert prompts[0].text == "<|im_start|>user\nWhat is it?<|im_end|>\n<|im_start|>assistant\n"
