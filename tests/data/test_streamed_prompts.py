"""A stream's order is a function of (seed, position), whichever way one comes there; its rows are checked as they arrive."""

import json
import tracemalloc

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny

from rloo_cli.data.prompt_loading import Reader, load_training_prompts
from rloo_cli.data.streamed_prompts import StreamedPrompts
from rloo_cli.errors import DataError, RecipeError
from rloo_cli.recipe.schema import DataSection

TOKENIZER = tiny.byte_tokenizer()


def reader(limit=50):
    return Reader(tokenizer=TOKENIZER, max_prompt_tokens=limit, is_bounded=True)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(count, start=0):
    return [{"prompt": f"question {i}", "answer": str(i)} for i in range(start, start + count)]


def stream(path, *, window=4, limit=50, **fields):
    return load_training_prompts(
        DataSection(dataset_name=str(path), dataset_streaming=True, shuffle_buffer_size=window, **fields), reader(limit)
    )


def draw(prompts, first, count, *, seed=7, shuffle=True):
    return prompts.draw(first, count, seed=seed, shuffle=shuffle, check_stop=lambda: None)


def texts(found):
    return [prompt.text for prompt in found]


@pytest.fixture
def file(tmp_path):
    return write(tmp_path / "train.jsonl", rows_of(10))


def test_without_shuffling_prompts_come_in_the_order_of_the_file_and_begin_again(file):
    found = draw(stream(file), 0, 25, shuffle=False)
    assert texts(found) == [f"question {i % 10}" for i in range(25)]
    assert [prompt.row for prompt in found[:10]] == list(range(10))
    assert found[3].columns == {"answer": "3"}


def test_each_pass_holds_each_row_once_shuffled_within_windows_and_anew(file):
    found = [int(prompt.columns["answer"]) for prompt in draw(stream(file), 0, 20)]
    assert [sorted(found[i : i + 4]) for i in (0, 4, 10, 14)] == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2
    assert sorted(found[:10]) == sorted(found[10:]) == list(range(10))
    assert found[:10] != found[10:]
    assert found != [int(prompt.columns["answer"]) for prompt in draw(stream(file), 0, 20, seed=8)]


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_any_position_gives_what_a_pass_from_the_start_gives(drop, shuffle, tmp_path):
    rows = rows_of(11)
    if drop:
        for i in (0, 4, 5, 6, 7, 10):  # a whole window of them
            rows[i]["prompt"] *= 9
    path = write(tmp_path / "train.jsonl", rows)
    fields = {"overlong_prompts": "drop"} if drop else {}
    whole = draw(stream(path, **fields), 0, 40, shuffle=shuffle)
    for first in range(0, 36):
        assert draw(stream(path, **fields), first, 4, shuffle=shuffle) == whole[first : first + 4]
    again = stream(path, **fields)
    for first in (20, 3, 33, 0, 12, 11):  # forward and back
        assert draw(again, first, 3, shuffle=shuffle) == whole[first : first + 3]
    assert len({prompt.row for prompt in whole}) == (5 if drop else 11)


def test_passes_are_known_once_a_second_was_begun_however_one_came_there(file):
    expected = [None] * 11 + [i / 10 for i in range(11, 30)]
    running = stream(file)
    found = []
    for position in range(30):
        found.append(running.passes(position))
        draw(running, position, 1)
    assert found == expected
    assert [stream(file).passes(position) for position in range(30)] == expected
    assert running.size is None


@pytest.mark.parametrize("kind", ["parquet", "saved"])
def test_tables_are_streamed_like_text(kind, file, tmp_path):
    if kind == "parquet":
        path = tmp_path / "train.parquet"
        pq.write_table(pa.Table.from_pylist(rows_of(10)), path, row_group_size=3)
    else:
        path = tmp_path / "saved"
        datasets.Dataset.from_list(rows_of(10)).save_to_disk(str(path))
    assert draw(stream(path), 0, 25) == draw(stream(file), 0, 25)


def test_shards_follow_each_other_and_max_train_samples_ends_the_pass(tmp_path):
    write(tmp_path / "train-00000-of-00002.jsonl", rows_of(3))
    write(tmp_path / "train-00001-of-00002.jsonl", rows_of(4, start=3))
    assert texts(draw(stream(tmp_path), 0, 9, shuffle=False)) == [f"question {i % 7}" for i in range(9)]
    assert texts(draw(stream(tmp_path, max_train_samples=5), 0, 9, shuffle=False)) == [f"question {i % 5}" for i in range(9)]


def test_blank_lines_are_skipped_in_reading_and_in_passing_over(tmp_path):
    lines = [json.dumps(row) for row in rows_of(9)]
    (tmp_path / "train.jsonl").write_text("\n\n".join(lines) + "\n\n")
    assert texts(draw(stream(tmp_path / "train.jsonl"), 8, 2, shuffle=False)) == ["question 8", "question 0"]


# --- rows as they arrive ---------------------------------------------------------------------------------------------------------


BAD = {
    '{"prompt": "x"': r"train\.jsonl:6: not JSON",
    '{"prompt": null}': r"train\.jsonl:6: `prompt` is missing or null",
    '{"prompt": 5}': r"train\.jsonl:6: `prompt` expected a string or a list of messages, got 5",
    json.dumps({"prompt": "x" * 60}): r"train\.jsonl:6: the prompt has 60 tokens; 50 is the most",
    json.dumps({"prompt": "x", "completions": 1}): r"column `completions` has the name of an argument",
    json.dumps({"prompt": [{"role": "user", "content": "x"}]}): r"train\.jsonl:6: `prompt` is messages, but a string at .*:5",
}


@pytest.mark.parametrize(("line", "message"), BAD.items(), ids=BAD)
def test_a_bad_row_is_told_with_its_place_when_it_arrives(line, message, tmp_path):
    lines = [json.dumps(row) for row in rows_of(9)]
    lines[5] = line
    (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n")
    prompts = stream(tmp_path / "train.jsonl")
    draw(prompts, 0, 4)
    with pytest.raises(DataError, match=message):
        draw(prompts, 4, 1)


def test_the_kind_of_prompt_may_not_change_between_windows(tmp_path):
    rows = rows_of(4) + [{"prompt": [{"role": "user", "content": "x"}], "answer": "1"}] * 2
    prompts = stream(write(tmp_path / "train.jsonl", rows))
    with pytest.raises(DataError, match=r"train\.jsonl:5: the prompts are messages, and strings before"):
        draw(prompts, 0, 6)


def test_reward_functions_check_each_window_once_and_the_rows_are_named(file):
    shown = []

    def check(columns):
        shown.append(columns["answer"])
        if "9" in columns["answer"]:
            raise DataError("reward `r`: row 1: no answer")
        return ["noticed"]

    prompts = stream(file)
    prompts.check_rows = check
    draw(prompts, 0, 8)
    draw(prompts, 0, 8)
    assert shown == [["4", "5", "6", "7"]]
    with pytest.raises(DataError, match=r"row 1: no answer \(row 0 is .*train\.jsonl:9, the last one .*train\.jsonl:10\)"):
        draw(prompts, 8, 1)


def test_what_cannot_be_streamed_is_told(tmp_path):
    (tmp_path / "train.csv").write_text("prompt\nx\n")
    with pytest.raises(RecipeError, match=r"data\.dataset_streaming: .*train\.csv: a \.csv file is read as a whole"):
        stream(tmp_path / "train.csv")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match=r"empty\.jsonl: holds no rows"):
        stream(tmp_path / "empty.jsonl")
    with pytest.raises(DataError, match="each of the first 4 prompts is too long"):
        stream(write(tmp_path / "long.jsonl", [{"prompt": "x" * 60}] * 5), overlong_prompts="drop")


def test_a_file_that_shrinks_is_told_and_another_one_has_another_fingerprint(file):
    prompts = stream(file)
    before = prompts.fingerprint
    draw(prompts, 0, 10)
    write(file, rows_of(4))
    assert stream(file).fingerprint != before
    with pytest.raises(DataError, match="has fewer rows than a moment ago"):
        draw(prompts, 5, 1)


def test_a_stop_is_looked_for_while_rows_are_passed_over(file):
    class Stop(Exception):
        pass

    def stop():
        raise Stop

    with pytest.raises(Stop):
        stream(file).draw(9, 1, seed=0, shuffle=True, check_stop=stop)


def test_memory_is_that_of_a_window_whatever_the_file_has(tmp_path):
    def peak(count):
        path = write(tmp_path / f"{count}.jsonl", ({"prompt": f"question {i}", "padding": "x" * 500} for i in range(count)))
        prompts = stream(path, window=50)
        tracemalloc.start()
        for first in range(0, count, 50):
            draw(prompts, first, 50)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    peak(100)  # what is imported and cached at first use
    assert peak(4000) < 1.5 * peak(400)


def test_it_is_a_source_of_prompts(file):
    prompts = stream(file)
    assert isinstance(prompts, StreamedPrompts)
    assert (prompts.longest, prompts.columns, prompts.parts()) == (50, ("answer",), [prompts])
    assert len(prompts.head) == 4
