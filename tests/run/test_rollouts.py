from __future__ import annotations

import errno

import pandas as pd
import pyarrow.parquet as pq
import pytest
from failpoints import FailingFileSystem, leftovers

from rloo_cli.errors import StorageError
from rloo_cli.run import atomic
from rloo_cli.run.rollouts import COLUMNS, RolloutRow, write_rollouts
from rloo_cli.types import EncodedImage, FinishReason


def row(**changes):
    fields = {
        "step": 12,
        "prompt_row": 3,
        "prompt": [{"role": "user", "content": "1+1?"}],
        "prompt_text": "<|user|>1+1?",
        "completion": "2",
        "completion_ids": (17, 2),
        "logprobs": (-0.5, -0.25),
        "finish_reason": FinishReason.STOPPED,
        "weights_version": 11,
        "reward": 1.0,
        "kl": 0.125,
        "advantage": 0.75,
        "rewards": {"accuracy": 1.0, "format": None},
        "extras": {"parsed": "2"},
    }
    return RolloutRow(**(fields | changes))


def test_pandas_reads_a_row_a_completion(tmp_path):
    path = tmp_path / "000012.parquet"
    write_rollouts(path, [row(), row(completion="", reward=None, advantage=0.0, finish_reason=FinishReason.TRUNCATED)])
    frame = pd.read_parquet(path)
    assert list(frame["finish_reason"]) == ["stopped", "truncated"]
    first = frame.iloc[0]
    assert list(first["completion_ids"]) == [17, 2]
    assert list(first["logprobs"]) == [-0.5, -0.25]
    assert first["prompt"] == '[{"role": "user", "content": "1+1?"}]'
    assert (first["rewards/accuracy"], first["extra/parsed"], first["kl"]) == (1.0, "2", 0.125)
    assert pd.isna(first["rewards/format"])
    assert pd.isna(frame.iloc[1]["reward"])


def test_datasets_reads_it(tmp_path):
    from datasets import Dataset

    write_rollouts(tmp_path / "x.parquet", [row(), row(prompt="plain")])
    dataset = Dataset.from_parquet(str(tmp_path / "x.parquet"), cache_dir=str(tmp_path / "cache"))
    assert dataset[1]["prompt"] == '"plain"'
    assert dataset[0]["completion_ids"] == [17, 2]


def test_the_columns_are_those_documented_in_order(tmp_path):
    write_rollouts(tmp_path / "x.parquet", [row()])
    table = pq.read_table(tmp_path / "x.parquet")
    documented = [name for name in COLUMNS if "<" not in name and name != "images"]
    assert table.column_names == [*documented, "rewards/accuracy", "rewards/format", "extra/parsed"]
    for name, (kind, _) in COLUMNS.items():
        if name in documented:
            assert str(table.schema.field(name).type).replace("element: ", "").replace("item: ", "") == kind
    assert pq.ParquetFile(tmp_path / "x.parquet").metadata.row_group(0).column(0).compression == "ZSTD"


def test_the_same_rows_give_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        write_rollouts(tmp_path / name, [row(), row(extras={})])
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("text", ["\ud800", "a\x00b", "\u202e", "é" * 10_000, "\x1b[2J"])
def test_hostile_text_is_stored(tmp_path, text):
    write_rollouts(tmp_path / "x", [row(completion=text, prompt=text, prompt_text=text, extras={"x": text})])
    stored = pq.read_table(tmp_path / "x").to_pylist()[0]
    assert stored["completion"] == text.replace("\ud800", "\\ud800")


def nested(levels):
    return [nested(levels - 1)] if levels else 1


@pytest.mark.parametrize(
    ("values", "stored"),
    [
        ([1, 2], [1, 2]),
        ([1, "a"], ["1", '"a"']),
        ([{"a": 1}, 3], ['{"a": 1}', "3"]),
        ([None, [1, 2]], [None, [1, 2]]),
        ([None, None], [None, None]),
        ([10**400, 1], [str(10**400), "1"]),
        ([2j, None], ['"2j"', None]),
        ([{}, None], ["{}", None]),
        ([[{}], []], ["[{}]", "[]"]),
        ([nested(10), nested(10)], [str(nested(10))] * 2),
    ],
)
def test_extras_of_any_type(tmp_path, values, stored):
    write_rollouts(tmp_path / "x", [row(extras={"x": value}) for value in values])
    assert [entry["extra/x"] for entry in pq.read_table(tmp_path / "x").to_pylist()] == stored


def test_a_full_disk_leaves_no_half_file(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic, "fs", FailingFileSystem(1, errno.ENOSPC, only=("write",)))
    with pytest.raises(StorageError, match=r"000001\.parquet"):
        write_rollouts(tmp_path / "000001.parquet", [row()])
    assert list(tmp_path.iterdir()) == leftovers(tmp_path) == []


def test_images_stand_in_the_first_row_of_their_group_and_come_back(tmp_path):
    image = EncodedImage(data=b"of a file", name="a.png", digest="d")
    write_rollouts(tmp_path / "x.parquet", [row(images=(image, image)), row(), row(prompt_row=9)])
    table = pq.read_table(tmp_path / "x.parquet")
    assert [cell and len(cell) for cell in table.column("images").to_pylist()] == [2, None, None]
    write_rollouts(tmp_path / "y.parquet", [row()])
    assert "images" not in pq.read_table(tmp_path / "y.parquet").column_names
