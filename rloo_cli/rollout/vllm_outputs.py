"""What a vLLM engine answered for one row → a `Completion`, with every check. Imports no vLLM."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rloo_cli.errors import EngineError, NonFiniteError
from rloo_cli.types import Completion, FinishReason

ROUNDING = 1e-3  # nats by which a log-prob may exceed 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RowAnswer:
    """One row as the engine gave it, nothing believed yet.

    Example: `RowAnswer(token_ids=[72, 257], logprobs=[-0.1, -2.3], finish_reason="stop")`
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float | None]
    """Of the sampled tokens, nats."""
    finish_reason: str | None
    """vLLM's word: stop, length, abort, …"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBounds:
    """What a row's answer has to fit."""

    place: str
    """Names the row in messages: "request 2, row 9"."""
    max_tokens: int
    vocab_size: int
    eos_ids: Collection[int]
    has_stop_strings: bool
    """Whether the row could end by one."""


def completion_of(answer: RowAnswer, bounds: RowBounds, *, weights_version: int, engine: str = "vLLM") -> Completion:
    """The checked completion; `engine` names the engine in messages (with the address, where there is one).

    Raises:
        EngineError: the answer is not one whole row that these parameters can give.
        NonFiniteError: a log-prob is NaN or infinite.
    """
    token_ids = tuple(answer.token_ids)
    wrong = _wrong_tokens(token_ids, bounds) or _wrong_logprobs(answer.logprobs, len(token_ids))
    if wrong:
        raise EngineError(f"{engine} answered {wrong} for {bounds.place}: the answer is not used")
    for position, logprob in enumerate(answer.logprobs):
        assert logprob is not None
        if not math.isfinite(logprob):
            raise NonFiniteError(
                f"{engine} gave log-prob {logprob} at token {position + 1} of {bounds.place} (weights of step {weights_version}): "
                "lower the learning rate, or train with `bf16: false`"
            )
    return Completion(
        token_ids=token_ids,
        logprobs=tuple(float(logprob) for logprob in answer.logprobs if logprob is not None),
        finish_reason=_finish_reason(answer.finish_reason, token_ids, bounds, engine),
        weights_version=weights_version,
    )


def _wrong_tokens(token_ids: tuple[int, ...], bounds: RowBounds) -> str | None:
    """What is wrong with the ids, in words."""
    if not token_ids:
        return "no tokens"
    if len(token_ids) > bounds.max_tokens:
        return f"{len(token_ids)} tokens, {bounds.max_tokens} at most were asked for,"
    for token in token_ids:
        if type(token) is not int or not 0 <= token < bounds.vocab_size:
            return f"token {token!r:.40}, outside the vocabulary of {bounds.vocab_size},"
    if not set(token_ids[:-1]).isdisjoint(bounds.eos_ids):
        return "tokens after an end-of-sequence token"
    return None


def _wrong_logprobs(logprobs: Sequence[float | None], count: int) -> str | None:
    """What is wrong with the log-probs, in words; whether they are finite is not asked here."""
    if len(logprobs) != count:
        return f"{len(logprobs)} log-probs of {count} tokens"
    for logprob in logprobs:
        if isinstance(logprob, bool) or not isinstance(logprob, (int, float)) or (ROUNDING < logprob < math.inf):
            return f"log-prob {logprob!r:.40}"
    return None


def _finish_reason(word: str | None, token_ids: tuple[int, ...], bounds: RowBounds, engine: str) -> FinishReason:
    if word == "stop" and token_ids[-1] in bounds.eos_ids:
        return FinishReason.STOPPED
    if word == "stop" and bounds.has_stop_strings:
        return FinishReason.STOP_STRING
    if word == "length" and len(token_ids) == bounds.max_tokens:
        return FinishReason.TRUNCATED
    raise EngineError(
        f"{engine} ended {bounds.place} with {word!r:.40} after {len(token_ids)} of {bounds.max_tokens} tokens: the answer is not used"
    )
