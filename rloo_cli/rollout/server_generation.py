"""A batch of prompts at a vLLM server: one HTTP request a group, all at once, each answer checked before anybody sees it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rloo_cli.rollout.engine import GenerationRequest, OnGroup, RandomKey, SamplingParams
from rloo_cli.rollout.server_answers import Expected, completions_of
from rloo_cli.rollout.server_client import ServerClient, TransientFault, leave
from rloo_cli.rollout.server_outage import Outage
from rloo_cli.rollout.vllm_outputs import RowBounds
from rloo_cli.rollout.vllm_sampling import sampling_fields
from rloo_cli.types import Completion

T = TypeVar("T")

QUIET_SECONDS = 5.0
"""Without a finished group, before the server is asked whether it still is."""
STALL_SECONDS, STALL_SECONDS_A_TOKEN, STALL_SECONDS_A_PROMPT_TOKEN = 20.0, 0.5, 0.002
"""No group at all finished for this long, plus for each token that the longest row may have, plus for each token of all prompts: it hangs."""
ROWS_AT_ONCE = 256
"""That a stock vLLM decodes."""
ANSWER_BYTES, ANSWER_BYTES_A_TOKEN = 1 << 16, 512
"""Cap of an answer: a token takes about 130 bytes with its log-prob."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """One prompt as it is sent."""

    token_ids: Sequence[int]
    first_row: int
    bodies: Sequence[dict[str, Any]]
    """One for the whole group, whose row g draws by the first row's seed + g; greedy, where vLLM takes no n > 1, one a row."""

    @property
    def max_tokens(self) -> int:
        """Longest completion."""
        return int(self.bodies[0]["sampling_params"]["max_tokens"])


def group_request(
    request: GenerationRequest, params: SamplingParams, key: RandomKey, eos_ids: Collection[int], max_tokens: int
) -> GroupRequest:
    """The request for a group, or for this rank's part of one: the seeds are those of the whole group in one request."""
    start = request.first_row if request.group_row is None else request.group_row
    fields = sampling_fields(params, key, start, eos_ids=eos_ids, max_tokens=max_tokens)
    fields["seed"] += request.first_row - start
    count = request.num_generations
    one: dict[str, Any] = {"token_ids": list(request.token_ids), "sampling_params": fields}
    bodies = [one] * count if params.temperature == 0 else [{**one, "sampling_params": {**fields, "n": count}}]
    return GroupRequest(token_ids=request.token_ids, first_row=request.first_row, bodies=bodies)


class Generation:
    """A batch under one version of the weights. `run` may be called again for what is missing."""

    def __init__(
        self,
        client: ServerClient,
        *,
        version: int,
        vocab_size: int,
        eos_ids: Collection[int],
        has_stop_strings: bool,
        outage: Outage,
        check_alive: Callable[[], Awaitable[None]],
        ranks: int = 1,
    ) -> None:
        """`outage` paces what the server declines; `check_alive` raises TransientFault if the server is not what it was; `ranks` ask at once."""
        self._client = client
        self._version, self._vocab_size, self._eos_ids, self._has_stop_strings = version, vocab_size, eos_ids, has_stop_strings
        self._outage, self._check_alive, self._ranks = outage, check_alive, ranks

    async def run(self, groups: Mapping[int, GroupRequest], finish: OnGroup) -> None:
        """Ask for all groups at once, by index, and hand each on when its last row is there.

        Raises:
            TransientFault: the connection was lost, or nothing came for too long; what was handed on stays good.
            WrongVersionError: a completion by other weights.
            EngineError, NonFiniteError: an answer that is none.
        """
        tasks = {asyncio.ensure_future(self._group(index, group)): index for index, group in groups.items()}
        stall = _stall_seconds(groups.values(), self._ranks)
        progress = time.monotonic()
        try:
            pending = set(tasks)
            while pending:
                done, pending = await asyncio.wait(pending, timeout=QUIET_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=tasks.__getitem__):
                    finish(tasks[task], task.result())
                if done:
                    progress = time.monotonic()
                elif time.monotonic() - progress > stall:
                    raise TransientFault(f"no completion for {stall:.0f} s")
                else:
                    await self._check_alive()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _group(self, index: int, group: GroupRequest) -> tuple[Completion, ...]:
        """The whole group of one prompt; where the server answers, and declines (429, 500, 503), this prompt alone is sent again."""
        while True:
            try:
                parts = await _all_or_first_error(self._rows(index, group, number) for number in range(len(group.bodies)))
            except TransientFault as fault:
                if fault.status is None:
                    raise
                await self._outage.wait(fault)
            else:
                return tuple(completion for part in parts for completion in part)

    async def _rows(self, index: int, group: GroupRequest, number: int) -> tuple[Completion, ...]:
        """The rows that one body asks for."""
        body = group.bodies[number]
        count = body["sampling_params"]["n"]
        cap = ANSWER_BYTES + ANSWER_BYTES_A_TOKEN * count * group.max_tokens
        document = await self._client.call("POST", "/inference/v1/generate", body, seconds=None, max_bytes=cap)
        bounds = RowBounds(
            place=f"request {index}",
            max_tokens=group.max_tokens,
            vocab_size=self._vocab_size,
            eos_ids=self._eos_ids,
            has_stop_strings=self._has_stop_strings,
        )
        engine = f"vLLM server {self._client.address}"
        return completions_of(
            document, Expected(count=count, version=self._version, bounds=bounds, first_row=group.first_row + number, engine=engine)
        )


def _stall_seconds(groups: Collection[GroupRequest], ranks: int) -> float:
    """Other ranks ask for as much, and their rows may all be decoded before ours."""
    longest = max((group.max_tokens for group in groups), default=0)
    prompts = sum(len(group.token_ids) for group in groups)
    rows = sum(body["sampling_params"]["n"] for group in groups for body in group.bodies)
    turns = 1 + rows * (ranks - 1) // ROWS_AT_ONCE
    return STALL_SECONDS + STALL_SECONDS_A_TOKEN * longest * turns + STALL_SECONDS_A_PROMPT_TOKEN * prompts * ranks


async def _all_or_first_error(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order; the first error ends the others."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        leave(*tasks)
