"""The run that the loop drives: its position, and each verb of the loop handed to the collaborator that does it."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from rloo_cli.errors import EngineError, NeighbourError, NonFiniteError, RecipeError
from rloo_cli.recipe.secrets import secret_values
from rloo_cli.rollout.engine import Engine, RandomKey
from rloo_cli.run.checkpoint import DESCRIPTION, step_name
from rloo_cli.run.environment import package_versions
from rloo_cli.run.metrics import read_metrics
from rloo_cli.run.model_card import CardFacts, model_card
from rloo_cli.run.randomness import capture_random_state, seed_everything
from rloo_cli.run.ranks import Ranks
from rloo_cli.run.rollouts import RolloutRow
from rloo_cli.run.saving import save_checkpoint
from rloo_cli.run.signals import StopRequested
from rloo_cli.training.ahead import BatchOrder, CheckStop, Collected, GenerationAhead
from rloo_cli.training.best import better_of, choosing_value
from rloo_cli.training.collector import Collector
from rloo_cli.training.dynamic_sampling import collect_batch, sampling_metrics
from rloo_cli.training.engines import give_weights
from rloo_cli.training.evaluation import evaluate
from rloo_cli.training.experience import Experience, build_experience, put_back, select_groups
from rloo_cli.training.failed_batch import keep_failed_batch
from rloo_cli.training.final_model import save_final_model
from rloo_cli.training.inputs import TrainingInputs
from rloo_cli.training.model_files import save_description
from rloo_cli.training.moving_reference import SAVED_AS
from rloo_cli.training.recorder import Recorder, peak_memory_mb, rollout_rows
from rloo_cli.training.rollout_metrics import generated_tokens, kl_metrics, rollout_metrics
from rloo_cli.training.sampling import training_params
from rloo_cli.training.state import RunPosition, save_experience
from rloo_cli.training.update import Updater
from rloo_cli.types import Group, GroupRewards, Prompt

logger = logging.getLogger(__name__)

SILENT_BATCHES = 3  # in a row without any difference in reward, before a warning
FAILURES_SHOWN = 3  # of a step, with their reason; the rest are counted


class TrainingRun:
    """Owns the position; everything else belongs to collaborators.

    `position` is replaced as a whole when a step is complete, so that whatever interrupts a step leaves the state after the
    last one. Ranks do all of it together; what the run leaves is written by the main one, which alone has a recorder.
    `model_fingerprint` is that of the model before training, which a resume has to find again.
    """

    def __init__(
        self,
        inputs: TrainingInputs,
        *,
        collector: Collector,
        engine: Engine,
        updater: Updater,
        recorder: Recorder | None,
        position: RunPosition,
        ranks: Ranks,
        model_fingerprint: str,
    ) -> None:
        self.inputs = inputs
        self.recipe = inputs.recipe
        self.collector = collector
        self.engine = engine
        self.updater = updater
        self.recorder = recorder
        self.ranks = ranks
        self.position = position
        self.model_fingerprint = model_fingerprint
        self._run_id = inputs.folder.run_id()
        self.saved_step = position.step if inputs.resume_from else 0
        self._row: dict[str, float] = {}
        self._save_seconds: float | None = None
        self._silent_batches = 0
        self._ahead = GenerationAhead(self._collect, inputs.stop.check) if self.recipe.training.async_steps else None
        self._working = position
        self._drawn: Experience | None = None
        self._kept: Sequence[int] = ()
        self._started = 0.0

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.position.step

    @property
    def finished(self) -> bool:
        """Whether all steps are done."""
        return self.position.step >= self.inputs.total_steps

    def next_batch(self) -> None:
        """Have a generation batch with rewards at hand."""
        self._started = time.perf_counter()
        self._row = {"step": self.step + 1}
        if self._save_seconds is not None:
            self._row["perf/seconds/save"], self._save_seconds = self._save_seconds, None
        self._working = self.position if self.position.experience is not None else self._generate(self.position)
        self._start_next()

    def _generate(self, position: RunPosition) -> RunPosition:
        step = position.step + 1
        order = BatchOrder(step=step, first_prompt=position.next_prompt)
        with (
            self.inputs.progress.phase("generate"),
            self._failed_batch_kept(self.collector.rows_in_hand, lambda: self.collector.first_row_in_hand),
        ):
            collected = self._collect(order, self.inputs.stop.check) if self._ahead is None else self._ahead.take(order)
        drawn = build_experience(step, collected.groups, collected.rewards, [entry.weight for entry in self.recipe.rewards])
        self._warn_of_failures(step, [line for scores in collected.rewards for line in scores.failures])
        self._row |= {**rollout_metrics(drawn, self.inputs.rewards.names), **self._sampling_metrics(collected), **collected.seconds}
        self._warn_of_silence(step)
        self._drawn, self._kept = drawn, collected.kept
        return replace(
            position,
            experience=select_groups(drawn, collected.kept),
            uses=0,
            next_prompt=position.next_prompt + len(collected.groups),
            num_tokens=position.num_tokens + sum(generated_tokens(drawn)),
        )

    def _sampling_metrics(self, collected: Collected) -> dict[str, float]:
        mode, wanted = self.recipe.algorithm.dynamic_sampling, self.inputs.batch.prompts_per_generation
        return sampling_metrics(len(collected.groups), len(collected.kept), wanted, mode)

    def _collect(self, order: BatchOrder, check_stop: CheckStop) -> Collected:
        algorithm, batch = self.recipe.algorithm, self.inputs.batch

        def draw(first: int, count: int) -> tuple[list[Group], list[GroupRewards], dict[str, float]]:
            return self.collector.collect(
                self.collector.ranks.together(lambda: self._prompts(order.first_prompt + first, count, check_stop)),
                training_params(self.recipe),
                RandomKey(seed=self.recipe.training.seed, step=order.step),
                step=order.step,
                num_generations=batch.num_generations,
                first_prompt=first,
                check_stop=check_stop,
            )

        return collect_batch(
            draw,
            mode=algorithm.dynamic_sampling,
            wanted=batch.prompts_per_generation,
            most=batch.prompts_per_generation * algorithm.dynamic_sampling_max_batches,
            weights=[entry.weight for entry in self.recipe.rewards],
        )

    def _start_next(self) -> None:
        """Begin the batch after the one at hand, where overlap is asked for and this step is the last that the one at hand serves."""
        is_last_use = self._working.uses == self.inputs.batch.uses - 1
        if self._ahead is not None and is_last_use and self.step + 1 < self.inputs.total_steps:
            self._ahead.start(BatchOrder(step=self.step + 2, first_prompt=self._working.next_prompt))

    def _warn_of_failures(self, step: int, failures: list[str]) -> None:
        for line in failures[:FAILURES_SHOWN]:
            logger.warning("step %d: %s", step, line)
        if len(failures) > FAILURES_SHOWN:
            logger.warning("step %d: %d more rewards failed and are left unscored", step, len(failures) - FAILURES_SHOWN)

    def _warn_of_silence(self, step: int) -> None:
        """Say once that nothing can be learnt, when for a while no group had two different rewards."""
        self._silent_batches = self._silent_batches + 1 if self._row.get("groups/zero_std", 1.0) == 1.0 else 0
        if self._silent_batches == SILENT_BATCHES:
            logger.warning(
                "step %d: in each of the last %d batches all completions of every prompt got the same reward, so rewards give no gradient; "
                "look at the rollouts, and at prompts and reward function.",
                step,
                SILENT_BATCHES,
            )

    def _prompts(self, first: int, count: int, check_stop: CheckStop) -> list[Prompt]:
        """The prompts at `count` positions from `first` on; a stop is looked for on the way, since a huge step has millions."""
        return self.inputs.prompts.draw(
            first, count, seed=self.recipe.training.seed, shuffle=self.recipe.data.shuffle_dataset, check_stop=check_stop
        )

    def update(self) -> None:
        """Make the optimizer step."""
        experience, uses, step = self._working.experience, self._working.uses, self.step + 1
        assert experience is not None
        if self.updater.settings.active_dropout:
            seed_everything(self.recipe.training.seed, "dropout", step, *([self.ranks.rank] if self.ranks.rank else []))
        with self.inputs.progress.phase("train"), self._failed_batch_kept(self._trained_rows):
            experience, metrics = self.updater.update(experience, uses, step)
        self._row |= metrics | (kl_metrics(experience) if uses == 0 else {})
        self._working = replace(self._working, step=step, experience=experience, uses=uses + 1)

    @contextlib.contextmanager
    def _failed_batch_kept(
        self, rows: Callable[[NonFiniteError], list[RolloutRow]], first_row: Callable[[], int] = lambda: 0
    ) -> Iterator[None]:
        """Keep the batch in hand in failed/ where a number of ours is not finite; the error then says how to look at it."""
        try:
            yield
        except NonFiniteError as error:
            step = max(self.step, int(self._row.get("step", 0)))
            raise keep_failed_batch(
                self.inputs.folder, error, rows(error), step=step, weights_version=self.step, first_row=first_row()
            ) from error

    def _trained_rows(self, error: NonFiniteError) -> list[RolloutRow]:
        return rollout_rows(self.updater.experience_in_hand(), self.inputs.rewards.names)

    def sync_weights(self) -> None:
        """Hand the new weights to the engine."""
        try:
            self._sync_weights()
        except (EngineError, StopRequested):
            self.record()  # the optimizer has stepped: what is saved now has to be the state after it
            raise
        except NeighbourError as error:
            if error.kind == EngineError.__name__:  # the rank whose engine failed records too
                self.record()
            raise

    def _sync_weights(self) -> None:
        started = time.perf_counter()
        with self.inputs.progress.phase("sync"):
            if self._ahead is not None:  # one weights version makes the whole batch
                self._ahead.wait()
                self._row["perf/seconds/wait"] = time.perf_counter() - started
                started = time.perf_counter()
            give_weights(self.engine, self.updater.strategy.named_tensors(), self._working.step, self.ranks)
        self._row["perf/seconds/sync"] = time.perf_counter() - started

    def record(self) -> None:
        """Complete the step: metrics, rollouts, and the new position."""
        experience, first_use = self._working.experience, self._working.uses == 1
        assert experience is not None
        seconds = time.perf_counter() - self._started
        self._row |= {
            "num_tokens": self._working.num_tokens,
            "perf/seconds/step": seconds,
            "perf/peak_memory_mb": peak_memory_mb(self.updater.accelerator.device),
        }
        passes = self.inputs.prompts.passes(self._working.next_prompt)
        self._row |= {} if passes is None else {"epoch": passes}
        everything = self._everything_drawn(experience) if first_use else None
        if everything is not None:
            self._row["perf/tokens_per_second"] = generated_tokens(everything)[1] / seconds
        is_last = self._working.step == self.inputs.total_steps
        self._on_main(lambda recorder: recorder.step(self._row, everything, last=is_last))
        done = replace(self._working, prompts_before=self.position.next_prompt)
        self.position = replace(done, experience=None, uses=0) if done.uses == self.inputs.batch.uses else done

    def _everything_drawn(self, experience: Experience) -> Experience:
        """The batch with the groups that dynamic sampling left out of it."""
        assert self._drawn is not None
        drawn, self._drawn = self._drawn, None
        return put_back(experience, drawn, self._kept)

    def evaluate_if_due(self) -> None:
        """Evaluate after this step where the recipe asks for it, once."""
        prompts, step = self.inputs.eval_prompts, self.step
        if prompts is None or self.position.evaluated_step == step or not self._evaluation_due(step):
            return
        started = time.perf_counter()
        with (
            self.inputs.progress.phase("evaluate"),
            self._failed_batch_kept(self.collector.rows_in_hand, lambda: self.collector.first_row_in_hand),
        ):
            experience, metrics = evaluate(self.collector, prompts, self.recipe, self.inputs.rewards.names, step, self.inputs.stop.check)
        row = {"step": step, **metrics, "perf/seconds/evaluate": time.perf_counter() - started}
        self._on_main(lambda recorder: recorder.evaluation(row, experience))
        self.position = replace(self.position, evaluated_step=step, evaluated_value=None)
        self.position = replace(self.position, evaluated_value=self._choosing_value(metrics))

    def _choosing_value(self, metrics: Mapping[str, float]) -> float | None:
        try:
            return choosing_value(self.recipe.run, metrics)
        except RecipeError:
            self.save()  # what was trained is worth going on with, once the recipe is right
            raise

    def _evaluation_due(self, step: int) -> bool:
        evaluation = self.recipe.evaluation
        if step == 0:
            return evaluation.eval_on_start
        if evaluation.eval_strategy == "no":
            return False
        every = evaluation.eval_steps or self.recipe.run.logging_steps
        return self.finished or self._falls_due(evaluation.eval_strategy, every, step)

    def _falls_due(self, strategy: str, every: int, step: int) -> bool:
        """Whether `step` ends an interval: every n steps, or the step in which an epoch was completed."""
        if strategy == "steps":
            return step % every == 0
        count = self.inputs.prompts.size
        return strategy == "epoch" and count is not None and self.position.next_prompt // count > self.position.prompts_before // count

    def save_if_due(self) -> None:
        """Save a checkpoint after this step where the recipe asks for one."""
        run = self.recipe.run
        if run.save_strategy != "no" and (self.finished or self._falls_due(run.save_strategy, run.save_steps, self.step)):
            self.save()

    def save(self) -> None:
        """Save the state after the last optimizer step, unless it is saved or there is none."""
        if self.step in (0, self.saved_step):
            return
        self._refuse_non_finite_weights()
        started = time.perf_counter()
        value = self.position.evaluated_value if self.position.evaluated_step == self.step else None
        self.position = replace(self.position, best=better_of(self.recipe.run, self.position.best, value, self.step))
        with self.inputs.progress.phase("save"):
            self._write_checkpoint()
        self.saved_step = self.step
        self._save_seconds = time.perf_counter() - started

    def _write_checkpoint(self) -> None:
        local, recorder = self.updater.strategy.local_state(), self.recorder
        documents, tensors = self.ranks.together(lambda: self._beside_the_weights(recorder) if recorder is not None else ({}, {}))
        model = self.updater.policy.model
        save_checkpoint(
            self.inputs.folder.checkpoints,
            self.step,
            documents={**documents, "optimizer": dict(local.document)},
            tensors=tensors,
            shards={"model": local.model, "optimizer": local.optimizer},
            further=lambda path: save_description(path / DESCRIPTION, model, self.inputs.tokenizer, beside=self.inputs.processor_files),
            ranks=self.ranks,
            limit=self.recipe.run.save_total_limit,
            best=self.position.best.step if self.position.best is not None else None,
        )

    def _beside_the_weights(self, recorder: Recorder) -> tuple[dict[str, Any], dict[str, dict[str, torch.Tensor]]]:
        """(documents, tensors) that the main rank alone saves."""
        random_document, random_tensors = capture_random_state()
        tensors = {"random": random_tensors}
        recorder.metrics.sync()
        documents = {
            "position": self.position.document(),
            "random": random_document,
            "metrics": {"offset": recorder.metrics.offset},
            "recipe": self.recipe.model_dump(mode="json"),
            "origin": {
                "base_model": self.model_fingerprint,
                "data": self.inputs.prompts.fingerprint,
                "completions_per_step": self.inputs.batch.completions_per_step,
                "run": self._run_id,
            },
        }
        if self.updater.moving is not None:
            tensors[SAVED_AS] = self.updater.moving.state()
        if self.position.experience is not None:
            documents["experience"], tensors["experience"] = save_experience(self.position.experience)
        return documents, tensors

    def _on_main(self, work: Callable[[Recorder], None]) -> None:
        """Do it on the main rank, the others waiting; what fails there fails everywhere."""
        recorder = self.recorder
        self.ranks.together(lambda: work(recorder) if recorder is not None else None)

    def _refuse_non_finite_weights(self) -> None:
        """An update of finite gradients may still overflow, with a learning rate far too high; such weights never replace sound ones."""
        if name := self.updater.strategy.first_non_finite():
            raise NonFiniteError(
                f"step {self.step}: the weights hold NaN or infinity after the update, first in {name}; they are not saved, and the checkpoint "
                "before stands. The learning rate is too high: start a new run with a lower one.",
                place=name,
            )

    def save_final(self) -> None:
        """Write final/."""
        self._refuse_non_finite_weights()
        with self.inputs.progress.phase("save"):
            save_final_model(
                self.inputs.folder,
                self.updater.strategy,
                self.inputs.tokenizer,
                step=self.step,
                ranks=self.ranks,
                card=self._card,
                beside=self.inputs.processor_files,
            )
        if (best := self.position.best) is not None:
            where = self.inputs.folder.checkpoints / step_name(best.step)
            self.inputs.progress.note(f"best checkpoint: step {best.step}, {best.metric} {best.value:.4g}, in {where} (final/ is the last)")

    def _card(self) -> str:
        facts = CardFacts(
            name=self.inputs.folder.path.resolve().name,
            recipe=self.recipe,
            step=self.step,
            rows=read_metrics(self.inputs.folder.metrics),
            versions=package_versions(),
            sees_images=bool(self.inputs.processor_files),
        )
        return model_card(facts, secrets=secret_values(os.environ))

    def close(self) -> None:
        """Release the trackers, once nothing is generated any more; the engine is its maker's."""
        if self._ahead is not None:
            self._ahead.close()
        if self.recorder is not None:
            self.recorder.trackers.close()
