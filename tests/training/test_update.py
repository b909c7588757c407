"""The gradient of the real training step, held to the naive three-pass computation and to its own invariances."""

import copy
import random
from dataclasses import replace

import precise
import pytest
import rig
import tiny
import torch

from rloo_cli.errors import DeviceMemoryError, NonFiniteError
from rloo_cli.training.experience import build_experience


def double_model(**options):
    return precise.in_float64(tiny.qwen2(dtype=torch.float64, **options))


@pytest.mark.parametrize("with_reference", [True, False])
@pytest.mark.parametrize("layout", ["packed", "plain"])
def test_float64_gradient_equals_the_naive_three_pass_computation(layout, with_reference):
    model, experience = double_model(), rig.make_experience()
    reference = rig.drifted(model) if with_reference else None
    expected = rig.naive_gradient(copy.deepcopy(model), copy.deepcopy(reference), experience)
    gradient, _, _ = rig.gradient_of_update(rig.make_updater(model, reference, layout=layout), experience)
    assert rig.relative(gradient, expected) < 1e-9


@pytest.mark.parametrize("name", ["qwen2", "llama", "gpt2", "gemma"])
def test_float32_gradient_equals_the_naive_one(name):
    model, experience = tiny.MODELS[name](), rig.make_experience(seed=1)
    reference = rig.drifted(model)
    expected = rig.naive_gradient(copy.deepcopy(model), copy.deepcopy(reference), experience)
    updater = rig.make_updater(model, reference, lr=1.0)
    gradients = {}
    updater.strategy.optimizer.step = lambda: gradients.update(g=torch.cat([p.grad.flatten() for p in model.parameters()]).clone()) or 0.0
    updater.update(experience, 0, step=1)
    assert rig.relative(gradients["g"], expected) < 1e-5


CUTS = {
    "one micro-batch": {},
    "a group each": {"max_tokens": 45},
    "cut groups": {"max_rows": 3},
    "one row each": {"max_tokens": 1},
    "recomputed head": {"chunk": 7},
}


@pytest.mark.parametrize("cut", list(CUTS))
@pytest.mark.parametrize("fields", [{}, {"normalize_advantages": True}, {"reward_clip_range": (0.2, 0.8)}])
def test_the_cut_into_micro_batches_changes_nothing(cut, fields):
    start, experience = double_model(), rig.make_experience(seed=2)
    reference = rig.drifted(start)
    results = []
    for options in ({}, CUTS[cut]):
        updater = rig.make_updater(copy.deepcopy(start), copy.deepcopy(reference), **options, **fields)
        results.append(rig.gradient_of_update(updater, experience))
    (whole, _, metrics), (parts, _, other) = results
    assert rig.relative(parts, whole) < 1e-9
    assert other["loss"] == pytest.approx(metrics["loss"], rel=1e-9)
    assert other["entropy"] == pytest.approx(metrics["entropy"], rel=1e-9)


def test_the_order_of_rows_and_groups_changes_nothing():
    start, experience = double_model(), rig.make_experience(seed=3)
    reference = rig.drifted(start)
    draw = random.Random(0)
    order = draw.sample(range(4), 4)
    groups, rewards = [], []
    for p in order:
        members = draw.sample(range(4), 4)
        group, values = experience.groups[p], experience.rewards[p].values[0]
        groups.append(replace(group, completions=tuple(group.completions[g] for g in members)))
        rewards.append(replace(experience.rewards[p], values=(tuple(values[g] for g in members),)))
    shuffled = build_experience(1, groups, rewards, [1.0])
    first, _, _ = rig.gradient_of_update(rig.make_updater(copy.deepcopy(start), copy.deepcopy(reference)), experience)
    second, _, _ = rig.gradient_of_update(rig.make_updater(copy.deepcopy(start), copy.deepcopy(reference)), shuffled)
    assert rig.relative(second, first) < 1e-9


def test_rows_without_signal_are_skipped_and_counted_in_n():
    model = double_model()
    experience = rig.make_experience(seed=4, rewards=[[1, 1, 1, 1], [0, 1, 0, None], [0, 0, 0, 0], [None, None, 1, None]])
    expected = rig.naive_gradient(copy.deepcopy(model), None, experience, n=16)
    gradient, after, metrics = rig.gradient_of_update(rig.make_updater(model), experience)
    assert rig.relative(gradient, expected) < 1e-9
    assert metrics["rows/skipped"] == 13
    assert after.advantage_PG[1].tolist() == [-0.5, 1.0, -0.5, 0.0]


def test_a_step_without_any_signal_still_steps_with_zero_gradients():
    updater = rig.make_updater(double_model())
    gradient, _, metrics = rig.gradient_of_update(updater, rig.make_experience(rewards=[[1.0] * 4] * 4))
    assert (gradient == 0).all()
    assert metrics["grad_norm"] == 0
    assert metrics["rows/skipped"] == 16
    assert "entropy" not in metrics


def test_masked_truncated_rows_leave_numerator_and_n_but_stay_in_the_baseline():
    truncated = {(0, 1), (2, 0), (2, 3)}
    model, experience = double_model(), rig.make_experience(seed=5, truncated=truncated)
    reference = rig.drifted(model)
    expected = rig.naive_gradient(copy.deepcopy(model), copy.deepcopy(reference), experience, masked=lambda p, g: (p, g) in truncated)
    updater = rig.make_updater(model, reference, mask_truncated_completions=True)
    gradient, _, _ = rig.gradient_of_update(updater, experience)
    assert rig.relative(gradient, expected) < 1e-9


@pytest.mark.parametrize("autocast", [False, True])
def test_kl_is_exactly_zero_before_the_first_update(autocast):
    model = tiny.qwen2()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    updater = rig.make_updater(model, copy.deepcopy(model))
    if autocast:
        updater.accelerator.autocast = lambda: torch.autocast("cpu", torch.bfloat16)
    _, after, _ = rig.gradient_of_update(updater, rig.make_experience(seed=6))
    assert (after.kl_PG == 0).all()


def test_one_forward_gives_the_advantages_that_a_pass_beforehand_gives():
    start, experience = double_model(), rig.make_experience(seed=7)
    reference = rig.drifted(start)
    one, one_after, _ = rig.gradient_of_update(rig.make_updater(copy.deepcopy(start), copy.deepcopy(reference)), experience)
    two, two_after, _ = rig.gradient_of_update(rig.make_updater(copy.deepcopy(start), copy.deepcopy(reference), dropout=True), experience)
    assert rig.relative(two, one) < 1e-9
    assert (one_after.advantage_PG - two_after.advantage_PG).abs().max() < 1e-9


def clipped_reference(model, old, experience, groups, epsilon):
    """The clipped surrogate by its formula, from log-probs of separate forwards."""
    total, count = 0.0, 0
    for p in groups:
        rewards = list(experience.rewards[p].values[0])
        new = rig.row_logprobs(model, experience.groups[p])
        for i, reward in enumerate(rewards):
            others = [r for j, r in enumerate(rewards) if j != i]
            advantage = reward - sum(others) / len(others)
            ratio = (new[i] - old[p][i]).exp()
            total = total + torch.minimum(ratio * advantage, ratio.clamp(1 - epsilon, 1 + epsilon) * advantage)
            count += 1
    return -total / count


def test_a_reused_batch_follows_the_clipped_surrogate_with_the_old_policy_of_its_first_step():
    model, experience = double_model(), rig.make_experience(seed=8)
    with torch.no_grad():
        old = [rig.row_logprobs(copy.deepcopy(model), group) for group in experience.groups]
    updater = rig.make_updater(model, slices=2, iterations=2, lr=1e-4)
    clipped = 0.0
    for use in range(4):
        twin = copy.deepcopy(model)
        twin.zero_grad()
        groups = range(2) if use % 2 == 0 else range(2, 4)
        loss = clipped_reference(twin, old, experience, groups, 0.2)
        loss.backward()
        expected = torch.cat([p.grad.flatten() for p in twin.parameters()])
        change, experience, metrics = rig.gradient_of_update(updater, experience, use)
        assert rig.relative(change / 1e-4, expected) < 1e-7
        assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-9)
        clipped += metrics["clip_ratio/region_mean"]
    assert clipped > 0  # otherwise the test never saw a clipped row


def test_on_policy_and_first_use_of_a_reused_batch_agree():
    start, experience = double_model(), rig.make_experience(seed=9)
    once, _, _ = rig.gradient_of_update(rig.make_updater(copy.deepcopy(start)), experience)
    first, _, _ = rig.gradient_of_update(rig.make_updater(copy.deepcopy(start), iterations=2), experience)
    assert rig.relative(first, once) < 1e-12


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("truncate", {"importance_sampling_correction": "truncate"}),
        ("mask", {"importance_sampling_correction": "mask"}),
        # Samples of older weights: truncated unless asked otherwise, and never clipped, however often a batch is used.
        ("truncate", {"stale": True}),
        ("truncate", {"stale": True, "iterations": 2, "epsilon": 0.0}),
        ("mask", {"stale": True, "importance_sampling_correction": "mask"}),
    ],
)
def test_importance_correction_weights_each_row_by_its_capped_ratio(mode, options):
    model, experience = double_model(), rig.make_experience(seed=10)
    with torch.no_grad():
        trainer = torch.stack([rig.row_logprobs(copy.deepcopy(model), group) for group in experience.groups])
    gap = torch.linspace(-1.5, 1.5, 16, dtype=torch.float64).view(4, 4)
    experience = replace(experience, sampler_logp_PG=trainer - gap)
    twin = copy.deepcopy(model)
    twin.zero_grad()
    total = 0.0
    for p, group in enumerate(experience.groups):
        rewards, logp = experience.rewards[p].values[0], rig.row_logprobs(twin, group)
        for i, reward in enumerate(rewards):
            advantage = reward - (sum(rewards) - reward) / 3
            ratio = gap[p, i].exp().item()
            weight = min(ratio, 2.0) if mode == "truncate" else (0.0 if ratio > 2.0 else ratio)
            total = total - weight * advantage * logp[i] / 16
    total.backward()
    expected = torch.cat([p.grad.flatten() for p in twin.parameters()])
    gradient, _, metrics = rig.gradient_of_update(rig.make_updater(model, **options), experience)
    assert rig.relative(gradient, expected) < 1e-9
    assert metrics["clip_ratio/region_mean"] == 0


def poison(model, name, value):
    dict(model.named_parameters())[name].data.view(-1)[0] = value


def test_a_non_finite_log_prob_stops_before_the_update_and_names_the_row():
    model = tiny.qwen2()
    updater = rig.make_updater(model)
    poison(model, "model.norm.weight", float("nan"))
    before = rig.flat(model).clone()
    with pytest.raises(NonFiniteError, match=r"step 7: the log-prob of the policy is nan in completion \d of prompt \d"):
        updater.update(rig.make_experience(), 0, step=7)
    assert torch.equal(rig.flat(model).nan_to_num(), before.nan_to_num())


def test_a_non_finite_reference_is_named():
    model = tiny.qwen2()
    updater = rig.make_updater(model, copy.deepcopy(model))
    poison(updater.reference.model, "model.norm.weight", float("inf"))
    with pytest.raises(NonFiniteError, match="reference model"):
        updater.update(rig.make_experience(), 0, step=1)


def test_a_non_finite_gradient_stops_before_the_update():
    model = tiny.qwen2()
    updater = rig.make_updater(model)
    before = rig.flat(model).clone()
    model.model.layers[0].mlp.up_proj.weight.register_hook(lambda grad: grad * float("nan"))
    with pytest.raises(NonFiniteError, match=r"step 1: the gradient norm is nan \(first in model.layers.0.mlp.up_proj.weight\)"):
        updater.update(rig.make_experience(), 0, step=1)
    assert torch.equal(rig.flat(model), before)


def out_of_memory_above(updater, rows):
    forward = updater.policy.forward

    def limited(batch):
        if len(batch.rows) > rows:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(batch)

    updater.policy.forward = limited


def test_out_of_memory_is_survived_with_smaller_micro_batches():
    start, experience = double_model(), rig.make_experience(seed=11)
    reference = rig.drifted(start)
    whole, _, _ = rig.gradient_of_update(rig.make_updater(copy.deepcopy(start), copy.deepcopy(reference)), experience)
    updater = rig.make_updater(copy.deepcopy(start), copy.deepcopy(reference), max_tokens=256)
    out_of_memory_above(updater, rows=2)
    gradient, _, _ = rig.gradient_of_update(updater, experience)
    assert rig.relative(gradient, whole) < 1e-9
    assert updater.max_tokens < 256


def test_a_row_that_does_not_fit_ends_with_what_to_change():
    updater = rig.make_updater(tiny.qwen2(), max_tokens=256)
    out_of_memory_above(updater, rows=0)
    with pytest.raises(DeviceMemoryError, match="max_completion_length"):
        updater.update(rig.make_experience(), 0, step=1)
