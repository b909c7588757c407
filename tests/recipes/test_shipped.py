"""Every shipped recipe loads, its rewards exist and fit its data, and what is embedded is what its comments say."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rloo_cli.data.chat import load_tokenizer
from rloo_cli.data.dataset import load_prompts
from rloo_cli.recipe.json_schema import json_schema
from rloo_cli.recipe.load import load_recipe
from rloo_cli.rewards.accuracy import accuracy_reward
from rloo_cli.rewards.models import check_entry, find_entry
from rloo_cli.rewards.python_tests import python_tests_reward

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
SHIPPED = sorted(path for path in RECIPES.rglob("*.yaml"))
LOCAL = ["quickstart.yaml", "smoke.yaml"]


def module_of(path):
    spec = importlib.util.spec_from_file_location(f"shipped_{path.parent.name}_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def said(text):
    return [{"role": "assistant", "content": text}]


@pytest.fixture(scope="module")
def build():
    return module_of(RECIPES / "quickstart" / "build.py")


def test_the_usual_recipes_are_there():
    assert {path.relative_to(RECIPES).as_posix() for path in SHIPPED} >= {
        "quickstart.yaml",
        "smoke.yaml",
        "deepmath.yaml",
        "gsm8k.yaml",
        "code.yaml",
        "template/recipe.yaml",
    }


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.relative_to(RECIPES).as_posix())
def test_recipe_loads_without_a_notice_and_names_its_schema(path):
    loaded = load_recipe(path)
    assert loaded.notices == ()
    first = path.read_text(encoding="utf-8").splitlines()[0]
    schema = re.fullmatch(r"# yaml-language-server: \$schema=(\S+)", first)
    assert schema
    assert (path.parent / schema[1]).resolve() == RECIPES / "recipe.schema.json"


def test_schema_file_is_what_the_command_prints():
    shipped = json.loads((RECIPES / "recipe.schema.json").read_text(encoding="utf-8"))
    assert shipped == json_schema(), "rebuild it: rloo schema > recipes/recipe.schema.json"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.relative_to(RECIPES).as_posix())
def test_rewards_exist_and_fit_the_embedded_columns(path):
    recipe = load_recipe(path).recipe
    names = [recipe.data.dataset_name] if recipe.data.dataset_name is not None else [entry.path for entry in recipe.data.datasets]
    data = Path(names[0])
    columns = None
    if data.exists():
        file = data if data.is_file() else data / "train.jsonl"
        if file.exists():
            columns = set.intersection(*(set(row) for row in rows_of(file))) - {recipe.data.prompt_column}
        else:
            columns = set(pq.read_schema(data / "train.parquet").names) - {recipe.data.prompt_column}
    for entry in recipe.rewards:
        check_entry(entry, find_entry(entry, code_dir=path.parent), columns=columns)


@pytest.mark.parametrize("name", LOCAL)
def test_embedded_prompts_are_read_and_fit(name):
    recipe = load_recipe(RECIPES / name).recipe
    tokenizer = load_tokenizer(recipe.model)
    config = json.loads((Path(recipe.model.model_name_or_path) / "config.json").read_text())
    room = config["max_position_embeddings"] - recipe.generation.max_completion_length
    for split in (recipe.data.dataset_train_split, recipe.data.dataset_test_split):
        assert len(load_prompts(recipe.data, split=split, tokenizer=tokenizer, max_prompt_tokens=room, max_samples=None)) > 0


# --- quickstart -------------------------------------------------------------------------------------------------------


def triples_of(name):
    rows = rows_of(RECIPES / "quickstart" / "data" / name)
    return [tuple(map(int, re.findall(r"\d+", row["prompt"][0]["content"]))) for row in rows], rows


def test_quickstart_answers_are_right_and_the_split_is_the_hash(build):
    for name, held_out in (("train.jsonl", False), ("test.jsonl", True)):
        triples, rows = triples_of(name)
        assert len(set(triples)) == len(rows)
        assert all(build.is_held_out(triple) == held_out for triple in triples)
        assert rows == [build.row(triple) for triple in triples]


def test_quickstart_never_shows_a_held_out_triple_in_any_order():
    train, test = (triples_of(name)[0] for name in ("train.jsonl", "test.jsonl"))
    assert not {tuple(sorted(triple)) for triple in train} & {tuple(sorted(triple)) for triple in test}


def test_quickstart_holds_out_one_triple_in_ten(build):
    generator = [(a, b, c) for a in range(10, 40) for b in range(a, 40) for c in range(b, 40)]
    assert 0.09 < sum(map(build.is_held_out, generator)) / len(generator) < 0.11


def test_quickstart_data_is_what_the_script_writes(build, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["build.py", "--out", str(tmp_path), "--data-only"])
    build.main()
    for name in ("train.jsonl", "test.jsonl"):
        assert (tmp_path / "data" / name).read_bytes() == (RECIPES / "quickstart" / "data" / name).read_bytes()


def test_quickstart_tokenizer_is_what_the_script_builds(build):
    from transformers import AutoTokenizer

    shipped = AutoTokenizer.from_pretrained(RECIPES / "quickstart" / "model")
    assert shipped.get_vocab() == build.build_tokenizer().get_vocab()


def test_quickstart_thoughts_reach_the_reward(build):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(RECIPES / "quickstart" / "model")
    text = build.thought_through((47, 38, 85))
    assert text == r"<think>7+8+5=20, 4+3+8+2=17</think>\boxed{170}"
    ids = tokenizer.encode(text + "<|im_end|>")
    assert ids[-1] == tokenizer.eos_token_id
    assert len(ids) == 30
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert len(tokenizer.encode("<think>")) == len(tokenizer.encode("</think>")) == 1


def test_quickstart_model_is_small_and_stored_in_bfloat16():
    from safetensors import safe_open

    path = RECIPES / "quickstart" / "model" / "model.safetensors"
    assert path.stat().st_size < 1_000_000
    with safe_open(path, "pt") as tensors:
        assert {tensors.get_slice(name).get_dtype() for name in tensors.keys()} == {"BF16"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{170}", 1.0),
        (r"<think>7+8+5=20, 4+3+8+2=17</think>\boxed{170}", 1.0),
        (r"\boxed{17}", 0.0),
        (r"\boxed{1700}", 0.0),
        (r"\boxed{170} or so", 0.0),
        ("170", 0.0),
        ("", 0.0),
    ],
)
def test_quickstart_reward(text, expected):
    reward = module_of(RECIPES / "quickstart" / "reward.py").correct_answer
    assert reward(completions=[said(text)], answer=["170"], prompts=[], completion_ids=[]) == [expected]


# --- the others -------------------------------------------------------------------------------------------------------


def test_smoke_shares_the_quickstart_tokenizer_and_has_no_weights():
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (RECIPES / "smoke" / "model" / name).read_bytes() == (RECIPES / "quickstart" / "model" / name).read_bytes()
    assert not list((RECIPES / "smoke").rglob("*.safetensors"))


def test_smoke_reward_takes_strings():
    reward = module_of(RECIPES / "smoke" / "reward.py").share_of_letters
    assert reward(completions=["ab12", ""], prompts=["", ""]) == [0.5, 0.0]


def test_template_reward_pays_for_the_right_number_of_words():
    reward = module_of(RECIPES / "template" / "reward.py").right_number_of_words
    assert reward(completions=[said("one two three"), said("one"), said("")], words=[3, 3, 3]) == [1.0, 1 / 3, 1 / 4]


def test_gsm8k_gold_is_the_number_after_the_hashes():
    gold = "He earned 12/60 = $<<12/60=0.2>>0.2 a minute.\nIn 50 minutes he earned 0.2 x 50 = $<<0.2*50=10>>10.\n#### 1,010"
    kwargs = load_recipe(RECIPES / "gsm8k.yaml").recipe.rewards[0].kwargs
    completions = [said(r"So \boxed{1010}"), said(r"\boxed{1,010}"), said(r"\boxed{0.2}"), said(r"\boxed{10}")]
    assert accuracy_reward(completions, answer=[gold] * 4, **kwargs) == [1.0, 1.0, 0.0, 0.0]


def test_code_problems_hold_tests_that_code_can_pass():
    rows = rows_of(RECIPES / "code_tests" / "problems.jsonl")
    for row in rows:
        name = re.search(r"`(\w+)\(", row["prompt"][0]["content"])[1]
        assert len(row["tests"]) >= 2
        for test in row["tests"]:
            compile(test, name, "exec")
            assert f"{name}(" in test
    right = said("```python\ndef add_one(n):\n    return n + 1\n```")
    wrong = said("```python\ndef add_one(n):\n    return n\n```")
    assert python_tests_reward([right, wrong], tests=[rows[0]["tests"]] * 2) == [1.0, 0.0]
