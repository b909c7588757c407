"""One optimizer step: forward, advantages out of that same forward, backward, step.

On-policy (a generation batch serves one optimizer step once) no old-policy pass is run, and the log-probs that the KL
penalty needs come from the very forward pass that is differentiated. What that forward cannot give is scored beforehand:
slices that later steps use, and every row where a group is cut or advantages are normalised over the whole batch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from accelerate import Accelerator

from rloo_cli.algorithm.advantages import leave_one_out_advantages, normalize_advantages, penalised_rewards
from rloo_cli.algorithm.kl import sequence_kl, sum_by_row
from rloo_cli.algorithm.loss import clipped_loss, importance_weights, is_clipped, reinforce_loss, sequence_ratio
from rloo_cli.errors import DeviceMemoryError, NonFiniteError, RlooError
from rloo_cli.recipe.schema import AlgorithmSection
from rloo_cli.run.ranks import Ranks, merge_known
from rloo_cli.run.signals import StopSignal
from rloo_cli.training.experience import Experience
from rloo_cli.training.lockstep import Passes
from rloo_cli.training.microbatches import (
    GroupRows,
    ScoringBatch,
    build_scoring_batch,
    cut_into_micro_batches,
    cuts_a_group,
    share_rows,
)
from rloo_cli.training.moving_reference import MovingReference
from rloo_cli.training.non_finite import refuse_non_finite, refuse_non_finite_metrics
from rloo_cli.training.pass_metrics import PassMetrics, summarise
from rloo_cli.training.policy import Scorer
from rloo_cli.training.router_loss import RouterLoss
from rloo_cli.training.rows import put, record_old, sampled_logprobs, select_rows, take
from rloo_cli.training.strategy import Strategy

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSettings:
    """What the updater needs to know beside the recipe's algorithm section."""

    slices: int
    """k: optimizer steps that one pass through a generation batch gives."""
    off_policy: bool
    """k·μ > 1."""
    max_tokens: int
    """Token budget of a micro-batch."""
    max_rows: int | None
    max_grad_norm: float
    active_dropout: bool
    """With active dropout, KL and old log-probs come from a pass in eval mode."""
    is_stale: bool
    """Whether the samples were made by the weights of a step before: each row then carries its capped ratio to the sampler, unclipped."""


class Updater:
    """Owns the reference and, through its strategy, policy and optimizer; `update` makes one step."""

    def __init__(
        self,
        *,
        accelerator: Accelerator,
        reference: Scorer | None,
        algorithm: AlgorithmSection,
        settings: UpdateSettings,
        strategy: Strategy,
        ranks: Ranks,
        stop: StopSignal,
        moving: MovingReference | None = None,
    ) -> None:
        self.accelerator = accelerator
        self.policy = strategy.policy
        self.reference = reference
        self.moving = moving
        self.algorithm = algorithm
        self.settings = settings
        self.strategy = strategy
        self.ranks = ranks
        self.stop = stop
        self.max_tokens = settings.max_tokens
        self.scoring_seconds = 0.0
        """Wall seconds that the current step spent on passes without gradient."""
        self._router = RouterLoss(self.policy.model, algorithm.router_aux_loss_coef)
        self._in_hand: Experience | None = None
        self._passes = Passes(ranks, stop, is_lockstep=strategy.is_lockstep)

    def update(self, experience: Experience, use: int, step: int) -> tuple[Experience, dict[str, float]]:
        """The experience with what is now known about its rows, and the metrics of the step.

        Args:
            experience: the generation batch.
            use: how many optimizer steps it has served before, from 0.
            step: the optimizer step's number, for messages.

        Raises:
            NonFiniteError: a log-prob, the loss or a gradient is NaN or infinite; nothing was changed.
            DeviceMemoryError: one row alone does not fit.
        """
        while True:
            try:
                return self._attempt(experience, use, step)
            except _OutOfMemoryError as error:
                self._halve_budget(step, error)

    def experience_in_hand(self) -> Experience:
        """The generation batch of the update that failed, with all that was known of its rows by then."""
        assert self._in_hand is not None
        return replace(self._in_hand, advantage_PG=self._known_advantages(self._in_hand))

    def _attempt(self, experience: Experience, use: int, step: int) -> tuple[Experience, dict[str, float]]:
        self.scoring_seconds = 0.0
        self._in_hand = experience
        self.strategy.zero_grad()
        started = time.perf_counter()
        must_score_all = use == 0 and self._must_score_all(experience)
        if use == 0:
            experience = self._score_beforehand(experience, step, everything=must_score_all)
            self.scoring_seconds = time.perf_counter() - started if self._scores else 0.0
        groups = self._groups_of_slice(experience, use % self.settings.slices)
        rows = self._rows_in_pass(experience, groups)
        n, metrics = self._count(experience, groups), PassMetrics()
        experience = self._on_all_ranks(
            lambda: self._differentiate(
                experience,
                rows,
                n,
                metrics,
                step,
                first_use=use == 0,
                needs_kl=self.reference is not None and use == 0 and not must_score_all,
            )
        )
        experience = replace(experience, advantage_PG=self._known_advantages(experience))
        self.ranks.check(self.stop)
        found = summarise(self.ranks.gather(metrics.sums()), off_policy=self.settings.off_policy and not self.settings.is_stale)
        refuse_non_finite_metrics(found, step)
        row = self._step_optimizer(step)
        if self.moving is not None:
            self.moving.follow(step)
        seconds = {"perf/seconds/train": time.perf_counter() - started - self.scoring_seconds}
        if self.scoring_seconds:
            seconds["perf/seconds/reference"] = self.scoring_seconds
        skipped = len(groups) * experience.num_generations - sum(len(piece.rows) for piece in rows)
        return experience, row | found | {"rows/skipped": skipped} | seconds

    @property
    def _scores(self) -> bool:
        """Whether passes without gradient may be needed at all."""
        return self.settings.off_policy or self.reference is not None

    # Over the ranks

    def _on_all_ranks(self, work: Callable[[], Experience]) -> Experience:
        """What is known of the batch once every rank has done its part of it.

        Raises:
            _OutOfMemoryError: some rank's part did not fit.
        """
        try:
            experience, error = self.ranks.together(lambda: self._unless_out_of_memory(work))
            if (failed := next((words for words in self.ranks.gather(error) if words is not None), None)) is not None:
                raise _OutOfMemoryError(failed)
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            if self.strategy.is_lockstep:  # the other ranks wait in this rank's pass: there is no way back
                raise self._no_memory() from error
            raise _OutOfMemoryError(str(error)) from error
        if self.ranks.world_size == 1:
            return experience
        kl, old = zip(*self.ranks.gather((experience.kl_PG, experience.old_logp_PG)), strict=True)
        return replace(experience, kl_PG=merge_known(kl), old_logp_PG=merge_known(old))

    def _unless_out_of_memory(self, work: Callable[[], Experience]) -> tuple[Experience, str | None]:
        try:
            return work(), None
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            can_go_on = self.ranks.world_size > 1 and not self.strategy.is_lockstep
            if can_go_on and _is_out_of_memory(error) and self._in_hand is not None:
                return self._in_hand, str(error)
            raise

    def _micro_batches(self, rows: Sequence[GroupRows], *, at_least: int = 0) -> Iterator[tuple[list[GroupRows], bool]]:
        """(micro-batch, whether it is the last) of this rank; in lockstep as many as every other has, at least so many."""
        return self._passes.run(self._cut(rows), at_least=at_least)

    def _cut(self, rows: Sequence[GroupRows]) -> list[list[list[GroupRows]]]:
        """The micro-batches of every rank."""
        shares = share_rows(rows, self.ranks.world_size)
        return [cut_into_micro_batches(share, max_tokens=self.max_tokens, max_rows=self.settings.max_rows) for share in shares]

    def _no_memory(self) -> DeviceMemoryError:
        return DeviceMemoryError(
            f"out of memory with at most {self.max_tokens} tokens a micro-batch, which {self.strategy.name} cannot try again with fewer: set "
            f"training.max_tokens_per_micro_batch: {max(1, self.max_tokens // 2)} or training.gradient_checkpointing: true, and --resume."
        )

    def _halve_budget(self, step: int, error: BaseException) -> None:
        self.strategy.zero_grad()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if self.max_tokens <= 1:
            raise DeviceMemoryError(
                f"step {step}: out of memory with one row at a time; lower generation.max_completion_length or data.max_prompt_length, "
                "or set training.gradient_checkpointing: true. `rloo plan` shows the terms."
            ) from error
        self.max_tokens //= 2
        logger.warning("step %d: out of memory; going on with at most %d tokens a micro-batch", step, self.max_tokens)

    # Which rows

    def _groups_of_slice(self, experience: Experience, index: int) -> range:
        """The groups of one of the k optimizer steps of a pass: k shares of the same size, or nearly so where groups were left out."""
        count, k = len(experience.groups), self.settings.slices
        return range(count * index // k, count * (index + 1) // k)

    def _is_masked(self, experience: Experience) -> torch.Tensor:
        """Truncated rows that `mask_truncated_completions` leaves out of the loss, [P, G]."""
        if self.algorithm.mask_truncated_completions:
            return experience.is_truncated_PG
        return torch.zeros_like(experience.is_truncated_PG)

    def _count(self, experience: Experience, groups: range) -> int:
        """N: rows of the optimizer step that are not masked, skipped ones included."""
        return int((~self._is_masked(experience)[groups.start : groups.stop]).sum())

    def _rows_in_pass(self, experience: Experience, groups: Iterable[int]) -> list[GroupRows]:
        """Rows whose gradient may differ from 0, or whose KL is still needed; all that N counts where their routers are balanced."""
        advantage_PG = self._known_advantages(experience)
        wanted_PG = experience.is_scored_PG & torch.where(advantage_PG.isnan(), True, (advantage_PG != 0) & ~self._is_masked(experience))
        if self._router.coefficient > 0:
            wanted_PG = wanted_PG | ~self._is_masked(experience)
        return select_rows(experience, groups, wanted_PG)

    def _known_advantages(self, experience: Experience) -> torch.Tensor:
        """[P, G]; NaN for scored rows of groups whose KL is not known yet."""
        reward_PG = penalised_rewards(
            experience.reward_PG,
            experience.kl_PG,
            clip_range=self.algorithm.reward_clip_range,
            beta=self.algorithm.beta if self.reference is not None else 0.0,
        )
        advantage_PG = leave_one_out_advantages(reward_PG, experience.is_scored_PG)
        if self.algorithm.normalize_advantages:
            advantage_PG = normalize_advantages(advantage_PG, experience.is_scored_PG, self._is_masked(experience))
        return torch.where(experience.is_scored_PG, advantage_PG, 0.0)

    # Scoring without gradient

    def _score_beforehand(self, experience: Experience, step: int, *, everything: bool) -> Experience:
        """The experience with KL and old log-probs of the rows that the differentiated pass cannot serve in time."""
        later = range(self._groups_of_slice(experience, 0).stop, len(experience.groups))
        beforehand = range(len(experience.groups)) if everything else later
        if not beforehand or not self._scores:
            return experience
        rows = self._rows_in_pass(experience, beforehand)
        return self._on_all_ranks(lambda: self._score(experience, rows, step))

    def _score(self, experience: Experience, rows: Sequence[GroupRows], step: int) -> Experience:
        self.policy.eval()
        with torch.no_grad(), self.strategy.autocast():
            for pieces, _ in self._micro_batches(rows):
                batch = build_scoring_batch(pieces, self.policy.layout, self.accelerator.device)
                logp_N, _ = self.policy(batch)
                ref_logp_N = None if self.reference is None else self.reference(batch)[0]
                if not batch.rows:
                    continue
                with self._passes.held_back():
                    refuse_non_finite(logp_N, batch, experience, step, "log-prob of the policy")
                    experience = record_old(experience, batch, logp_N)
                    experience = self._in_hand = self._record_kl(experience, batch, logp_N, ref_logp_N, step)
        return experience

    def _must_score_all(self, experience: Experience) -> bool:
        if self.settings.active_dropout and (self.reference is not None or self.settings.off_policy):
            return True
        if self.reference is None:
            return False
        rows = select_rows(experience, self._groups_of_slice(experience, 0), experience.is_scored_PG)
        pieces = [micro_batch for share in self._cut(rows) for micro_batch in share]
        return self.algorithm.normalize_advantages or cuts_a_group(pieces)

    def _record_kl(
        self, experience: Experience, batch: ScoringBatch, logp_N: torch.Tensor, ref_logp_N: torch.Tensor | None, step: int
    ) -> Experience:
        if ref_logp_N is None:
            return experience
        refuse_non_finite(ref_logp_N, batch, experience, step, "log-prob of the reference model")
        kl_B = sequence_kl(logp_N, ref_logp_N, batch.row_N, len(batch.rows))
        return replace(experience, kl_PG=put(experience.kl_PG, batch.rows, kl_B))

    # The differentiated pass

    def _differentiate(
        self, experience: Experience, rows: Sequence[GroupRows], n: int, metrics: PassMetrics, step: int, *, first_use: bool, needs_kl: bool
    ) -> Experience:
        self.policy.train()
        with self.strategy.autocast(), self.policy.attention():
            for pieces, is_last in self._micro_batches(rows, at_least=1):
                batch = build_scoring_batch(pieces, self.policy.layout, self.accelerator.device)
                with self._router.recording() as router_logits:
                    logp_N, entropy_N = self.strategy.forward(batch)
                ref_logp_N = self._reference_logprobs(batch) if needs_kl else None
                loss = logp_N.sum() * 0  # of a micro-batch without rows, or one that fails
                with self._passes.held_back():
                    if batch.rows:
                        experience, loss = self._loss_of(
                            experience, batch, logp_N, entropy_N, ref_logp_N, n, metrics, step, first_use=first_use
                        )
                        loss = loss + self._router_loss(experience, router_logits, pieces, batch, n, metrics)
                self._in_hand = experience
                self.strategy.backward(loss, is_last=is_last)
        return experience

    def _reference_logprobs(self, batch: ScoringBatch) -> torch.Tensor:
        assert self.reference is not None
        started = time.perf_counter()
        with torch.no_grad():
            ref_logp_N, _ = self.reference(batch)
        self.scoring_seconds += time.perf_counter() - started
        return ref_logp_N

    def _loss_of(
        self,
        experience: Experience,
        batch: ScoringBatch,
        logp_N: torch.Tensor,
        entropy_N: torch.Tensor,
        ref_logp_N: torch.Tensor | None,
        n: int,
        metrics: PassMetrics,
        step: int,
        *,
        first_use: bool,
    ) -> tuple[Experience, torch.Tensor]:
        """The experience with what the forward pass told, and the micro-batch's share of the loss."""
        refuse_non_finite(logp_N, batch, experience, step, "log-prob of the policy")
        experience = self._record_kl(experience, batch, logp_N, ref_logp_N, step)
        if first_use and not self.settings.active_dropout:
            experience = record_old(experience, batch, logp_N)
        advantage_B = take(self._known_advantages(experience).masked_fill(self._is_masked(experience), 0.0), batch.rows).to(logp_N.device)
        logp_B = sum_by_row(logp_N, batch.row_N, len(batch.rows))
        sampler_B = take(experience.sampler_logp_PG, batch.rows).to(logp_B)
        weight_B = importance_weights(logp_B, sampler_B, self._correction(), self.algorithm.importance_sampling_cap)
        loss = self._loss(logp_B, advantage_B, weight_B, n, experience, batch, metrics)
        if not torch.isfinite(loss):
            raise self._loss_error(loss, advantage_B.to(logp_B) * logp_B, batch, experience, step)
        metrics.add(loss, entropy_N)
        if first_use:
            metrics.add_sampler_gap(logp_N, sampled_logprobs(experience, batch), logp_B, sampler_B)
        return experience, loss

    def _router_loss(
        self,
        experience: Experience,
        logits: Sequence[torch.Tensor],
        pieces: Sequence[GroupRows],
        batch: ScoringBatch,
        n: int,
        metrics: PassMetrics,
    ) -> torch.Tensor | float:
        """The micro-batch's share of the routers' auxiliary loss: the mean over the N rows."""
        if not self._router.coefficient:
            return 0.0
        aux_B = self._router.by_row(logits, pieces, self.policy.layout)
        aux_B = aux_B * (~take(self._is_masked(experience), batch.rows)).to(aux_B)
        metrics.add_router(aux_B.detach().sum().item() / max(n, 1), self._router.coefficient)
        return self._router.coefficient * aux_B.sum() / max(n, 1)

    def _correction(self) -> Literal["none", "truncate", "mask"]:
        asked = self.algorithm.importance_sampling_correction
        return "truncate" if self.settings.is_stale and asked == "none" else asked

    def _loss(
        self,
        logp_B: torch.Tensor,
        advantage_B: torch.Tensor,
        weight_B: torch.Tensor | None,
        n: int,
        experience: Experience,
        batch: ScoringBatch,
        metrics: PassMetrics,
    ) -> torch.Tensor:
        if self.settings.is_stale or not self.settings.off_policy:
            return reinforce_loss(logp_B, advantage_B, n, weight_B)
        low = self.algorithm.epsilon
        high = low if self.algorithm.epsilon_high is None else self.algorithm.epsilon_high
        ratio_B = sequence_ratio(logp_B, take(experience.old_logp_PG, batch.rows).to(logp_B))
        metrics.add_clipped(is_clipped(ratio_B.detach(), advantage_B, epsilon=low, epsilon_high=high))
        return clipped_loss(ratio_B, advantage_B, n, epsilon=low, epsilon_high=high, weight_B=weight_B)

    def _loss_error(
        self, loss: torch.Tensor, term_B: torch.Tensor, batch: ScoringBatch, experience: Experience, step: int
    ) -> NonFiniteError:
        """The error of a loss that is not finite, with the row whose term is to blame where there is one."""
        bad_B = (~torch.isfinite(term_B)).nonzero().flatten().tolist()
        row = batch.rows[bad_B[0]] if bad_B else None
        if row is not None:
            prompt = experience.groups[row // experience.num_generations].prompt
            where = f", first in completion {row % experience.num_generations} of prompt {prompt.row} (row {row})"
        else:
            where = f" over rows {min(batch.rows)} to {max(batch.rows)} of the batch"
        message = f"step {step}: the loss is {loss.item()}{where}; nothing was updated."
        return NonFiniteError(message, place="loss", value=loss.item(), row=row)

    def _step_optimizer(self, step: int) -> dict[str, float]:
        norm, bad = self.strategy.gradient_norm()
        if not torch.isfinite(norm):
            self.strategy.zero_grad()
            message = f"step {step}: the gradient norm is {norm.item()} (first in {bad}); nothing was updated."
            raise NonFiniteError(message, place=f"gradient norm, first in {bad}", value=norm.item())
        learning_rate = self.strategy.step(norm=norm, max_norm=self.settings.max_grad_norm)
        return {"grad_norm": norm.item(), "learning_rate": learning_rate}


class _OutOfMemoryError(RlooError):
    """The pass did not fit; a smaller micro-batch may."""


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
