from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rloo_cli.rollout import sampling, transforms
from rloo_cli.rollout.engine import RandomKey, SamplingParams
from rloo_cli.rollout.sampling import Sampler, inverse_cdf
from rloo_cli.rollout.transforms import transform
from rloo_cli.rollout.uniforms import draw_uniforms

KEY = RandomKey(seed=3, step=4)


def random_logits(rows, size, seed=0):
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * 3


def sampler_for(params, rows=4, size=11, prompts=None):
    return Sampler(params, KEY, range(rows), prompts or [(1, 2)] * rows, vocabulary=size)


@pytest.mark.parametrize("start", [0, 1, 3, 4, 250])
def test_later_and_longer_stretches_hold_the_same_numbers(start):
    whole = draw_uniforms(KEY, [5, 9], 0, 300)
    np.testing.assert_array_equal(draw_uniforms(KEY, [5, 9], start, start + 17), whole[:, start : start + 17])
    np.testing.assert_array_equal(draw_uniforms(KEY, [9], start, start + 1), whole[1:, start : start + 1])


@pytest.mark.parametrize("other", [RandomKey(seed=4, step=4), RandomKey(seed=3, step=5), RandomKey(seed=3, step=4, stream="eval")])
def test_streams_share_no_number(other):
    rows = range(50)
    numbers = np.concatenate([draw_uniforms(KEY, rows, 0, 50), draw_uniforms(other, rows, 0, 50)])
    assert len(np.unique(numbers)) == numbers.size


def test_uniforms_are_uniform_and_independent_between_rows_and_tokens():
    numbers = draw_uniforms(KEY, range(400), 0, 250)
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    chi_square = ((counts - numbers.size / 20) ** 2 / (numbers.size / 20)).sum()
    assert chi_square < 43.8  # 19 degrees of freedom, p = 0.001
    centred = numbers - 0.5
    for neighbours in (centred[:-1] * centred[1:], centred[:, :-1] * centred[:, 1:]):
        assert abs(neighbours.mean()) < 4 / 12 / math.sqrt(neighbours.size)


@pytest.mark.parametrize("size", [5, 300, 5000, 9216])
def test_a_token_is_the_first_whose_cumulative_probability_exceeds_the_uniform(size):
    probs = random_logits(64, size).softmax(-1)
    uniforms = torch.from_numpy(draw_uniforms(KEY, range(64), 0, 1)[:, 0].copy())
    cumulative = probs.double().cumsum(-1) / probs.double().sum(-1, keepdim=True)
    expected = (cumulative <= uniforms[:, None]).sum(-1)
    drawn = inverse_cdf(probs, uniforms)[:, 0]
    assert (drawn != expected).sum() <= 1  # rounding of the block sums, at an edge
    assert (drawn - expected).abs().max() <= 1


@pytest.mark.parametrize("size", [7, 5000])
@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2.0**-53])
def test_a_token_of_probability_zero_is_never_drawn(size, uniform):
    probs = torch.zeros(1, size)
    probs[0, [2, size - 3]] = torch.tensor([0.3, 0.7])
    assert inverse_cdf(probs, torch.tensor([uniform], dtype=torch.float64)).item() in (2, size - 3)


def test_draws_follow_the_distribution():
    params, rows = SamplingParams(max_new_tokens=8, temperature=1.3), 4000
    logits = random_logits(1, 6, seed=2).expand(rows, -1)
    sampler = sampler_for(params, rows, 6)
    tokens = torch.cat([sampler.draw(logits, position)[0] for position in range(8)])
    expected = (logits[0] / 1.3).softmax(-1) * len(tokens)
    chi_square = ((tokens.bincount(minlength=6) - expected) ** 2 / expected).sum()
    assert chi_square < 20.5  # 5 degrees of freedom, p = 0.001


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("size", [11, 5000])
def test_logprobs_are_those_of_the_tempered_logits(temperature, size):
    logits = random_logits(4, size)
    tokens, logprobs = sampler_for(SamplingParams(max_new_tokens=3, temperature=temperature), 4, size).draw(logits, 0)
    expected = (logits / temperature).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)


def test_temperature_zero_takes_the_most_probable_token_and_its_plain_logprob():
    logits = random_logits(4, 11)
    tokens, logprobs = sampler_for(SamplingParams(max_new_tokens=3, temperature=0.0)).draw(logits, 0)
    assert torch.equal(tokens, logits.argmax(-1))
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).amax(-1))


TRANSFORMS = [
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_p": 0.6},
    {"top_p": 0.999},
    {"min_p": 0.1},
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 1.4, "temperature": 1.5, "top_k": 40, "top_p": 0.9, "min_p": 0.05},
]


@pytest.mark.parametrize("fields", TRANSFORMS, ids=str)
@pytest.mark.parametrize("size", [50, 3000])
def test_transforms_are_those_of_transformers(fields, size):
    params, logits = SamplingParams(max_new_tokens=3, **fields), random_logits(6, size)
    prompts = torch.arange(6 * 4).view(6, 4) % size
    theirs = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(params.repetition_penalty), TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        theirs.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        theirs.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        theirs.append(MinPLogitsWarper(params.min_p))
    seen = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, prompts, value=True)
    torch.testing.assert_close(transform(logits, params, seen), theirs(prompts, logits.clone()))


def test_a_nucleus_wider_than_the_candidates_is_found_by_sorting(monkeypatch):
    params, logits = SamplingParams(max_new_tokens=3, top_p=0.95), random_logits(6, 3000)
    narrow = transform(logits, params, None)
    monkeypatch.setattr(transforms, "NUCLEUS_CANDIDATES", 4)
    assert torch.equal(transform(logits, params, None), narrow)


def test_the_repetition_penalty_counts_what_was_drawn():
    sampler = sampler_for(SamplingParams(max_new_tokens=3, repetition_penalty=2.0, temperature=0.0), rows=2)
    logits = torch.zeros(2, 11)
    logits[:, 5], logits[:, 6], logits[:, 7] = 3.0, 2.5, 2.0
    drawn = []
    for position in range(3):
        tokens, _ = sampler.draw(logits, position)
        drawn.append(tokens.tolist())
    assert drawn == [[5, 5], [6, 6], [7, 7]]


def test_rows_keep_their_numbers_when_others_leave(monkeypatch):
    monkeypatch.setattr(sampling, "UNIFORMS_AHEAD", 4)
    logits = random_logits(1, 5000).expand(4, -1)
    params = SamplingParams(max_new_tokens=20)
    whole, fewer = sampler_for(params, 4, 5000), sampler_for(params, 4, 5000)
    for position in range(12):
        tokens = whole.draw(logits, position)[0]
        if position == 6:
            fewer.reorder(torch.tensor([3, 1]))
        left = [0, 1, 2, 3] if position < 6 else [3, 1]
        assert torch.equal(fewer.draw(logits[left], position)[0], tokens[left])


def test_rows_drawn_in_pieces_are_drawn_the_same(monkeypatch):
    params, logits = SamplingParams(max_new_tokens=3, repetition_penalty=1.5), random_logits(5, 11)
    whole, pieces = sampler_for(params, 5), sampler_for(params, 5)
    for position in range(3):
        tokens, logprobs = whole.draw(logits, position)
        with monkeypatch.context() as patch:
            patch.setattr(sampling, "DRAW_LOGITS", 22)
            again, logprobs_again = pieces.draw(logits, position)
        assert torch.equal(tokens, again)
        assert torch.equal(logprobs, logprobs_again)


def test_nan_logits_give_nan_logprobs():
    logits = random_logits(4, 11)
    logits[2, 3] = float("nan")
    assert sampler_for(SamplingParams(max_new_tokens=3)).draw(logits, 0)[1].isnan().tolist() == [False, False, True, False]
