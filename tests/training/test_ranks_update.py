"""An optimizer step on several processes is the step of one."""

import precise
import pytest
import rig
import tiny
import torch
from accelerate import Accelerator
from processes import run_ranks

from rloo_cli.errors import NeighbourError, NonFiniteError
from rloo_cli.run.ranks import join_ranks
from rloo_cli.run.signals import StopRequested

CASES = {
    "on-policy": {},
    "cut groups": {"prompts": 1},
    "reference": {"reference": True},
    "reference and cut groups": {"reference": True, "prompts": 1},
    "reused": {"reference": True, "iterations": 2, "slices": 2},
    "normalized": {"reference": True, "normalize_advantages": True},
    "one rank without rows": {"flat": True},
}
PERF = "perf/"


def step(case, ranks=None):
    """(gradients of two uses, metrics of two uses, advantages) of a case."""
    options = dict(CASES[case])
    model = precise.in_float64(tiny.qwen2(dtype=torch.float64))
    experience = rig.make_experience(prompts=options.pop("prompts", 4))
    if options.pop("flat", False):  # one group alone has a gradient
        values = [[1.0] * 4, [0.0] * 4, [0.0, 1.0, 0.0, 0.0], [0.5] * 4]
        experience = rig.make_experience(rewards=values)
    reference = rig.drifted(model) if options.pop("reference", False) else None
    updater = rig.make_updater(model, reference, ranks=ranks, max_tokens=64, lr=1e-3, **options)
    uses = options.get("iterations", 1) * options.get("slices", 1)
    gradients, metrics = [], []
    for use in range(uses):
        gradient, experience, found = rig.gradient_of_update(updater, experience, use)
        gradients.append(gradient)
        metrics.append({k: float(v) for k, v in found.items() if not k.startswith(PERF)})
    return gradients, metrics, experience.advantage_PG


def on_rank(rank, cases):
    Accelerator(cpu=True)
    ranks = join_ranks()
    return {case: step(case, ranks) for case in cases}


def all_on_rank(rank):
    """Everything that two ranks are asked here, one after the other: starting them takes longer than that."""
    return {
        "steps": on_rank(rank, CASES),
        "out of memory": out_of_memory_on_one(rank),
        "not finite": non_finite_on_one(rank),
        "stop": stop_on_one(rank),
    }


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What each of two ranks found."""
    return run_ranks(all_on_rank, 2, tmp_path_factory.mktemp("two"))


def test_a_step_of_two_processes_is_that_of_one(two):
    compare(CASES, [found["steps"] for found in two])


@pytest.mark.slow
def test_a_step_of_three_processes_is_that_of_one(tmp_path):
    cases = ("reference", "reused")
    compare(cases, run_ranks(on_rank, 3, tmp_path, cases))


def compare(cases, found):
    """Hold the steps that ranks made to those of one process."""
    for case in cases:
        gradients, metrics, advantages = step(case)
        for by_case in found:
            theirs, their_metrics, their_advantages = by_case[case]
            for ours, other in zip(gradients, theirs, strict=True):
                assert rig.relative(other, ours) < 1e-9, case
            assert torch.allclose(their_advantages, advantages, rtol=0, atol=1e-9, equal_nan=True), case
            for ours, other in zip(metrics, their_metrics, strict=True):
                assert other == pytest.approx(ours, rel=1e-6, abs=1e-9), case


def updater_that_fails(rank, failing, error):
    """An updater whose first micro-batch fails on one rank, once."""
    updater = rig.make_updater(tiny.qwen2(), ranks=join_ranks(), max_tokens=64)
    policy_forward, failed = updater.policy.forward, []

    def forward(batch):
        if rank == failing and not failed:
            failed.append(1)
            raise error
        return policy_forward(batch)

    updater.policy.forward = forward
    return updater


def out_of_memory_on_one(rank):
    updater = updater_that_fails(rank, 1, MemoryError("no room"))
    gradient, _, _ = rig.gradient_of_update(updater, rig.make_experience())
    return gradient, updater.max_tokens


def test_out_of_memory_on_one_rank_makes_all_take_smaller_micro_batches(two):
    expected, _, _ = rig.gradient_of_update(rig.make_updater(tiny.qwen2()), rig.make_experience())
    for gradient, max_tokens in (found["out of memory"] for found in two):
        assert rig.relative(gradient, expected) < 1e-5
        assert max_tokens == 32


def non_finite_on_one(rank):
    updater = updater_that_fails(rank, 1, NonFiniteError("step 1: the loss is nan"))
    before = rig.flat(updater.policy.model).clone()
    try:
        updater.update(rig.make_experience(), 0, step=1)
    except (NonFiniteError, NeighbourError) as error:
        return f"{type(error).__name__}: {error}", torch.equal(before, rig.flat(updater.policy.model))


def test_a_number_that_is_not_finite_on_one_rank_stops_all_before_the_update(two):
    (first, first_same), (second, second_same) = (found["not finite"] for found in two)
    assert first == "NeighbourError: rank 1 ended the run: step 1: the loss is nan"
    assert second == "NonFiniteError: step 1: the loss is nan"
    assert first_same
    assert second_same


def stop_on_one(rank):
    updater = rig.make_updater(tiny.qwen2(), ranks=join_ranks(), max_tokens=64)
    if rank == 1:
        updater.stop.request("SIGUSR1")
    before = rig.flat(updater.policy.model).clone()
    try:
        updater.update(rig.make_experience(), 0, step=1)
    except StopRequested as stop:
        return stop.signal_name, torch.equal(before, rig.flat(updater.policy.model))


def test_a_stop_on_one_rank_discards_the_step_on_all(two):
    assert [found["stop"] for found in two] == [("SIGUSR1", True), ("SIGUSR1", True)]
