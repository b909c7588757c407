"""Completions that have to match a regular expression, on real vLLM in this process."""

from __future__ import annotations

import re

import pytest
import tiny
import torch
from colocated import KEY, PROMPTS, build, engine_for, forward_logits, requests

from rloo_cli.errors import RecipeError
from rloo_cli.rollout.engine import SamplingParams
from rloo_cli.types import FinishReason

REGEX = r"(yes|no): [0-9]{1,3}\."


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("structured")
    tiny.byte_tokenizer().save_pretrained(folder)
    engine = engine_for(folder, build("qwen2"), constrains=True)
    engine.load_weights(build("qwen2").state_dict().items(), 1)
    yield engine
    engine.close()


def texts_of(groups):
    tokenizer = tiny.byte_tokenizer()
    return [tokenizer.decode(list(c.token_ids), skip_special_tokens=True) for group in groups for c in group]


def test_every_completion_matches_and_ends_by_itself(engine):
    groups = engine.generate(requests(generations=8), SamplingParams(max_new_tokens=40, regex=REGEX), KEY)
    texts = texts_of(groups)
    assert all(re.fullmatch(REGEX, text) for text in texts), texts
    assert len(set(texts)) > 10
    assert {c.finish_reason for group in groups for c in group} == {FinishReason.STOPPED}
    assert all(c.token_ids[-1] == tiny.EOS for group in groups for c in group)


def test_one_that_the_length_cuts_off_is_a_beginning_and_counts_as_truncated(engine):
    (group, *_) = engine.generate(requests(generations=8), SamplingParams(max_new_tokens=4, regex=REGEX), KEY)
    assert {c.finish_reason for c in group} == {FinishReason.TRUNCATED}
    assert all(re.fullmatch(r"yes:|no: ", text) for text in texts_of([group]))


def test_the_sampler_is_the_model_over_the_tokens_that_fit(engine):
    """What comes back are log-probs of the constrained sampler, so the distance to the policy is measured."""
    model = build("qwen2")
    (group, *_) = engine.generate(requests(generations=4), SamplingParams(max_new_tokens=40, regex=r"[ab]{6}"), KEY)
    letters = [ord("a"), ord("b")]
    for completion in group:
        logits = forward_logits(model, PROMPTS[0], completion)
        expected = logits[:6, letters].log_softmax(-1)
        chosen = torch.tensor([letters.index(token) for token in completion.token_ids[:6]])
        found = torch.tensor(completion.logprobs)
        assert torch.allclose(found[:6], expected.gather(1, chosen[:, None])[:, 0], atol=2e-3)
        assert found[6] == pytest.approx(0, abs=1e-6)  # nothing but the end fits


def test_batches_without_an_expression_are_as_ever(engine):
    plain = engine.generate(requests(), SamplingParams(max_new_tokens=12), KEY)
    assert not all(re.fullmatch(REGEX, text) for text in texts_of(plain))


def test_an_expression_that_is_none_is_told_and_leaves_the_engine_usable(engine):
    with pytest.raises(RecipeError, match=r"generation\.vllm_structured_outputs_regex: vLLM cannot follow '\(unclosed': .*invalid regex"):
        engine.generate(requests(), SamplingParams(max_new_tokens=12, regex="(unclosed"), KEY)
    groups = engine.generate(requests(), SamplingParams(max_new_tokens=40, regex=REGEX), KEY)
    assert all(re.fullmatch(REGEX, text) for text in texts_of(groups))
