"""Makes a generation batch: generate, decode, score.

Rewards of a finished group are computed in their workers while the other groups still decode.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from rloo_cli.errors import EngineError, NonFiniteError
from rloo_cli.rollout.engine import Engine, GenerationRequest, RandomKey, SamplingParams
from rloo_cli.run.ranks import Ranks
from rloo_cli.run.rollouts import RolloutRow
from rloo_cli.training.failed_batch import BatchInHand, unfinished_rows
from rloo_cli.training.non_finite import check_completions, row_error
from rloo_cli.types import Completion, FinishReason, Group, GroupRewards, Prompt, TrainerState

if TYPE_CHECKING:
    from rloo_cli.rewards.runner import RewardRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsOfGroup:
    """Completions of a group that one rank sampled: all of them, or those between the ranks' borders."""

    first: int
    """Index in the group of the first one."""
    completions: tuple[Completion, ...]
    texts: tuple[str, ...]


class Collector:
    """Prompts in, scored groups out. Every rank samples its share of the rows and scores the groups that begin there; all get everything."""

    def __init__(
        self, engine: Engine, rewards: RewardRunner, tokenizer: PreTrainedTokenizerBase, *, max_steps: int, ranks: Ranks | None = None
    ) -> None:
        self.engine = engine
        self.rewards = rewards
        self.tokenizer = tokenizer
        self.max_steps = max_steps
        self.ranks = ranks or Ranks()
        self._in_hand: BatchInHand | None = None

    def collect(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        key: RandomKey,
        *,
        step: int,
        num_generations: int,
        check_stop: Callable[[], None],
        first_prompt: int = 0,
    ) -> tuple[list[Group], list[GroupRewards], dict[str, float]]:
        """The groups and rewards of the prompts, in order, and the seconds of each phase.

        `step` is what reward functions are told; `first_prompt` is the place of `prompts[0]` among all prompts of the step, where they come in parts.
        `check_stop` is called between tokens and raises to give the batch up.

        Raises:
            EngineError, RewardError, NonFiniteError: see the engine and the reward runner.
            NeighbourError: another rank's engine or reward failed.
        """
        first_row = first_prompt * num_generations
        batch = BatchInHand(step=step, prompts=prompts, groups={}, num_generations=num_generations, first_row=first_row)
        self._in_hand = batch
        started = time.perf_counter()
        try:
            sampled = self.ranks.together(lambda: self._sample(batch, params, key, check_stop))
            generated = time.perf_counter()
            scores = self.ranks.together(lambda: self._score_the_rest(batch, sampled, check_stop))
        except NonFiniteError as error:
            self.rewards.discard()
            raise self._placed(error) from error
        except BaseException:
            self.rewards.discard()
            raise
        if self.ranks.world_size > 1:
            scores = {p: score for part in self.ranks.gather(scores) for p, score in part.items()}
        seconds = {"perf/seconds/generate": generated - started, "perf/seconds/reward": time.perf_counter() - generated}
        return [batch.groups[i] for i in range(len(prompts))], [scores[i] for i in range(len(prompts))], seconds

    def _sample(self, batch: BatchInHand, params: SamplingParams, key: RandomKey, check_stop: Callable[[], None]) -> dict[int, RowsOfGroup]:
        """This rank's rows, by group; groups that are whole are on their way to their rewards."""
        own = self._own_rows(batch)
        requests = [
            GenerationRequest(
                token_ids=batch.prompts[p].token_ids,
                num_generations=len(members),
                first_row=batch.first_row + p * batch.num_generations + members.start,
                group_row=batch.first_row + p * batch.num_generations,
                visual=batch.prompts[p].visual,
            )
            for p, members in own.items()
        ]
        sampled: dict[int, RowsOfGroup] = {}
        order = list(own)

        def finish(index: int, completions: tuple[Completion, ...]) -> None:
            p = order[index]
            check_completions(
                batch.prompts[p], completions, step=batch.step, first_row=requests[index].first_row, num_generations=len(own[p])
            )
            texts = self.tokenizer.batch_decode([c.token_ids for c in completions], skip_special_tokens=True)
            self._check_stop_strings(batch, p, completions, texts, params.stop)
            sampled[p] = RowsOfGroup(first=own[p].start, completions=completions, texts=tuple(texts))
            if len(own[p]) == batch.num_generations:
                self._submit(batch, p, [sampled[p]])

        def between_tokens() -> None:
            """Hand finished groups on to idle reward workers while the others decode; leave if a stop was asked for."""
            self.rewards.poll()
            check_stop()

        self.engine.generate(requests, params, key, on_group=finish, check_stop=between_tokens)
        return sampled

    def _check_stop_strings(
        self, batch: BatchInHand, p: int, completions: Sequence[Completion], texts: Sequence[str], stop: Sequence[str]
    ) -> None:
        """An engine with another tokenizer, as a server may have, ends rows by words that are not there."""
        for completion, text in zip(completions, texts, strict=True):
            if completion.finish_reason is not FinishReason.STOP_STRING or any(word in text for word in stop):
                continue
            whole = self.tokenizer.decode(list(completion.token_ids))
            if not any(word in whole for word in stop):
                raise EngineError(
                    f"step {batch.step}: the engine ended a completion of prompt {batch.prompts[p].row} by a stop string that is not in it "
                    f"({text[-40:]!r}): it reads tokens otherwise than the trainer. Give both the same tokenizer files."
                )

    def _score_the_rest(
        self, batch: BatchInHand, sampled: Mapping[int, RowsOfGroup], check_stop: Callable[[], None]
    ) -> dict[int, GroupRewards]:
        """The rewards of the groups that begin on this rank; afterwards every group is known on every rank."""
        if self.ranks.world_size > 1:
            own = self._own_rows(batch)
            parts: dict[int, list[RowsOfGroup]] = {}
            for rank_rows in self.ranks.gather(dict(sampled)):
                for p, rows in rank_rows.items():
                    parts.setdefault(p, []).append(rows)
            for p in sorted(parts.keys() - batch.groups.keys()):
                if p in own and own[p].start == 0:
                    self._submit(batch, p, parts[p])
                else:
                    batch.groups[p] = self._group(batch.prompts[p], parts[p])
        return self.rewards.collect(check_stop)

    def _own_rows(self, batch: BatchInHand) -> dict[int, range]:
        """Which completions of which groups this rank samples: a contiguous share of all rows."""
        width = batch.num_generations
        share = self.ranks.share(len(batch.prompts) * width)
        groups = range(share.start // width, -(-share.stop // width))
        own = {p: range(max(share.start - p * width, 0), min(share.stop - p * width, width)) for p in groups}
        return {p: members for p, members in own.items() if len(members)}

    def _submit(self, batch: BatchInHand, p: int, parts: Sequence[RowsOfGroup]) -> None:
        batch.groups[p] = self._group(batch.prompts[p], parts)
        self.rewards.submit(p, batch.groups[p], TrainerState(step=batch.step, max_steps=self.max_steps))

    def _group(self, prompt: Prompt, parts: Sequence[RowsOfGroup]) -> Group:
        ordered = sorted(parts, key=lambda part: part.first)
        return Group(
            prompt=prompt,
            completions=tuple(c for part in ordered for c in part.completions),
            texts=tuple(t for part in ordered for t in part.texts),
        )

    def rows_in_hand(self, error: NonFiniteError) -> list[RolloutRow]:
        """The batch that `collect` failed with, as far as it was sampled."""
        assert self._in_hand is not None
        return unfinished_rows(
            self._in_hand, error, self.rewards.names, weights_version=self.engine.weights_version, tokenizer=self.tokenizer
        )

    @property
    def first_row_in_hand(self) -> int:
        """Row of that batch's first completion among all of the step."""
        assert self._in_hand is not None
        return self._in_hand.first_row

    def _placed(self, error: NonFiniteError) -> NonFiniteError:
        """The engine's error, which knows a row of the step, with the step and the prompt in its message."""
        batch = self._in_hand
        if batch is None or error.row is None or error.message.startswith("step "):
            return error
        return row_error(
            step=batch.step,
            place=error.place,
            value=error.value if error.value is not None else float("nan"),
            row=error.row,
            num_generations=batch.num_generations,
            prompt=batch.prompts[(error.row - batch.first_row) // batch.num_generations],
            token=error.token or 0,
            token_ids=error.token_ids,
            remedy="Lower the learning rate, or train with `bf16: false`.",
        )
