"""Log-probs, entropies and gradients of the scoring module against the model's own plain forward pass."""

import random

import precise
import pytest
import tiny
import torch

from rloo_cli.training.logprobs import Head, head_logprobs
from rloo_cli.training.microbatches import GroupRows, build_scoring_batch, cut_into_micro_batches, cuts_a_group
from rloo_cli.training.policy import Policy, make_reference

CPU = torch.device("cpu")
TEMPERATURE = 0.7


def some_groups(seed=0, groups=3, generations=4, vocab=250):
    draw = random.Random(seed)
    ids = lambda n: tuple(draw.randrange(vocab) for _ in range(n))  # noqa: E731
    return [
        GroupRows(
            group=p,
            prompt_ids=ids(draw.randint(1, 12)),
            rows=tuple(range(p * generations, (p + 1) * generations)),
            completion_ids=tuple(ids(draw.choice([1, 2, 5, 14])) for _ in range(generations)),
        )
        for p in range(groups)
    ]


def naive_logprobs(model, groups):
    """One row at a time, nothing shared, nothing padded: (log-probs [N], entropies [N])."""
    logp, entropy = [], []
    model.set_attn_implementation("sdpa")
    for group in groups:
        for completion in group.completion_ids:
            ids = torch.tensor([group.prompt_ids + completion])
            scores = model(input_ids=ids).logits[0, len(group.prompt_ids) - 1 : -1] / TEMPERATURE
            logs = scores.log_softmax(-1)
            logp.append(logs.gather(1, torch.tensor(completion)[:, None])[:, 0])
            entropy.append(-(logs.exp() * logs).sum(-1))
    return torch.cat(logp), torch.cat(entropy)


def score(model, groups, layout, chunk=None):
    policy = Policy(model, layout=layout, temperature=TEMPERATURE, head_chunk=chunk)
    return policy(build_scoring_batch(groups, layout, CPU))


def gradients(model, logp_N):
    model.zero_grad()
    weights = torch.linspace(-1, 2, len(logp_N), dtype=logp_N.dtype)
    (logp_N * weights).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("layout", ["packed", "plain"])
@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("name", ["qwen2", "llama", "gpt2", "gemma"])
def test_scores_and_gradients_equal_the_naive_forward(name, layout, chunk):
    model, groups = precise.in_float64(tiny.MODELS[name](dtype=torch.float64)), some_groups()
    expected, expected_entropy = naive_logprobs(model, groups)
    expected_gradient = gradients(model, expected)
    logp, entropy = score(model, groups, layout, chunk)
    assert (logp - expected).abs().max() < 1e-9
    assert (entropy - expected_entropy).abs().max() < 1e-9
    gradient = gradients(model, logp)
    assert (gradient - expected_gradient).norm() / expected_gradient.norm() < 1e-9


@pytest.mark.parametrize("name", list(tiny.MODELS))
def test_float32_scores_agree_to_the_stated_tolerance(name):
    model, groups = tiny.MODELS[name](), some_groups(seed=1)
    layout = "plain" if name == "falcon_h1" else "packed"
    expected, _ = naive_logprobs(model, groups)
    logp, _ = score(model, groups, layout)
    assert (logp - expected).abs().max() < 5e-5


def test_soft_capped_logits_and_their_gradient():
    model, groups = precise.in_float64(tiny.gemma(dtype=torch.float64, final_logit_softcapping=2.0)), some_groups(seed=2)
    expected, _ = naive_logprobs(model, groups)
    expected_gradient = gradients(model, expected)
    logp, _ = score(model, groups, "packed")
    assert (logp - expected).abs().max() < 1e-9
    assert (gradients(model, logp) - expected_gradient).norm() / expected_gradient.norm() < 1e-9


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("layout", ["packed", "plain"])
def test_an_untouched_reference_gives_the_same_bits(layout, autocast):
    model = tiny.qwen2()
    for parameter in model.parameters():  # what a bf16 checkpoint loads as
        parameter.data = parameter.data.bfloat16().float()
    policy = Policy(model, layout=layout, temperature=1.0, head_chunk=None)
    reference = make_reference(policy, low_precision=torch.bfloat16 if autocast else None)
    batch = build_scoring_batch(some_groups(seed=3), layout, CPU)
    policy.train()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logp, _ = policy(batch)
        with torch.no_grad():
            expected, _ = reference(batch)
    assert torch.equal(logp, expected)
    assert any(p.dtype == torch.bfloat16 for p in reference.parameters()) == autocast


def test_gradient_checkpointing_changes_nothing():
    model, groups = tiny.qwen2(dtype=torch.float64), some_groups(seed=4)
    plain = gradients(model, score(model, groups, "packed")[0])
    model.gradient_checkpointing_enable({"use_reentrant": False})
    policy = Policy(model.train(), layout="packed", temperature=TEMPERATURE, head_chunk=None)
    with policy.attention():
        again = gradients(model, policy(build_scoring_batch(groups, "packed", CPU))[0])
    assert torch.allclose(again, plain, rtol=1e-12, atol=1e-12)
    assert model.config._attn_implementation == "sdpa"


def test_micro_batches_hold_whole_groups_within_the_budget():
    groups = some_groups(seed=5, groups=6)
    batches = cut_into_micro_batches(groups, max_tokens=60, max_rows=None)
    assert not cuts_a_group(batches)
    assert all(sum(piece.tokens for piece in batch) <= 60 for batch in batches)
    assert sorted(row for batch in batches for piece in batch for row in piece.rows) == list(range(24))


def test_a_group_that_alone_is_too_large_is_cut_by_rows():
    groups = some_groups(seed=6, groups=2)
    batches = cut_into_micro_batches(groups, max_tokens=10**6, max_rows=3)
    assert cuts_a_group(batches)
    assert max(sum(len(piece.rows) for piece in batch) for batch in batches) <= 3
    assert sorted(row for batch in batches for piece in batch for row in piece.rows) == list(range(8))


def test_a_head_of_bf16_weights_adds_its_chunks_up_in_float32():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(512, 16, generator=generator).bfloat16()
    weight = (torch.randn(40, 16, generator=generator) * 0.3).bfloat16()
    target = torch.randint(40, (512,), generator=generator)

    def gradient(dtype, chunk):
        own = weight.to(dtype, copy=True).requires_grad_()
        logp_N, _ = head_logprobs(hidden.to(dtype), Head(weight_VD=own, bias_V=None), target, temperature=1.0, chunk=chunk)
        logp_N.sum().backward()
        return own.grad.double()

    exact = gradient(torch.float64, None)
    whole, chunked = ((gradient(torch.bfloat16, chunk) - exact).norm() / exact.norm() for chunk in (None, 4))
    assert chunked < 1.5 * whole
