"""A reference model that follows the policy: by the formula, at its steps, and to the same bits after a stop."""

import pytest
import rig
import test_ranks_run
import test_run
import tiny
import torch
from processes import run_ranks
from test_run import STEPS, gold, start

from rloo_cli.errors import StoppedError, StorageError
from rloo_cli.run.checkpoint import find_checkpoint
from rloo_cli.run.folder import RunFolder
from rloo_cli.run.metrics import read_metrics
from rloo_cli.training import auto
from rloo_cli.training.moving_reference import MovingReference
from rloo_cli.training.policy import Policy, make_reference

FOLLOWING = {"algorithm__sync_ref_model": True, "algorithm__ref_model_mixup_alpha": 0.3, "algorithm__ref_model_sync_steps": 2}


def policy_of(model):
    return Policy(model, layout="plain", temperature=1.0, head_chunk=None)


@pytest.mark.parametrize("make", [tiny.qwen2, tiny.llama])  # tied and untied embeddings
def test_the_reference_becomes_the_mean_of_itself_and_the_policy_at_its_steps(make):
    policy, first = policy_of(make(seed=1)), make(seed=2)
    reference = make_reference(policy_of(first), low_precision=None)
    moving = MovingReference(reference, policy, alpha=0.3, every=3)
    before = rig.flat(reference.model)
    for step in (1, 2):
        moving.follow(step)
        assert torch.equal(rig.flat(reference.model), before)
    moving.follow(3)
    expected = 0.3 * rig.flat(policy.model) + 0.7 * before
    assert torch.allclose(rig.flat(reference.model), expected, atol=1e-6)
    moving.follow(6)
    assert torch.allclose(rig.flat(reference.model), 0.3 * rig.flat(policy.model) + 0.7 * expected, atol=1e-6)
    assert torch.equal(rig.flat(policy.model), rig.flat(make(seed=1)))
    assert not any(parameter.requires_grad for parameter in reference.parameters())


def test_with_alpha_1_the_penalty_is_0_in_the_step_after(tmp_path, monkeypatch):
    options = FOLLOWING | {"algorithm__ref_model_mixup_alpha": 1.0}
    rows = read_metrics(start(tmp_path / "run", monkeypatch, **options).metrics)
    assert [row["kl"] == 0 for row in rows] == [True, False, True, False, True, False]


def test_under_bf16_nothing_of_what_was_mixed_is_rounded_away(tmp_path, monkeypatch):
    monkeypatch.setattr(auto, "decide_bf16", lambda training, device: True)
    options = FOLLOWING | {"algorithm__ref_model_mixup_alpha": 1.0, "training__bf16": True}
    rows = read_metrics(start(tmp_path / "run", monkeypatch, **options).metrics)
    assert [row["kl"] == 0 for row in rows] == [True, False, True, False, True, False]


def test_it_changes_the_training(tmp_path, monkeypatch):
    following = gold(start(tmp_path / "following", monkeypatch, **FOLLOWING))[0]
    fixed = gold(start(tmp_path / "fixed", monkeypatch))[0]
    assert following[:2] == fixed[:2]
    assert following[2]["kl"] != fixed[2]["kl"]


@pytest.mark.parametrize("more", [{}, {"algorithm__num_iterations": 2}, {"algorithm__ref_model_sync_steps": 1}])
def test_a_run_stopped_at_any_step_and_resumed_ends_as_one_never_stopped(more, tmp_path, monkeypatch):
    options = FOLLOWING | more
    expected = gold(start(tmp_path / "whole", monkeypatch, **options))
    for k in range(1, STEPS):
        path = tmp_path / f"stopped-{k}"
        with pytest.raises(StoppedError, match=f"SIGTERM: step {k} is saved"):
            start(path, monkeypatch, stop_at=k, **options)
        assert (path / "checkpoints" / f"{k:06d}" / "reference.safetensors").exists()
        start(path, monkeypatch, resume=find_checkpoint(path / "checkpoints"), **options)
        assert gold(RunFolder(path)) == expected


def test_a_checkpoint_whose_reference_does_not_fit_is_told(tmp_path, monkeypatch):
    with pytest.raises(StoppedError):
        start(tmp_path / "run", monkeypatch, stop_at=2, **FOLLOWING)
    checkpoint = find_checkpoint(tmp_path / "run" / "checkpoints")
    wide = policy_of(tiny.qwen2(intermediate_size=32))
    with pytest.raises(StorageError, match="its reference has no model.layers.0.mlp"):
        MovingReference(make_reference(wide, low_precision=None), wide, alpha=0.5, every=1).load(checkpoint)


def follow_on_rank(rank, path):
    return test_run.start(path, test_ranks_run.Forever, **FOLLOWING).path.name


@pytest.mark.slow
def test_two_processes_have_the_numbers_of_one(tmp_path, monkeypatch):
    (tmp_path / "two").mkdir()
    run_ranks(follow_on_rank, 2, tmp_path, tmp_path / "two" / "run")
    alone = read_metrics(start(tmp_path / "one", monkeypatch, **FOLLOWING).metrics)
    test_ranks_run.close(read_metrics(tmp_path / "two" / "run" / "metrics.jsonl"), alone)
