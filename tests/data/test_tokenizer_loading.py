from __future__ import annotations

import json

import pytest
from tiny import byte_tokenizer

from rloo_cli.data.chat import load_tokenizer
from rloo_cli.errors import RecipeError
from rloo_cli.recipe.schema import ModelSection

QWEN = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}


def folder(tmp_path, *, has_tokenizer=True, **files):
    """A model folder; `files` are further JSON files by stem."""
    if has_tokenizer:
        byte_tokenizer().save_pretrained(tmp_path)
    for stem, content in {"config": QWEN, **files}.items():
        (tmp_path / f"{stem}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return tmp_path


def load(path, *, trust_remote_code=False, **fields):
    return load_tokenizer(ModelSection(model_name_or_path=str(path), **fields), trust_remote_code=trust_remote_code)


def test_a_local_tokenizer(tmp_path):
    tokenizer = load(folder(tmp_path, config={"model_type": "llama"}))
    assert tokenizer("ab<|eos|>")["input_ids"] == [97, 98, 257]
    assert "im_start" in tokenizer.chat_template


def test_chat_template_path_replaces_the_template(tmp_path):
    (tmp_path / "t.jinja").write_text("{{ messages[0].content }}é", encoding="utf-8")
    tokenizer = load(folder(tmp_path), chat_template_path=str(tmp_path / "t.jinja"))
    assert tokenizer.chat_template == "{{ messages[0].content }}é"


@pytest.mark.parametrize("config", [QWEN, {"model_type": "llama"}, {"model_type": "gpt2"}, {"model_type": "no-such-type"}])
def test_a_folder_without_tokenizer(tmp_path, config):
    with pytest.raises(RecipeError, match="has no tokenizer"):
        load(folder(tmp_path, has_tokenizer=False, config=config))


@pytest.mark.parametrize("stem", ["config", "tokenizer_config"])
def test_code_in_the_folder_needs_the_flag(tmp_path, stem):
    canary = tmp_path / "canary"
    (tmp_path / "evil.py").write_text(f"open({str(canary)!r}, 'w')\n")
    entry = {"auto_map": {"AutoConfig": "evil.C", "AutoTokenizer": ["evil.T", None]}, "model_type": "evil"}
    with pytest.raises(RecipeError, match=f"{stem}.json: names Python code of its own.*--trust-remote-code"):
        load(folder(tmp_path, **{stem: entry}))
    assert not canary.exists()


@pytest.mark.parametrize(
    ("stem", "content"),
    [
        ("config", "{"),
        ("config", "[]"),
        ("tokenizer_config", "[]"),
        ("tokenizer", "{}"),
        ("tokenizer", "[]"),
        ("tokenizer", "{"),
        ("tokenizer", '{"added_tokens": []}'),
    ],
)
def test_damaged_files_give_one_line(tmp_path, stem, content):
    with pytest.raises(RecipeError, match=r"^model.model_name_or_path: ") as error:
        load(folder(tmp_path, **{stem: content}))
    assert "\n" not in error.value.message


def test_names_that_resolve_to_nothing(tmp_path):
    for name, message in {
        str(tmp_path / "nowhere"): "no such folder",
        "./nowhere": "no such folder",
        "nobody/nothing": "no such model",
        "not valid!": "no such model",
    }.items():
        with pytest.raises(RecipeError, match=message) as error:
            load(name)
        assert "\n" not in error.value.message


def test_chat_template_paths_that_cannot_be_used(tmp_path):
    (tmp_path / "big.jinja").write_text("x" * 2**21)
    (tmp_path / "latin.jinja").write_bytes(b"\xe9")
    folder(tmp_path)
    for name, message in {"no.jinja": "no such file", "big.jinja": "larger than 1 MiB", "latin.jinja": "UTF-8"}.items():
        with pytest.raises(RecipeError, match=f"model.chat_template_path: .*{message}"):
            load(tmp_path, chat_template_path=str(tmp_path / name))
