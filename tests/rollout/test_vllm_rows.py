from __future__ import annotations

import json
from dataclasses import replace

import pytest

from rloo_cli.errors import EngineError, NonFiniteError, RecipeError
from rloo_cli.rollout.engine import RandomKey, SamplingParams
from rloo_cli.rollout.vllm_outputs import RowAnswer, RowBounds, completion_of
from rloo_cli.rollout.vllm_sampling import check_sampling, row_seed, sampling_fields
from rloo_cli.types import FinishReason

KEY = RandomKey(seed=1, step=2)
BOUNDS = RowBounds(place="request 2, row 9", max_tokens=3, vocab_size=260, eos_ids={257}, has_stop_strings=False)
GOOD = RowAnswer(token_ids=[72, 257], logprobs=[-0.1, -2.3], finish_reason="stop")


def completed(answer, **bounds):
    return completion_of(answer, replace(BOUNDS, **bounds), weights_version=4, engine="vLLM at http://localhost:8000")


def test_seeds_depend_on_stream_seed_step_and_row_alone():
    keys = [RandomKey(seed=s, step=t, stream=name) for s in (1, 2) for t in (1, 12) for name in ("train", "eval")]
    seeds = [row_seed(key, row) for key in keys for row in range(50)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert row_seed(KEY, 7) == 1428510844198412818 == row_seed(RandomKey(seed=1, step=2), 7)


def test_fields_are_json_and_leave_nothing_to_vllms_defaults():
    params = SamplingParams(max_new_tokens=9, temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.2, stop=("\n",))
    fields = sampling_fields(params, KEY, 7, eos_ids={9, 4}, max_tokens=8)
    assert json.loads(json.dumps(fields)) == fields
    assert fields == {
        "n": 1,
        "seed": row_seed(KEY, 7),
        "max_tokens": 8,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "logprobs": 0,
        "ignore_eos": True,
        "stop_token_ids": [4, 9],
        "stop": ["\n"],
        "include_stop_str_in_output": True,
        "skip_special_tokens": True,
        "detokenize": True,
    }


@pytest.mark.parametrize("temperature", [0.001, 2.5])
def test_a_temperature_that_vllm_would_change_or_refuse_is_refused(temperature):
    with pytest.raises(RecipeError, match=f"not at {temperature:g}; change it, or set `use_vllm: false`"):
        check_sampling(SamplingParams(max_new_tokens=4, temperature=temperature))


@pytest.mark.parametrize("temperature", [0.0, 0.01, 1.0, 2.0])
def test_temperatures_that_vllm_knows_pass(temperature):
    check_sampling(SamplingParams(max_new_tokens=4, temperature=temperature))


@pytest.mark.parametrize(
    ("answer", "stop", "reason"),
    [
        (GOOD, False, FinishReason.STOPPED),
        (replace(GOOD, token_ids=[257], logprobs=[-1.0]), False, FinishReason.STOPPED),
        (replace(GOOD, token_ids=[72, 73]), True, FinishReason.STOP_STRING),
        (replace(GOOD, token_ids=[72, 257]), True, FinishReason.STOPPED),
        (RowAnswer(token_ids=[1, 2, 3], logprobs=[0, -1, -2], finish_reason="length"), False, FinishReason.TRUNCATED),
    ],
)
def test_whole_rows_become_completions(answer, stop, reason):
    completion = completed(answer, has_stop_strings=stop)
    assert (completion.token_ids, completion.logprobs) == (tuple(answer.token_ids), tuple(map(float, answer.logprobs)))
    assert (completion.finish_reason, completion.weights_version) == (reason, 4)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"token_ids": [], "logprobs": []}, "answered no tokens"),
        ({"token_ids": [1, 2, 3, 4], "logprobs": [-1.0] * 4}, "answered 4 tokens, 3 at most"),
        ({"token_ids": [1, 260]}, "token 260, outside the vocabulary of 260"),
        ({"token_ids": [-1, 257]}, "token -1"),
        ({"token_ids": ["1", 257]}, "token '1'"),
        ({"token_ids": [True, 257]}, "token True"),
        ({"token_ids": [257, 257]}, "tokens after an end-of-sequence token"),
        ({"logprobs": [-1.0]}, "answered 1 log-probs of 2 tokens"),
        ({"logprobs": [-1.0, None]}, "log-prob None"),
        ({"logprobs": [-1.0, "x"]}, "log-prob 'x'"),
        ({"logprobs": [-1.0, 0.5]}, "log-prob 0.5"),
        ({"token_ids": [1, 2]}, "'stop' after 2 of 3 tokens"),
        ({"finish_reason": "length"}, "'length' after 2 of 3 tokens"),
        ({"finish_reason": "abort"}, "'abort' after 2 of 3 tokens"),
        ({"finish_reason": None}, "None after 2 of 3 tokens"),
    ],
)
def test_an_answer_that_is_no_whole_row_is_an_error(change, says):
    with pytest.raises(EngineError, match=says) as caught:
        completed(replace(GOOD, **change))
    assert "request 2, row 9" in caught.value.message
    assert "http://localhost:8000" in caught.value.message


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
def test_a_log_prob_that_is_not_finite_names_token_row_and_weights(value):
    with pytest.raises(NonFiniteError, match=r"at token 2 of request 2, row 9 \(weights of step 4\)"):
        completed(replace(GOOD, logprobs=[-1.0, value]))
