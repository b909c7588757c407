"""An engine that fails on one rank of two: both end, and save the same step once."""

import fakes
import pytest
import test_engine_failure
import test_run
import torch
from processes import run_ranks

from rloo_cli.errors import NeighbourError, RlooError
from rloo_cli.run.checkpoint import find_checkpoint, list_steps
from rloo_cli.run.folder import RunFolder
from rloo_cli.run.ranks import Ranks, join_ranks, kind_of
from rloo_cli.training.engines import give_weights

FAULTS = {"generating": ({"step": 4}, 3), "taking weights": ({"version": 4}, 4)}


class Forever:
    """monkeypatch for a process that ends with the test."""

    setattr = staticmethod(setattr)


def fail_and_go_on(rank, path):
    told = {}
    sound = fakes.FakeEngine
    for failing in range(2):
        for name, (fault, _) in FAULTS.items():
            where = f"{name} on {failing}"
            fakes.FakeEngine = lambda fault=fault, f=failing, **o: test_engine_failure.FailingEngine(**(fault if rank == f else {}), **o)
            try:
                test_run.start(path / where, Forever)
            except RlooError as error:
                told[where] = [type(error).__name__, str(error)]
            fakes.FakeEngine = sound
            test_run.start(path / where, Forever, resume=find_checkpoint(RunFolder(path / where).checkpoints))
    return told


def test_both_save_the_step_and_one_tells_why(tmp_path):
    (tmp_path / "runs").mkdir()
    told = run_ranks(fail_and_go_on, 2, tmp_path, tmp_path / "runs")
    for failing in range(2):
        for name, (_, saved) in FAULTS.items():
            where = f"{name} on {failing}"
            assert told[failing][where][0] == "EngineError"
            assert f"Step {saved} is saved; --resume goes on" in told[failing][where][1]
            assert told[1 - failing][where][0] == "NeighbourError"
            assert f"rank {failing} ended the run: vLLM server" in told[1 - failing][where][1]
            assert test_run.STEPS in list_steps(RunFolder(tmp_path / "runs" / where).checkpoints)


class Half:
    """Takes half of the weights and fails."""

    def load_weights(self, named_tensors, version):
        next(named_tensors)
        raise RlooError("half")


def give_to_half(rank):
    torch.distributed.init_process_group("gloo")
    return give_to_half_of(join_ranks())


def give_to_half_of(ranks):
    tensors = iter([("a", None), ("b", None), ("c", None)])
    with pytest.raises(RlooError, match="half"):
        give_weights(Half(), tensors, 1, ranks)
    return [name for name, _ in tensors]


def test_weights_are_gone_through_to_their_end_where_an_engine_fails_and_others_go_through_them(tmp_path):
    assert run_ranks(give_to_half, 2, tmp_path) == [[], []]
    assert give_to_half_of(Ranks()) == ["b", "c"]


def test_the_kind_of_error_that_began_it_is_told_beyond_the_ranks_that_share_an_engine():
    assert kind_of(NeighbourError("rank 1 ended the run: gone", kind="EngineError")) == "EngineError"
    assert kind_of(RlooError("gone")) == "RlooError"
