from __future__ import annotations

import errno

import pytest
from failpoints import FailingFileSystem

from rloo_cli.errors import NonFiniteError, StorageError
from rloo_cli.run import atomic
from rloo_cli.run.metrics import METRICS, MetricsWriter, find_metric, read_metrics


def test_rows_are_read_back_without_what_is_absent(tmp_path):
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    assert writer.offset == 0
    writer.write({"step": 1, "reward": 0.1 + 0.2, "kl": None, "rewards/accuracy/mean": 1.0})
    writer.write({"step": 1, "eval/rewards/accuracy/mean": 0.5, "eval/rewards/accuracy/pass@8": 1.0})
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": 1, "reward": 0.1 + 0.2, "rewards/accuracy/mean": 1.0},
        {"step": 1, "eval/rewards/accuracy/mean": 0.5, "eval/rewards/accuracy/pass@8": 1.0},
    ]
    assert writer.offset == (tmp_path / "metrics.jsonl").stat().st_size


@pytest.mark.parametrize("key", ["rewrd", "rewards//mean", "eval/", "eval/step2", "perf/x", "Reward", "reward "])
def test_a_key_outside_the_table_is_a_bug(tmp_path, key):
    assert find_metric(key) is None
    with pytest.raises(KeyError):
        MetricsWriter(tmp_path / "m").write({"step": 1, key: 1.0})
    assert not (tmp_path / "m").exists()


def test_names_of_rewards_may_hold_anything():
    assert find_metric("rewards/my.module.f/x/mean").unit == "reward"
    assert find_metric("custom/c/d") == METRICS["custom/<name>"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_is_refused_and_named(tmp_path, value):
    writer = MetricsWriter(tmp_path / "m")
    with pytest.raises(NonFiniteError, match="step 7: metric loss"):
        writer.write({"step": 7, "loss": value})
    assert not (tmp_path / "m").exists()


def rows(path, count):
    writer = MetricsWriter(path)
    offsets = [0]
    for step in range(1, count + 1):
        writer.write({"step": step, "reward": 0.5})
        offsets.append(writer.offset)
    return offsets


def test_resume_cuts_back_to_the_checkpoint(tmp_path):
    path = tmp_path / "m"
    offsets = rows(path, 5)
    path.write_bytes(path.read_bytes() + b'{"step": 6, "rew')
    writer = MetricsWriter(path, offset=offsets[3])
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]
    writer.write({"step": 4})
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3, 4]


def test_resume_from_the_start_leaves_nothing(tmp_path):
    rows(tmp_path / "m", 2)
    assert MetricsWriter(tmp_path / "m", offset=0).offset == 0
    assert (tmp_path / "m").read_bytes() == b""


@pytest.mark.parametrize("kept", [0, 30, None])
def test_rows_that_are_missing_are_told(tmp_path, caplog, kept):
    path = tmp_path / "m"
    offsets = rows(path, 3)
    if kept is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:kept])
    writer = MetricsWriter(path, offset=offsets[3])
    assert "rows are missing" in caplog.text
    assert path.read_bytes() in (b"", b'{"step": 1, "reward": 0.5}\n')
    assert writer.offset == path.stat().st_size


@pytest.mark.parametrize("fault", [errno.ENOSPC, "short"])
def test_a_full_disk_leaves_whole_lines(tmp_path, monkeypatch, fault):
    path = tmp_path / "m"
    rows(path, 2)
    before = path.read_bytes()
    writer = MetricsWriter(path)
    monkeypatch.setattr(atomic, "fs", FailingFileSystem(1, fault, only=("write",)))
    with pytest.raises(StorageError, match="No space left"):
        writer.write({"step": 3})
    assert path.read_bytes() == before
    monkeypatch.undo()
    writer.write({"step": 3})
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]


def test_syncing_makes_rows_durable_and_is_fine_without_any(tmp_path, monkeypatch):
    writer = MetricsWriter(tmp_path / "m")
    writer.sync()
    writer.write({"step": 1})
    failing = FailingFileSystem()
    monkeypatch.setattr(atomic, "fs", failing)
    writer.sync()
    assert "fsync" in failing.log
