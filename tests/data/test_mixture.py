"""Mixtures: every row once a pass, or sets by weight, as functions of (seed, position)."""

import collections
import json
from pathlib import Path

import pytest
import tiny

from rloo_cli.data.mixture import BLOCK, Mixture
from rloo_cli.data.prompt_loading import Reader, load_evaluation_prompts, load_training_prompts
from rloo_cli.errors import RecipeError
from rloo_cli.recipe.schema import DataSection

READER = Reader(tokenizer=tiny.byte_tokenizer(), max_prompt_tokens=100, is_bounded=True)


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("sums.jsonl", [{"prompt": f"sum {i}", "answer": str(i)} for i in range(12)])
    write("words.jsonl", [{"question": f"word {i}", "hint": f"h{i}", "spare": 0} for i in range(5)])
    write("held.jsonl", [{"prompt": f"held {i}", "answer": str(i)} for i in range(3)])


def write(name, rows):
    with Path(name).open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def section(first=None, second=None, **fields):
    entries = [
        {"path": "sums.jsonl", **(first or {})},
        {"path": "words.jsonl", "prompt_column": "question", "columns": ["question", "hint"], **(second or {})},
    ]
    return DataSection.model_validate({"datasets": entries, "shuffle_buffer_size": 4, **fields})


def draw(prompts, first, count, *, seed=3, shuffle=True):
    return prompts.draw(first, count, seed=seed, shuffle=shuffle, check_stop=lambda: None)


def texts(found):
    return [prompt.text for prompt in found]


ALL = {f"sum {i}" for i in range(12)} | {f"word {i}" for i in range(5)}
KINDS = {
    "every row once": ({}, {}, {}),
    "weights": ({"weight": 3}, {"weight": 1}, {}),
    "streamed": ({}, {}, {"dataset_streaming": True}),
    "streamed with weights": ({"weight": 3}, {"weight": 1}, {"dataset_streaming": True}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_any_position_gives_what_a_pass_from_the_start_gives(kind):
    first, second, fields = KINDS[kind]
    made = lambda: load_training_prompts(section(first, second, **fields), READER)  # noqa: E731
    whole = draw(made(), 0, 60)
    for start in range(0, 56, 3):
        assert draw(made(), start, 4) == whole[start : start + 4]
    back = made()
    assert [draw(back, start, 5) for start in (50, 7, 22)] == [whole[50:55], whole[7:12], whole[22:27]]
    assert {prompt.text: prompt.row for prompt in whole}.keys() == ALL
    rows = collections.defaultdict(set)
    for prompt in whole:
        rows[prompt.row].add(prompt.text)
    assert all(len(found) == 1 for found in rows.values())  # a row number names one prompt
    assert draw(made(), 0, 60, seed=4) != whole


@pytest.mark.parametrize("kind", KINDS)
def test_columns_that_a_set_lacks_are_none(kind):
    first, second, fields = KINDS[kind]
    prompts = load_training_prompts(section(first, second, **fields), READER)
    assert prompts.columns == ("answer", "hint")
    for prompt in draw(prompts, 0, 40):
        number = prompt.text.split()[1]
        assert prompt.columns == ({"answer": number, "hint": None} if "sum" in prompt.text else {"answer": None, "hint": f"h{number}"})


@pytest.mark.parametrize("streaming", [False, True])
def test_without_weights_each_pass_holds_every_row_once(streaming):
    prompts = load_training_prompts(section(dataset_streaming=streaming), READER)
    found = texts(draw(prompts, 0, 34))
    assert set(found[:17]) == set(found[17:]) == ALL
    if streaming:
        assert {text.split()[0] for text in found[:12]} == {"sum"}  # set after set
    else:
        assert prompts.size == len(prompts) == 17
        assert {text.split()[0] for text in found[:12]} == {"sum", "word"}
        assert prompts.passes(34) == 2


def test_weights_say_how_often_each_set_gives_a_prompt():
    prompts = load_training_prompts(section({"weight": 3}, {"weight": 1}), READER)
    count = 3 * BLOCK
    found = collections.Counter(text.split()[0] for text in texts(draw(prompts, BLOCK // 2, count)))
    assert abs(found["word"] / count - 0.25) < 4 * (0.25 * 0.75 / count) ** 0.5
    words = [text for text in texts(draw(prompts, 0, 400)) if "word" in text]
    for start in range(0, 50, 5):
        assert len(set(words[start : start + 5])) == 5  # each set goes through its own rows, again and again


def test_fractions_keep_the_first_rows_and_repeat_none():
    prompts = load_training_prompts(section({"fraction": 1}, {"fraction": 1}), READER)
    assert sorted(texts(draw(prompts, 0, len(prompts)))) == sorted([f"sum {i}" for i in range(5)] + [f"word {i}" for i in range(5)])
    shares = load_training_prompts(section({"fraction": 0.8}, {"fraction": 0.2}), READER)
    assert (len(shares), [len(part) for part in shares.parts()]) == (15, [12, 3])


def test_max_train_samples_is_of_each_set():
    assert [len(part) for part in load_training_prompts(section(max_train_samples=4), READER).parts()] == [4, 4]


def test_evaluation_is_on_the_sets_that_name_a_test_split():
    one = load_evaluation_prompts(section({"path": "held.jsonl", "test_split": "train"}), READER, limit=None)
    assert texts(one[i] for i in range(len(one))) == ["held 0", "held 1", "held 2"]
    both = load_evaluation_prompts(section(dataset_test_split="train"), READER, limit=2)
    assert texts(both[i] for i in range(len(both))) == ["sum 0", "sum 1", "word 0", "word 1"]
    assert both[3].columns == {"answer": None, "hint": "h1"}


def test_the_fingerprint_knows_the_sets_and_how_they_are_mixed():
    made = [
        load_training_prompts(section(*entries), READER).fingerprint
        for entries in (({}, {}), ({"weight": 1}, {"weight": 1}), ({"weight": 2}, {"weight": 1}))
    ]
    assert len(set(made)) == 3
    assert load_training_prompts(section(), READER).fingerprint == made[0]


def test_errors_name_the_entry():
    with pytest.raises(RecipeError, match=r"^data\.datasets\[1\]\.path: no such file or folder: \./none\.jsonl"):
        load_training_prompts(section({}, {"path": "./none.jsonl"}), READER)
    with pytest.raises(RecipeError, match=r"^data\.datasets\[0\]\.split: sums\.jsonl has no split `test`; it has: train"):
        load_training_prompts(section({"split": "test"}), READER)


def test_a_mixture_of_one_set_is_that_set():
    alone = load_training_prompts(DataSection.model_validate({"datasets": [{"path": "sums.jsonl"}]}), READER)
    assert isinstance(alone, Mixture)
    assert draw(alone, 0, 30) == draw(load_training_prompts(DataSection(dataset_name="sums.jsonl"), READER), 0, 30)
