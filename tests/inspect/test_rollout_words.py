from __future__ import annotations

from pathlib import Path

import pytest

from rloo_cli.errors import RefusedError
from rloo_cli.inspect.rollout_files import choose_file, choose_files, find_rollouts, name_steps

NAMES = ["rollouts/000001.parquet", "rollouts/000002.parquet", "rollouts/000010.parquet", "rollouts/eval-000000.parquet"]
NAMES += ["rollouts/eval-000010.parquet", "failed/step-000011.parquet", "rollouts/.tmp-000011.parquet-1", "rollouts/notes.parquet"]


@pytest.fixture
def files(tmp_path):
    for name in NAMES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return find_rollouts(tmp_path)


def test_files_come_in_the_order_of_their_steps(files):
    assert [file.label for file in files] == ["eval-0", "1", "2", "10", "eval-10", "failed-11"]
    assert name_steps(files) == "1, 2, 10, eval-0, eval-10, failed-11"


@pytest.mark.parametrize(
    ("word", "labels"),
    [
        ("2", ["2"]),
        ("000002", ["2"]),
        ("2-10", ["2", "10"]),
        ("first", ["1"]),
        ("last", ["10"]),
        ("eval", ["eval-10"]),
        ("eval-0", ["eval-0"]),
        ("failed", ["failed-11"]),
        ("failed-11", ["failed-11"]),
    ],
)
def test_words_mean_files(files, word, labels):
    assert [file.label for file in choose_files(files, [word])] == labels


def test_several_words_are_one_set_in_order(files):
    assert [file.label for file in choose_files(files, ["last", "eval-0", "1-2", "2"])] == ["eval-0", "1", "2", "10"]


@pytest.mark.parametrize("word", ["3", "3-9", "eval-1", "failed-1", "nonsense", "", "-1", "1-", "train-1-2"])
def test_a_word_without_a_file_is_refused(files, word):
    with pytest.raises(RefusedError, match="there are: 1, 2, 10, eval-0"):
        choose_files(files, [word])


def test_a_range_is_not_one_step(files):
    with pytest.raises(RefusedError, match="`1-2` means 2 steps"):
        choose_file(files, "1-2")


def test_a_run_that_only_evaluated_has_a_last_step_too(tmp_path):
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "eval-000000.parquet").touch()
    assert choose_file(find_rollouts(tmp_path), "last").label == "eval-0"


def test_a_file_of_another_name_is_taken_as_it_is(tmp_path):
    (tmp_path / "mine.parquet").touch()
    (file,) = find_rollouts(tmp_path / "mine.parquet")
    assert file.label == "mine.parquet"
    assert choose_file([file], "last").path == Path(tmp_path / "mine.parquet")
