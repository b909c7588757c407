from __future__ import annotations

import datetime
import json
import os
import sys
import time

import pytest
from datasets import Dataset, DatasetDict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import byte_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rloo_cli.data import sources
from rloo_cli.data.dataset import RESERVED_COLUMNS, load_prompts
from rloo_cli.errors import DataError, RecipeError
from rloo_cli.recipe.schema import DataSection

ROWS = [{"prompt": f"{i}+{i}=", "answer": 2 * i} for i in range(5)]
CHAT = [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in ROWS]


def load(name, *, split="train", limit=None, most=512, tokenizer=None, **fields):
    data = DataSection(dataset_name=str(name), **fields)
    return load_prompts(data, split=split, tokenizer=tokenizer or byte_tokenizer(), max_prompt_tokens=most, max_samples=limit)


def write(tmp_path, rows, name="train.jsonl"):
    path = tmp_path / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def refused(error_class, *arguments, **keywords):
    with pytest.raises(error_class) as error:
        load(*arguments, **keywords)
    return error.value.message


def test_string_prompts_are_used_as_they_are(tmp_path):
    prompts = load(write(tmp_path, ROWS))
    assert len(prompts) == 5
    prompt = prompts[3]
    assert (prompt.row, prompt.content, prompt.text) == (3, "3+3=", "3+3=")
    assert prompt.token_ids == tuple(b"3+3=")
    assert prompt.columns == {"answer": 6}
    assert prompts.columns == ("answer",)
    assert prompts.column("answer") == [0, 2, 4, 6, 8]
    assert list(prompts.lengths) == [4] * 5
    assert prompts.place(3).endswith("train.jsonl:4")
    assert prompts.dropped == 0
    assert prompts.largest_token == ord("=")
    assert [p.row for p in prompts] == list(range(5))


def test_messages_are_rendered_and_not_given_special_tokens_twice(tmp_path):
    tokenizer = byte_tokenizer()
    prompts = load(write(tmp_path, CHAT))
    prompt = prompts[2]
    assert prompt.content == CHAT[2]["prompt"]
    assert prompt.text == "<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n"
    assert list(prompt.token_ids) == tokenizer.apply_chat_template(CHAT[2]["prompt"], add_generation_prompt=True)["input_ids"]


def test_a_system_prompt_turns_strings_into_messages(tmp_path):
    prompt = load(write(tmp_path, ROWS), system_prompt="be brief")[0]
    assert prompt.content == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "0+0="}]
    assert prompt.text.startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n0+0=<|im_end|>")


def test_the_prompt_column_can_have_another_name(tmp_path):
    path = write(tmp_path, [{"question": row["prompt"], "prompt": "other"} for row in ROWS])
    prompts = load(path, prompt_column="question")
    assert prompts[1].content == "1+1="
    assert prompts[1].columns == {"prompt": "other"}


@pytest.mark.parametrize("rows", [ROWS, CHAT], ids=["strings", "messages"])
def test_every_format_gives_the_same_prompts(tmp_path, rows):
    dataset = Dataset.from_list(rows)
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder", rows)
    (tmp_path / "array.json").write_text(json.dumps(rows, indent=1))
    dataset.to_parquet(tmp_path / "x.parquet")
    dataset.save_to_disk(tmp_path / "saved")
    DatasetDict(train=dataset.select([4, 3, 2, 1, 0]).select([4, 3, 2, 1, 0]), test=dataset).save_to_disk(tmp_path / "saved_dict")
    names = ["folder", "saved_dict"]  # each of these starts a process where the prompts are messages
    if rows is ROWS:
        dataset.to_csv(tmp_path / "x.csv")
        names += ["folder/train.jsonl", "array.json", "x.parquet", "saved", "x.csv"]
    loaded = [load(tmp_path / name) for name in names]
    assert len({prompts.fingerprint for prompts in loaded}) == 1
    assert all([prompts[i] for i in range(5)] == [loaded[0][i] for i in range(5)] for prompts in loaded)


def test_a_folder_holds_several_splits(tmp_path):
    write(tmp_path, ROWS)
    write(tmp_path, ROWS[:2], "test.jsonl")
    assert [len(load(tmp_path, split=split)) for split in ("train", "test")] == [5, 2]


def test_the_fingerprint_follows_content_and_order(tmp_path):
    variants = [ROWS, ROWS[::-1], ROWS[:4], [{**row, "answer": 0} for row in ROWS], [{**row, "prompt": "x"} for row in ROWS]]
    prints = {load(write(tmp_path, rows, f"{i}.jsonl")).fingerprint for i, rows in enumerate(variants)}
    assert len(prints) == 5


def test_shards_are_one_split(tmp_path):
    write(tmp_path, ROWS[:2], "train-00000-of-00002.jsonl")
    write(tmp_path, ROWS[2:], "train-00001-of-00002.jsonl")
    prompts = load(tmp_path)
    assert [p.content for p in prompts] == [row["prompt"] for row in ROWS]
    assert prompts.place(3).endswith("train-00001-of-00002.jsonl:2")
    assert len(load(tmp_path, limit=3)) == 3


def test_clones_of_hub_repositories(tmp_path):
    for config in ("main", "socratic"):
        (tmp_path / config).mkdir()
        Dataset.from_list(ROWS).to_parquet(tmp_path / config / "train-00000-of-00001.parquet")
    (tmp_path / "data").mkdir()
    write(tmp_path / "data", ROWS, "test-00000-of-00001.jsonl")
    assert load(tmp_path, dataset_config="main")[0].content == "0+0="
    assert load(tmp_path, split="test")[0].content == "0+0="
    assert "no folder `mian`" in refused(RecipeError, tmp_path, dataset_config="mian")


def test_unknown_splits_name_those_that_exist(tmp_path):
    write(tmp_path, ROWS)
    write(tmp_path, ROWS, "validation.jsonl")
    DatasetDict(train=Dataset.from_list(ROWS)).save_to_disk(tmp_path / "dict")
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    assert refused(RecipeError, tmp_path, split="valid").endswith(
        "has no split `valid`; it has: train, validation. Did you mean `validation`?"
    )
    for name in ("dict", "one", "train.jsonl"):
        assert "it has: train." in refused(RecipeError, tmp_path / name, split="test")


def test_names_that_resolve_to_nothing(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    write(tmp_path, ROWS)
    Dataset.from_list(ROWS).to_parquet(tmp_path / "train.parquet")
    assert "holds no data" in refused(RecipeError, tmp_path / "empty")
    assert "cannot read .txt" in refused(RecipeError, tmp_path / "notes.txt")
    assert "no such file or folder" in refused(RecipeError, tmp_path / "gone.jsonl")
    assert "no such file or folder" in refused(RecipeError, "./gone")
    assert "keep one format" in refused(RecipeError, tmp_path)
    assert "has no configurations" in refused(RecipeError, tmp_path / "train.jsonl", dataset_config="x")


def test_a_data_set_that_nobody_has_is_told_at_once():
    begin = time.monotonic()
    message = refused(RecipeError, "nobody/nothing")
    assert message.startswith("data.dataset_name: no data set `nobody/nothing`")
    assert "\n" not in message
    assert time.monotonic() - begin < 10


def test_all_bad_rows_are_found_at_once(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text(
        '{"prompt": "fine"}\n{"prompt" 1}\n[]\n{"prompt": ""}\n{"promt": "x"}\n{"prompt": 4}\n{"prompt": [{"role": "user", "content": "x"}]}\n'
    )
    lines = [line.rpartition("train.jsonl:")[2] for line in refused(DataError, path).splitlines()]
    assert lines == [
        "2: not JSON: expecting ':' delimiter at column 11",
        "3: expected an object with columns, got []",
        "4: `prompt` is empty",
        "5: `prompt` is missing or null; did you mean `promt`?",
        "6: `prompt` expected a string or a list of messages, got 4",
        "1; keep to one kind",
    ]


def test_table_rows_are_named_by_number(tmp_path):
    Dataset.from_dict({"prompt": ["a", None, "c"]}).save_to_disk(tmp_path / "saved")
    DatasetDict(train=Dataset.from_dict({"prompt": ["a", ""]})).save_to_disk(tmp_path / "dict")
    assert refused(DataError, tmp_path / "saved").endswith("saved row 1: `prompt` is missing or null")
    assert refused(DataError, tmp_path / "dict").endswith("dict:train row 1: `prompt` is empty")


def test_a_missing_prompt_column_is_one_line_with_candidates(tmp_path):
    message = refused(DataError, write(tmp_path, [{"question": "x", "answer": "y"}] * 100))
    assert message.endswith("no column `prompt`; it has: question, answer. Did you mean `data.prompt_column: question`?")
    assert "promts" in refused(DataError, write(tmp_path, [{"promts": "x", "question": "y"}]))


@pytest.mark.parametrize("name", list(RESERVED_COLUMNS))
def test_columns_with_the_name_of_an_argument(tmp_path, name):
    assert f"column `{name}` has the name of an argument" in refused(DataError, write(tmp_path, [{"prompt": "x", name: 1}]))


def test_images_and_bytes_are_refused(tmp_path):
    Dataset.from_dict({"prompt": ["a"], "picture": [{"bytes": b"x", "path": None}]}).to_parquet(tmp_path / "a.parquet")
    Dataset.from_dict({"prompt": ["a"], "blob": [[b"x"]]}).to_parquet(tmp_path / "b.parquet")
    assert "`picture` holds images or audio" in refused(DataError, tmp_path / "a.parquet")
    assert "`blob` holds binary data" in refused(DataError, tmp_path / "b.parquet")
    assert "the model reads text only" in refused(DataError, write(tmp_path, [{"prompt": "x", "image": "a.png"}]))


def test_values_of_tables_become_json(tmp_path):
    when = datetime.datetime(2024, 5, 17, 12, 30)
    columns = {"prompt": ["a"], "when": [when], "day": [when.date()], "span": [datetime.timedelta(minutes=1)], "nan": [float("nan")]}
    Dataset.from_dict(columns).save_to_disk(tmp_path / "saved")
    expected = {"when": "2024-05-17T12:30:00", "day": "2024-05-17", "span": 60.0, "nan": None}
    prompts = load(tmp_path / "saved")
    assert prompts[0].columns == expected
    assert prompts.column("when") == ["2024-05-17T12:30:00"]
    json.dumps(expected, allow_nan=False)


def test_files_that_hold_nothing_or_junk(tmp_path):
    for name, content in {"a.jsonl": b"", "b.json": b"[]", "c.csv": b"prompt\n", "d.parquet": b"PAR1 junk"}.items():
        (tmp_path / name).write_bytes(content)
    for name in ("a.jsonl", "b.json", "c.csv"):
        assert refused(DataError, tmp_path / name).endswith("holds no rows.")
    assert "not a readable Parquet file" in refused(DataError, tmp_path / "d.parquet")


def test_damaged_saved_data_sets(tmp_path):
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    arrow = next((tmp_path / "saved").glob("*.arrow"))
    arrow.write_bytes(arrow.read_bytes()[:100])
    assert "this saved data set cannot be read" in refused(DataError, tmp_path / "saved")
    (tmp_path / "saved" / "dataset_info.json").write_text('{"features": {"prompt": {"_type": {"x": "y"}}}}')
    assert "this saved data set cannot be read" in refused(DataError, tmp_path / "saved")


VALID = {
    "x.jsonl": b"".join(json.dumps(row).encode() + b"\n" for row in ROWS),
    "x.json": json.dumps(ROWS, indent=1).encode(),
    "x.csv": b'prompt,answer\r\n"a\nb",1\r\nx,"y ""z"""\r\n',
}
SCRAPS = [b'"', b"{", b"}", b"[", b"]", b",", b"\n", b"\r", b"\0", b"\xff", b"\\ud800", b"null", b"1e999", b'{"prompt": 3}', b"NaN", b""]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(VALID)), st.lists(st.tuples(st.integers(0, 200), st.integers(0, 20), st.sampled_from(SCRAPS)), max_size=4))
def test_damaged_text_is_read_or_refused_and_nothing_else(tmp_path, name, edits):
    content = VALID[name]
    for position, length, scrap in edits:
        content = content[:position] + scrap + content[position + length :]
    (tmp_path / name).write_bytes(content)
    try:
        prompts = load(tmp_path / name)
    except DataError:
        return
    json.dumps([prompt.columns for prompt in prompts], allow_nan=False)


def test_overlong_prompts(tmp_path):
    path = write(tmp_path, [{"prompt": "x" * length} for length in (3, 9, 2, 4, 30)])
    message = refused(DataError, path, most=4).splitlines()
    assert message[0].endswith("train.jsonl:2: the prompt has 9 tokens; 4 is the most")
    assert message[1].endswith("train.jsonl:5: the prompt has 30 tokens; 4 is the most")
    assert "overlong_prompts: drop" in message[2]
    prompts = load(path, most=4, overlong_prompts="drop")
    assert [len(p.token_ids) for p in prompts] == [3, 2, 4]
    assert (prompts.dropped, prompts[2].row) == (2, 2)
    assert prompts.place(2).endswith("train.jsonl:4")
    assert "every prompt is longer" in refused(DataError, path, most=1, overlong_prompts="drop")


def test_columns_follow_dropped_rows(tmp_path):
    path = write(tmp_path, [{"prompt": "x" * n, "n": n} for n in (1, 9, 2)])
    prompts = load(path, most=5, overlong_prompts="drop")
    assert prompts.column("n") == [p.columns["n"] for p in prompts] == [1, 2]


def test_a_prompt_without_tokens(tmp_path):
    words = Tokenizer(models.WordLevel({"a": 0}))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    message = refused(DataError, write(tmp_path, [{"prompt": "a"}, {"prompt": "  "}]), tokenizer=tokenizer)
    assert message.endswith("train.jsonl:2: the prompt has no tokens")


def test_rows_at_which_the_template_fails(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% if '1' in messages[0].content %}{{ raise_exception('no ones') }}{% endif %}{{ messages[0].content }}"
    message = refused(DataError, write(tmp_path, CHAT), tokenizer=tokenizer)
    assert message.endswith("train.jsonl:2: the chat template failed: TemplateError: no ones")


def test_messages_without_a_template(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    assert "model.chat_template_path" in refused(RecipeError, write(tmp_path, CHAT), tokenizer=tokenizer)
    assert len(load(write(tmp_path, ROWS), tokenizer=tokenizer)) == 5


def test_max_samples_and_duplicates(tmp_path):
    path = write(tmp_path, [ROWS[0]] * 4 + [{"prompt": None}])
    prompts = load(path, limit=4)
    assert [p.content for p in prompts] == ["0+0="] * 4
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    assert len(load(tmp_path / "saved", limit=2)) == 2


def test_a_prompt_of_ten_megabytes(tmp_path):
    path = write(tmp_path, [{"prompt": "word " * 2_000_000}, {"prompt": "short"}])
    assert "the prompt has at least 833,333 tokens; 512 is the most" in refused(DataError, path)


def test_token_ids_take_four_bytes_each(tmp_path):
    prompts = load(write(tmp_path, [{"prompt": "x" * 100}] * 2000))
    buffers = [value for value in vars(prompts).values() if hasattr(value, "itemsize")]
    assert sum(sys.getsizeof(buffer) for buffer in buffers) < 2000 * (100 * 4 + 3 * 8) * 1.2


def test_rows_beyond_the_memory_are_refused(tmp_path, monkeypatch):
    bomb = tmp_path / "x.parquet"
    Dataset.from_dict({"prompt": ["a" * 1000] * 100_000}).to_parquet(bomb)
    text = write(tmp_path, ROWS * 1000)
    assert bomb.stat().st_size < 1_000_000
    monkeypatch.setattr(sources, "MEMORY_SHARE", 1e-8)
    for path in (bomb, text):
        assert "of memory are free. Read fewer rows (data.max_train_samples)" in refused(DataError, path)
    assert len(load(text, limit=3)) == 3
    monkeypatch.setattr(sources, "MEMORY_SHARE", 1e-3)
    assert len(load(bomb, limit=3, most=1000)) == 3


def test_pipes_and_devices_are_not_opened(tmp_path):
    os.mkfifo(tmp_path / "x.jsonl")
    for path in (tmp_path / "x.jsonl", "/dev/zero"):
        assert "is a pipe or a device" in refused(RecipeError, path)


def test_a_cut_off_parquet_file(tmp_path):
    Dataset.from_list(ROWS).to_parquet(tmp_path / "x.parquet")
    data = (tmp_path / "x.parquet").read_bytes()
    for length in (0, 1, len(data) // 2, len(data) - 1):
        (tmp_path / "x.parquet").write_bytes(data[:length])
        assert "not a readable Parquet file" in refused(DataError, tmp_path / "x.parquet")


def test_repeated_prompts_are_counted(tmp_path):
    prompts = load(write(tmp_path, [ROWS[0], ROWS[1], ROWS[0], ROWS[1], ROWS[1], ROWS[2]]))
    assert prompts.repeats() == (3, (0, 2))
    assert load(write(tmp_path, ROWS)).repeats() == (0, None)
