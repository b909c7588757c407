from __future__ import annotations

import numpy as np
import pytest
import tiny

from rloo_cli.errors import EngineError
from rloo_cli.rollout.engine import GenerationRequest, SamplingParams
from rloo_cli.rollout.rows import Rows, compact
from rloo_cli.rollout.stop_strings import StopStrings
from rloo_cli.types import FinishReason


def rows_of(params, generations=2, context=100, eos_ids=(9,), **kwargs):
    request = GenerationRequest(token_ids=(1, 2), num_generations=generations, first_row=4)
    return Rows(
        [request], params, tokenizer=tiny.byte_tokenizer(), eos_ids=eos_ids, context=context, version=3, **{"on_group": None, **kwargs}
    )


def first_stop(stop, text, *, special=()):
    """How many bytes of `text` are read when the stop string is seen, None = never."""
    watcher = StopStrings(stop, tiny.byte_tokenizer(), 1)
    for i, token in enumerate([*special, *text.encode()]):
        if watcher.reached(0, token):
            return i + 1
    return None


@pytest.mark.parametrize("ended", [[0, 0, 1], [1, 0, 0, 1, 0], [1, 1, 0, 0], [0, 1], [1, 0]])
def test_compacting_keeps_survivors_and_moves_few(ended):
    ended_n = np.array(ended, dtype=bool)
    order = compact(ended_n)
    assert sorted(order) == np.flatnonzero(~ended_n).tolist()
    assert (order != np.arange(len(order))).sum() == ended_n[: len(order)].sum()


def test_eos_at_the_last_token_is_stopped_not_truncated():
    rows = rows_of(SamplingParams(max_new_tokens=2))
    assert rows.record(np.array([5, 6]), np.array([-1.0, -2.0])).tolist() == [False, False]
    assert rows.record(np.array([9, 7]), np.array([-3.0, -4.0])).tolist() == [True, True]
    ((first, second),) = rows.results()
    assert (first.token_ids, first.logprobs, first.finish_reason, first.weights_version) == ((5, 9), (-1.0, -3.0), FinishReason.STOPPED, 3)
    assert (second.token_ids, second.finish_reason) == ((6, 7), FinishReason.TRUNCATED)


def test_without_any_limit_the_error_names_the_field():
    with pytest.raises(EngineError, match="set max_completion_length"):
        rows_of(SamplingParams(max_new_tokens=None), context=None)


def test_the_table_grows_beyond_its_first_block():
    rows = rows_of(SamplingParams(max_new_tokens=700), generations=1, context=1000)
    for token in range(10, 710):
        rows.record(np.array([token]), np.array([-0.5]))
    assert rows.results()[0][0].token_ids == tuple(range(10, 710))


@pytest.mark.parametrize(
    ("stop", "text", "expected"),
    [
        (["END"], "the END of", 7),
        (["END"], "the EN and ED", None),
        (["é!"], "né!x", 4),
        (["漢"], "a漢字", 4),
        (["\n\n", "ab"], "xaab", 4),
        (["🙂🙂"], "🙂 🙂🙂", 13),
    ],
)
def test_stop_strings_are_seen_at_the_byte_that_completes_them(stop, text, expected):
    assert first_stop(stop, text) == expected


def test_special_tokens_are_no_text_for_stop_strings():
    assert first_stop(["<|im_end|>"], "", special=[tiny.IM_END]) is None
    assert first_stop(["ab"], "b", special=[ord("a"), tiny.IM_END]) == 3


def test_rows_are_watched_apart():
    watcher = StopStrings(["ab"], tiny.byte_tokenizer(), 2)
    assert not watcher.reached(0, ord("a"))
    assert not watcher.reached(1, ord("b"))
    assert watcher.reached(0, ord("b"))
