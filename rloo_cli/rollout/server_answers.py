"""What `/inference/v1/generate` answers for one prompt → completions, each checked, or nothing at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rloo_cli.errors import EngineError
from rloo_cli.rollout.server_client import TransientFault
from rloo_cli.rollout.vllm_outputs import RowAnswer, RowBounds, completion_of
from rloo_cli.types import Completion

GIVEN_UP = {"abort", "error"}
"""How vLLM ends a row that it did not finish: it was paused, or is being shut down."""


class WrongVersionError(Exception):
    """A completion made by other weights than the server was given last."""

    def __init__(self, found: str) -> None:
        super().__init__(found)
        self.found = found


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What an answer has to be."""

    count: int
    """Completions of the prompt."""
    version: int
    bounds: RowBounds
    """`place` names the prompt; the row's number is put behind it."""
    first_row: int
    engine: str
    """Names the server in messages."""


def completions_of(document: Any, expected: Expected) -> tuple[Completion, ...]:
    """The `count` completions of one prompt, in order.

    Raises:
        EngineError, NonFiniteError: the answer is not one that was asked for.
        TransientFault: the server gave up on a row.
        WrongVersionError: other weights made a row.
    """
    choices = _in_order(document, expected)
    if any(choice.get("finish_reason") in GIVEN_UP for choice in choices):
        raise TransientFault("the server gave up on a request")
    for choice in choices:
        _check_version(choice, expected)
    return tuple(_completion(choice, expected, index) for index, choice in enumerate(choices))


def _in_order(document: Any, expected: Expected) -> list[dict[str, Any]]:
    choices = document.get("choices") if isinstance(document, dict) else None
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise _useless(expected, "something else than completions")
    if len(choices) != expected.count or {_index(choice) for choice in choices} != set(range(expected.count)):
        raise _useless(expected, f"{len(choices)} completions of {expected.count}")
    return sorted(choices, key=_index)


def _index(choice: dict[str, Any]) -> int:
    index = choice.get("index")
    return index if type(index) is int else -1


def _check_version(choice: dict[str, Any], expected: Expected) -> None:
    """Every token of a row must come from the weights given last."""
    spans = choice.get("weight_versions")
    if not isinstance(spans, list) or not all(isinstance(span, dict) for span in spans):
        raise _useless(expected, "completions without the version of their weights")
    versions = [str(span.get("version")) for span in spans]
    if wrong := [version for version in versions if version != str(expected.version)]:
        raise WrongVersionError(wrong[0][:40])
    ends = [(span.get("start"), span.get("end")) for span in spans]
    if ends != [(0, len(_list(choice, "token_ids", expected)))]:
        raise _useless(expected, "a version for only some of the tokens")


def _completion(choice: dict[str, Any], expected: Expected, index: int) -> Completion:
    token_ids = _list(choice, "token_ids", expected)
    logprobs = choice.get("logprobs")
    content = _list(logprobs if isinstance(logprobs, dict) else {}, "content", expected)
    if [entry.get("token_id") if isinstance(entry, dict) else None for entry in content] != token_ids:
        raise _useless(expected, f"{len(content)} log-probs of other tokens than the {len(token_ids)} sampled ones")
    answer = RowAnswer(
        token_ids=token_ids, logprobs=[entry.get("logprob") for entry in content], finish_reason=str(choice.get("finish_reason"))
    )
    bounds = replace(expected.bounds, place=f"{expected.bounds.place}, row {expected.first_row + index}")
    return completion_of(answer, bounds, weights_version=expected.version, engine=expected.engine)


def _list(document: dict[str, Any], name: str, expected: Expected) -> Sequence[Any]:
    value = document.get(name)
    if not isinstance(value, list):
        raise _useless(expected, f"no {name}")
    return value


def _useless(expected: Expected, what: str) -> EngineError:
    return EngineError(f"{expected.engine} answered {what} for {expected.bounds.place}: the answer is not used")


__all__ = ["Expected", "WrongVersionError", "completions_of"]
