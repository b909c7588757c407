"""A generation batch with its rewards, and the collector that makes one: generate, decode, score.

Rewards of a finished group are computed in their workers while the other groups still decode.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedTokenizerBase

from rloo_cli.algorithm.advantages import combine_rewards
from rloo_cli.errors import NonFiniteError, RewardError
from rloo_cli.rollout.engine import Engine, GenerationRequest, RandomKey, SamplingParams
from rloo_cli.run.rollouts import RolloutRow
from rloo_cli.training.failed_batch import BatchInHand, unfinished_rows
from rloo_cli.training.non_finite import check_completions, row_error
from rloo_cli.types import Completion, FinishReason, Group, GroupRewards, Prompt, TrainerState

if TYPE_CHECKING:
    from rloo_cli.rewards.runner import RewardRunner

LARGEST_REWARD = 1e30  # its square sums in float64, its products in float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """A generation batch of P groups, and what has been computed about its rows.

    The last three fields are NaN where not yet known; they are filled by the first optimizer step that the batch serves.
    """

    step: int
    """The optimizer step it was generated for, from 1."""
    groups: tuple[Group, ...]
    rewards: tuple[GroupRewards, ...]
    reward_PG: torch.Tensor
    """Weighted sum before clip and KL, float64; 0 where unscored."""
    is_scored_PG: torch.Tensor
    is_truncated_PG: torch.Tensor
    sampler_logp_PG: torch.Tensor
    """Σ_t log-prob as the engine reported it, float64, nats."""
    kl_PG: torch.Tensor
    """Σ_t (log π − log π_ref) at the sampling policy, float64, nats."""
    old_logp_PG: torch.Tensor
    """Σ_t log π at the sampling policy, by the trainer, float64, nats."""
    advantage_PG: torch.Tensor
    """What the loss uses, float64."""

    @property
    def num_generations(self) -> int:
        """G."""
        return self.reward_PG.shape[1]


def build_experience(step: int, groups: Sequence[Group], rewards: Sequence[GroupRewards], weights: Sequence[float]) -> Experience:
    """The experience of scored groups, nothing known yet about their log-probs under the trainer.

    Raises:
        RewardError: a reward is so large that sums over it would not be finite.
    """
    values_FPG = torch.tensor([[[_number(v) for v in row] for row in scores.values] for scores in rewards], dtype=torch.float64).transpose(
        0, 1
    )
    reward_PG, is_scored_PG = combine_rewards(values_FPG, ~values_FPG.isnan(), torch.tensor(weights, dtype=torch.float64))
    _refuse_huge(reward_PG, groups)
    unknown_PG = torch.full_like(reward_PG, float("nan"))
    return Experience(
        step=step,
        groups=tuple(groups),
        rewards=tuple(rewards),
        reward_PG=reward_PG,
        is_scored_PG=is_scored_PG,
        is_truncated_PG=torch.tensor([[c.finish_reason is FinishReason.TRUNCATED for c in g.completions] for g in groups]),
        sampler_logp_PG=torch.tensor([[sum(c.logprobs) for c in g.completions] for g in groups], dtype=torch.float64),
        kl_PG=unknown_PG,
        old_logp_PG=unknown_PG,
        advantage_PG=unknown_PG,
    )


def _refuse_huge(reward_PG: torch.Tensor, groups: Sequence[Group]) -> None:
    huge_PG = ~(reward_PG.abs() <= LARGEST_REWARD)
    if huge_PG.any():
        p, g = huge_PG.nonzero()[0].tolist()
        raise RewardError(
            f"the weighted reward of prompt row {groups[p].prompt.row}, completion {g} is {reward_PG[p, g].item():g}; "
            f"beyond {LARGEST_REWARD:g} nothing can be computed from it: scale the reward or its weight down."
        )


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


class Collector:
    """Prompts in, scored groups out."""

    def __init__(self, engine: Engine, rewards: RewardRunner, tokenizer: PreTrainedTokenizerBase, *, max_steps: int) -> None:
        self.engine = engine
        self.rewards = rewards
        self.tokenizer = tokenizer
        self.max_steps = max_steps
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
        """
        state = TrainerState(step=step, max_steps=self.max_steps)
        groups: dict[int, Group] = {}
        first_row = first_prompt * num_generations
        self._in_hand = BatchInHand(step=step, prompts=prompts, groups=groups, num_generations=num_generations, first_row=first_row)

        def finish(index: int, completions: tuple[Completion, ...]) -> None:
            groups[index] = self._group(prompts[index], completions)
            row = first_row + index * num_generations
            check_completions(prompts[index], completions, step=step, first_row=row, num_generations=num_generations)
            self.rewards.submit(index, groups[index], state)

        def between_tokens() -> None:
            """Hand finished groups on to idle reward workers while the others decode; leave if a stop was asked for."""
            self.rewards.poll()
            check_stop()

        started = time.perf_counter()
        requests = [
            GenerationRequest(token_ids=prompt.token_ids, num_generations=num_generations, first_row=first_row + i * num_generations)
            for i, prompt in enumerate(prompts)
        ]
        try:
            self.engine.generate(requests, params, key, on_group=finish, check_stop=between_tokens)
            generated = time.perf_counter()
            scores = self.rewards.collect(check_stop)
        except NonFiniteError as error:
            self.rewards.discard()
            raise self._placed(error) from error
        except BaseException:
            self.rewards.discard()
            raise
        seconds = {"perf/seconds/generate": generated - started, "perf/seconds/reward": time.perf_counter() - generated}
        return [groups[i] for i in range(len(prompts))], [scores[i] for i in range(len(prompts))], seconds

    def rows_in_hand(self, error: NonFiniteError) -> list[RolloutRow]:
        """The batch that `collect` failed with, as far as it was sampled."""
        assert self._in_hand is not None
        return unfinished_rows(
            self._in_hand, error, self.rewards.names, weights_version=self.engine.weights_version, tokenizer=self.tokenizer
        )

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

    def _group(self, prompt: Prompt, completions: tuple[Completion, ...]) -> Group:
        texts = self.tokenizer.batch_decode([c.token_ids for c in completions], skip_special_tokens=True)
        return Group(prompt=prompt, completions=completions, texts=tuple(texts))
