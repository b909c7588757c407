import json
import os
import struct

import pytest
from tiny import byte_tokenizer, qwen2

from rloo_cli.data.chat import load_tokenizer
from rloo_cli.data.model_folder import check_files, check_weights
from rloo_cli.errors import RecipeError
from rloo_cli.recipe.schema import ModelSection


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound")
    qwen2().save_pretrained(folder, max_shard_size="50KB")
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(sound, tmp_path, monkeypatch):
    """A sound model in two or more shards, to be damaged; links, as the hub's cache has them."""
    for path in sound.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder, name, content):
    (folder / name).unlink(missing_ok=True)
    (folder / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())


def change(folder, name, **values):
    write(folder, name, json.loads((folder / name).read_text()) | values)


def check(folder):
    check_files(folder, trust_remote_code=False)
    check_weights(ModelSection(model_name_or_path=str(folder)))


def refusal(folder):
    with pytest.raises(RecipeError) as caught:
        check(folder)
    assert "\n" not in caught.value.message
    return caught.value.message.removeprefix("model.model_name_or_path: ")


def test_a_sound_folder_passes(folder):
    check(folder)
    assert len(list(folder.glob("*.safetensors"))) > 1


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"[1]", "expected an object, got [1]."),
        (b"{", "is not JSON: "),
        (b"\xff\xfe{\0", "is not JSON: "),
        (b"[" * 100_000, "is nested too deeply."),
        (b"", "is not JSON: "),
    ],
)
def test_a_file_that_is_no_object_is_named(folder, name, content, told):
    write(folder, name, content)
    assert refusal(folder).startswith(f"{name}: {told}")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("n_layer", 3000),
        ("num_labels", 10**9),
        ("num_experts", 10**7),
        ("hidden_size", 10**15),
        ("vocab_size", -(10**15)),
        ("text_config", {"num_hidden_layers": 10**9}),
    ],
)
def test_a_number_that_no_model_has_is_named(folder, field, value):
    change(folder, "config.json", **{field: value})
    assert "cannot be right" in refusal(folder)


@pytest.mark.parametrize("value", ["x", [[1]], True, 1.5, {"a": 1}, ["</s>"], 10**30, [3, -2]])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_an_end_that_is_no_token_is_named(folder, name, value):
    change(folder, name, eos_token_id=value)
    assert refusal(folder).startswith(f"{name}: `eos_token_id` is ")


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "chat_template.jinja"])
def test_a_gigabyte_is_not_read(folder, name):
    write(folder, name, b"")
    os.truncate(folder / name, 1 << 30)
    assert refusal(folder).startswith(f"{name}: has 1,073,741,824 bytes")


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "model-00001-of-00002.safetensors", "model.safetensors"])
def test_a_pipe_is_not_opened(folder, name):
    for shard in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"] if name == "model.safetensors" else []:
        shard.unlink()
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    if name.startswith("model-"):
        change(folder, "model.safetensors.index.json", weight_map={"a": name})
    assert refusal(folder) == f"{name}: is not a regular file."


def test_a_link_to_nowhere_and_a_circle_of_links_are_named(folder):
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("nowhere")
    assert refusal(folder) == "config.json: is a link to nowhere."
    (folder / "nowhere").symlink_to("config.json")
    assert refusal(folder).startswith("config.json: cannot be read: Too many levels of symbolic links")


@pytest.mark.parametrize(
    "name", ["../evil.safetensors", "/evil.safetensors", "a/b.safetensors", "pytorch_model.bin", "", "..", ".safetensors/.."]
)
def test_a_shard_outside_the_folder_is_refused(folder, name):
    change(folder, "model.safetensors.index.json", weight_map={"a": name})
    assert refusal(folder).startswith(f"model.safetensors.index.json: names {name!r}; a shard is a .safetensors file of the same folder")


@pytest.mark.parametrize("value", [None, [], {}, {"a": 1}, {"a": None}])
def test_an_index_without_files_is_refused(folder, value):
    change(folder, "model.safetensors.index.json", weight_map=value)
    assert refusal(folder).endswith("has no `weight_map` from weights to files.")


def test_a_missing_shard_is_named(folder):
    shards = sorted(folder.glob("*.safetensors"))
    shards[1].unlink()
    assert refusal(folder).startswith(
        f"model.safetensors.index.json: names {len(shards)} files, of which 1 are missing, such as {shards[1].name}"
    )


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda data: b"", id="empty"),
        pytest.param(lambda data: data[:4], id="four bytes"),
        pytest.param(lambda data: data[:-1], id="one byte short"),
        pytest.param(lambda data: data[: len(data) // 2], id="half"),
        pytest.param(lambda data: struct.pack("<Q", 1 << 62) + data[8:], id="header of 4 EiB"),
        pytest.param(lambda data: struct.pack("<Q", 99_000_000) + data[8:], id="header beyond the file"),
        pytest.param(lambda data: struct.pack("<Q", 2) + b"[]" + data[8:], id="header that is a list"),
        pytest.param(lambda data: data.replace(b'"data_offsets":[0', b'"data_offsets":[9'), id="lying offsets"),
        pytest.param(lambda data: b"\x80\x04\x95" + data, id="a pickle"),
    ],
)
def test_a_damaged_shard_is_named(folder, damage):
    shard = sorted(folder.glob("*.safetensors"))[0]
    write(folder, shard.name, damage(shard.read_bytes()))
    assert refusal(folder).startswith(f"{shard.name}: is damaged or cut off (")


def test_a_folder_of_pickles_is_refused_before_anything_reads_them(folder):
    for path in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        path.unlink()
    assert refusal(folder).startswith(".: holds no weights (model.safetensors).")
    write(folder, "pytorch_model.bin", b"\x80\x04")
    assert refusal(folder).startswith(".: holds no .safetensors file, only pytorch_model.bin, which is a pickle")
    check_weights(ModelSection(model_name_or_path=str(folder), random_weights=True))


def test_code_of_the_folder_is_refused_with_the_flag_named(folder):
    change(folder, "config.json", auto_map={"AutoConfig": "evil.C"})
    assert "pass --trust-remote-code" in refusal(folder)
    check_files(folder, trust_remote_code=True)


def test_loading_the_tokenizer_looks_at_the_folder(folder):
    change(folder, "config.json", num_hidden_layers=10**9)
    with pytest.raises(RecipeError, match="cannot be right"):
        load_tokenizer(ModelSection(model_name_or_path=str(folder)))
