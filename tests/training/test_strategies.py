"""An optimizer step of a strategy that shards is the step of one process, and what it keeps is all there."""

from types import SimpleNamespace

import precise
import processes
import pytest
import rig
import tiny
import torch
from accelerate import Accelerator
from processes import run_ranks
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from rloo_cli.recipe.accelerate_config import read_distribution
from rloo_cli.recipe.distribution import Distribution
from rloo_cli.run.ranks import ALONE, join_ranks
from rloo_cli.training import strategy_fsdp
from rloo_cli.training.strategy import make_strategy

STRATEGIES = ("fsdp2", "zero2", "zero3")
MODELS = {"tied": tiny.qwen2, "untied": tiny.llama, "gpt2": tiny.gpt2}
CASES = {
    "on-policy": {},
    "cut groups": {"prompts": 1},
    "reference and cut groups": {"reference": True, "prompts": 1},
    "reused": {"reference": True, "iterations": 2, "slices": 2},
    "normalized": {"reference": True, "normalize_advantages": True},
    "one rank without rows": {"flat": True},
    "nobody has rows": {"silent": True},
    "checkpointing": {"checkpointing": True, "reference": True},
    "plain, checkpointing, recomputed head": {"layout": "plain", "checkpointing": True, "chunk": 7, "reference": True, "model": "untied"},
    "untied": {"model": "untied", "reference": True},
    "recomputed head": {"chunk": 7},
    "gpt2": {"model": "gpt2", "chunk": 7, "checkpointing": True},
}
PERF = "perf/"


def step(case, name, ranks=None, distribution=None):
    """(gradients of the uses, metrics of the uses, advantages) of a case, in float64 where the strategy knows it."""
    options, is_double = dict(CASES[case]), name == "fsdp2"
    dtype = torch.float64 if is_double else torch.float32
    model = MODELS[options.pop("model", "tied")](dtype=dtype)
    model = precise.in_float64(model) if is_double else model
    experience = rig.make_experience(prompts=options.pop("prompts", 4))
    if options.pop("flat", False):  # one group alone has a gradient
        experience = rig.make_experience(rewards=[[1.0] * 4, [0.0] * 4, [0.0, 1.0, 0.0, 0.0], [0.5] * 4])
    if options.pop("silent", False):
        experience = rig.make_experience(rewards=[[1.0] * 4] * 4)
    reference = rig.drifted(model) if options.pop("reference", False) else None
    uses = options.get("iterations", 1) * options.get("slices", 1)
    # The gradient is read off the weights, where a small step would drown in float32's rounding.
    rate = 1e-3 if uses > 1 else 1.0
    updater = rig.make_updater(model, reference, ranks=ranks, max_tokens=64, lr=rate, distribution=distribution, **options)
    gradients, metrics = [], []
    for use in range(uses):
        gradient, experience, found = rig.gradient_of_update(updater, experience, use)
        gradients.append(gradient)
        metrics.append({k: float(v) for k, v in found.items() if not k.startswith(PERF)})
    return gradients, metrics, experience.advantage_PG


def on_rank(rank, name):
    Accelerator(cpu=True)
    ranks = join_ranks()
    return {case: step(case, name, ranks, Distribution(strategy=name)) for case in CASES}


def check(name, world_size, folder):
    compare(name, CASES, run_ranks(on_rank, world_size, folder, name))


def compare(name, cases, found):
    """Hold the steps that ranks made to those of one process."""
    exact, close = (1e-9, 1e-6) if name == "fsdp2" else (1e-5, 1e-4)
    for case in cases:
        gradients, metrics, advantages = step(case, name)
        bound = 5e-3 if exact > 1e-6 and "iterations" in CASES[case] else exact
        for by_case in found:
            theirs, their_metrics, their_advantages = by_case[case]
            for ours, other in zip(gradients, theirs, strict=True):
                assert (other - ours).norm() <= bound * ours.norm(), (case, ((other - ours).norm() / ours.norm()).item())
            assert torch.allclose(their_advantages, advantages, rtol=0, atol=exact, equal_nan=True), case
            for ours, other in zip(metrics, their_metrics, strict=True):
                assert other == pytest.approx(ours, rel=close, abs=exact), case


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_step_is_that_of_one_process(name, world_size, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "SECONDS", 280)
    check(name, world_size, tmp_path)


@pytest.mark.parametrize(
    ("asked", "device", "kind", "is_told"),
    [(True, "cuda", CPUOffloadPolicy, False), (False, "cuda", OffloadPolicy, False), (True, "cpu", OffloadPolicy, True)],
)
def test_what_a_file_says_of_offloading_is_what_fsdp2_does_where_there_is_something_to_offload(
    tmp_path, monkeypatch, caplog, asked, device, kind, is_told
):
    text = f"distributed_type: FSDP\nfsdp_config: {{fsdp_version: 2, fsdp_offload_params: {str(asked).lower()}}}\n"
    (tmp_path / "mine.yaml").write_text(text)
    for name in ("join_alone", "init_device_mesh"):
        monkeypatch.setattr(strategy_fsdp, name, lambda *arguments: None)
    accelerator = SimpleNamespace(device=torch.device(device), mixed_precision="no")
    made = make_strategy(read_distribution("mine.yaml", tmp_path), accelerator, ALONE)
    assert type(made._options["offload_policy"]) is kind
    assert ("fsdp_offload_params is without effect here" in caplog.text) == is_told
