"""The rows of one `generate` call: what each has sampled, when it ends and why, and when its group is whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from rloo_cli.errors import EngineError, NonFiniteError
from rloo_cli.rollout.engine import GenerationRequest, OnGroup, SamplingParams
from rloo_cli.rollout.stop_strings import StopStrings
from rloo_cli.types import Completion, FinishReason

TOKENS_AHEAD = 256
"""Columns by which the table of tokens grows: the longest completion may be far off."""


class Rows:
    """All B rows, numbered request by request; `active` are those that still grow, in the decoder's order."""

    def __init__(
        self,
        requests: Sequence[GenerationRequest],
        params: SamplingParams,
        *,
        tokenizer: Any,
        eos_ids: Iterable[int],
        context: int | None,
        version: int,
        on_group: OnGroup | None,
    ) -> None:
        """`context`: longest prompt + completion in tokens, None = no limit.

        Raises:
            EngineError: a prompt leaves no room for a completion, or nothing limits its length.
        """
        self.requests, self.version, self.on_group = requests, version, on_group
        self.eos_ids = np.asarray(sorted(eos_ids), dtype=np.int64)
        counts = [request.num_generations for request in requests]
        self.request_of_row = np.repeat(np.arange(len(requests)), counts)
        self.number_of_row = [request.first_row + g for request in requests for g in range(request.num_generations)]
        self.limit_of_row = np.repeat([completion_limit(i, request, params, context) for i, request in enumerate(requests)], counts)
        self.stop_strings = StopStrings(params.stop, tokenizer, len(self.request_of_row))
        self.active = np.arange(len(self.request_of_row))
        self.length = 0
        self.tokens_BT = np.empty((len(self.active), 0), dtype=np.int64)
        self.logprobs_BT = np.empty((len(self.active), 0))
        self.completions: list[list[Completion | None]] = [[None] * count for count in counts]
        self.growing = counts
        self.first_of_request = np.concatenate(([0], np.cumsum(counts))).astype(int)

    def restart(self, members: np.ndarray) -> None:
        """Go on with other rows, from their first token."""
        self.active, self.length = members, 0

    def record(self, tokens_n: np.ndarray, logprobs_n: np.ndarray) -> np.ndarray:
        """Append one token to every active row; True [n] where the row ended with it. Whole groups are announced.

        Raises:
            NonFiniteError: a log-prob is not finite.
        """
        finite_n = np.isfinite(logprobs_n)
        if not finite_n.all():
            slot = int(finite_n.argmin())
            self._raise_non_finite(int(self.active[slot]), float(logprobs_n[slot]))
        if self.length == self.tokens_BT.shape[1]:
            self._grow()
        self.tokens_BT[self.active, self.length] = tokens_n
        self.logprobs_BT[self.active, self.length] = logprobs_n
        self.length += 1
        stopped_n = (tokens_n[:, None] == self.eos_ids).any(1)
        full_n = self.limit_of_row[self.active] <= self.length
        found_n = self._stop_strings_n(tokens_n)
        ended_n = stopped_n | full_n | found_n
        for slot in np.flatnonzero(ended_n):
            reason = FinishReason.STOPPED if stopped_n[slot] else FinishReason.STOP_STRING if found_n[slot] else FinishReason.TRUNCATED
            self._end(int(self.active[slot]), reason)
        return ended_n

    def results(self) -> list[tuple[Completion, ...]]:
        """The completions of each request, in order."""
        return [tuple(group) for group in self.completions]  # type: ignore[arg-type]

    def _stop_strings_n(self, tokens_n: np.ndarray) -> np.ndarray:
        if not self.stop_strings.stop:
            return np.zeros(len(tokens_n), dtype=bool)
        pairs = zip(self.active.tolist(), tokens_n.tolist(), strict=True)
        return np.fromiter((self.stop_strings.reached(row, token) for row, token in pairs), dtype=bool, count=len(tokens_n))

    def _end(self, row: int, reason: FinishReason) -> None:
        index = int(self.request_of_row[row])
        self.completions[index][row - self.first_of_request[index]] = Completion(
            token_ids=tuple(self.tokens_BT[row, : self.length].tolist()),
            logprobs=tuple(self.logprobs_BT[row, : self.length].tolist()),
            finish_reason=reason,
            weights_version=self.version,
        )
        self.growing[index] -= 1
        if self.growing[index] == 0 and self.on_group is not None:
            self.on_group(index, tuple(self.completions[index]))  # type: ignore[arg-type]

    def _grow(self) -> None:
        ahead = ((0, 0), (0, TOKENS_AHEAD))
        self.tokens_BT = np.pad(self.tokens_BT, ahead)
        self.logprobs_BT = np.pad(self.logprobs_BT, ahead)

    def _raise_non_finite(self, row: int, value: float) -> None:
        raise NonFiniteError(
            f"the model's logits are not finite at token {self.length + 1} of row {self.number_of_row[row]} "
            f"(request {self.request_of_row[row]}, weights of step {self.version}): lower the learning rate, or train with `bf16: false`",
            place="log-prob of the token being sampled (the model's logits)",
            value=value,
            row=self.number_of_row[row],
            token=self.length,
            token_ids=self.tokens_BT[row, : self.length].tolist(),
        )


def completion_limit(index: int, request: GenerationRequest, params: SamplingParams, context: int | None) -> int:
    """Longest completion of a request, in tokens. `context`: longest prompt + completion, None = no limit.

    Raises:
        EngineError: a prompt leaves no room for a completion, or nothing limits its length.
    """
    room = None if context is None else context - len(request.token_ids)
    if room is not None and room < 1:
        raise EngineError(
            f"request {index}: a prompt of {len(request.token_ids)} tokens leaves no room in the model's context of {context}; set max_prompt_length"
        )
    limits = [limit for limit in (params.max_new_tokens, room) if limit is not None]
    if not limits:
        raise EngineError("the model names no longest context: set max_completion_length")
    return min(limits)


def compact(ended_n: np.ndarray) -> np.ndarray:
    """Slots of the surviving rows in their new order: those at the end fill the holes, so that few rows move."""
    survivors = np.flatnonzero(~ended_n)
    order = np.arange(len(survivors))
    holes = np.flatnonzero(ended_n[: len(survivors)])
    order[holes] = survivors[len(survivors) - len(holes) :]
    return order
