"""Whole runs on several processes: the numbers of one, written once."""

import pytest
import test_run
import torch
from processes import run_ranks

from rloo_cli.errors import StoppedError
from rloo_cli.run.checkpoint import find_checkpoint, list_steps
from rloo_cli.run.folder import RunFolder
from rloo_cli.run.metrics import read_metrics

VARIANTS = {
    "reference": {},
    "a batch for two steps": {"training__steps_per_generation": 2, "algorithm__num_iterations": 2},
    "evaluated": {"evaluation__eval_strategy": "steps", "evaluation__eval_steps": 2, "algorithm__beta": 0.0},
    "overlapped": {"training__async_steps": 1},
}
REUSED = "a batch for two steps"


class Forever:
    """monkeypatch for a process that ends with the test."""

    setattr = staticmethod(setattr)


def start_on_rank(rank, path, options, variant):
    resume = find_checkpoint(RunFolder(path).checkpoints) if options.pop("resume", False) else None
    try:
        test_run.start(path, Forever, resume=resume, **options, **VARIANTS[variant])
    except StoppedError as error:
        return str(error)
    return "done"


def start_all(rank, path):
    """How each variant ended; and how one of them did that was stopped, and when it had gone on."""
    told = {variant: start_on_rank(rank, path / variant, {}, variant) for variant in VARIANTS}
    stopped = start_on_rank(rank, path / "stopped", {"stop_at": 3}, REUSED)
    torch.distributed.barrier()
    return told, (stopped, start_on_rank(rank, path / "stopped", {"resume": True}, REUSED))


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """(the folder of the runs of two processes, what each process was told of them)."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "runs").mkdir()
    return folder / "runs", run_ranks(start_all, 2, folder, folder / "runs")


def close(rows, expected):
    assert len(rows) == len(expected)
    for row, other in zip(rows, expected, strict=True):
        numbers = {k: v for k, v in other.items() if not k.startswith("perf/")}
        assert {k: v for k, v in row.items() if not k.startswith("perf/")} == pytest.approx(numbers, rel=1e-4, abs=1e-5)


def test_runs_on_two_processes_have_the_numbers_of_one(two, tmp_path, monkeypatch):
    folder, told = two
    assert [ended for ended, _ in told] == [dict.fromkeys(VARIANTS, "done")] * 2
    for variant, changes in VARIANTS.items():
        expected = read_metrics(test_run.start(tmp_path / variant, monkeypatch, **changes).metrics)
        close(read_metrics(folder / variant / "metrics.jsonl"), expected)
        assert (folder / variant / "final" / "model.safetensors").exists()
        assert list_steps(folder / variant / "checkpoints") == [test_run.STEPS]


def test_a_stop_and_a_resume_on_two_processes_give_the_bits_of_two_that_never_stopped(two):
    folder, told = two
    assert all("SIGTERM: step 3 is saved" in first and second == "done" for _, (first, second) in told)
    assert test_run.gold(RunFolder(folder / "stopped")) == test_run.gold(RunFolder(folder / REUSED))
