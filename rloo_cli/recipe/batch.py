"""Batch arithmetic: how many prompts and completions a step has, and what to write instead where the numbers do not fit.

Completions of an optimizer step = prompts_per_step × G, or in TrainingArguments' words per_device_train_batch_size × processes ×
gradient_accumulation_steps, which G divides. A generation batch serves k optimizer steps and is gone through μ times.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from rloo_cli.errors import RecipeError
from rloo_cli.recipe.schema import Recipe, TrainingSection

DEFAULT_DEVICE_BATCH = 8
"""per_device_train_batch_size where neither it nor prompts_per_step is given: the default of TrainingArguments."""

MOST_COMPLETIONS = 1 << 20
"""Completions of a generation batch, which is held in memory as a whole; beyond this a digit too many was typed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """The batch of a recipe on a number of processes.

    Example: prompts_per_step 16, G = 8, μ = 1: `prompts_per_step=16, completions_per_step=128, prompts_per_generation=16`.
    """

    num_generations: int
    """G, completions of a prompt."""
    prompts_per_step: int
    """Prompts of an optimizer step, over all processes."""
    completions_per_step: int
    """prompts_per_step · G."""
    prompts_per_generation: int
    """P, prompts of a generation batch: prompts_per_step · k."""
    steps_per_generation_batch: int
    """k, optimizer steps that one pass through a generation batch makes."""
    num_iterations: int
    """μ, passes through a generation batch."""
    off_policy: bool
    """k·μ > 1: the clipped surrogate is used."""
    max_micro_batch_rows: int | None
    """Rows of a micro-batch at most: an explicit per_device_train_batch_size; None = the token budget alone decides."""

    @property
    def uses(self) -> int:
        """k·μ, optimizer steps that a generation batch serves."""
        return self.steps_per_generation_batch * self.num_iterations


@dataclass(frozen=True, slots=True)
class Fault:
    """Numbers that do not fit together."""

    fields: tuple[str, ...]
    """Dotted fields it is about; the first one that the recipe gives is the place."""
    message: str


def plan_batches(recipe: Recipe, num_processes: int) -> BatchPlan:
    """The batch arithmetic of a recipe on `num_processes`; RecipeError where it does not come out even."""
    for fault in batch_faults(recipe, num_processes):
        raise RecipeError(f"{fault.fields[0]}: {fault.message}")
    group = recipe.generation.num_generations
    completions = _completions_per_step(recipe, num_processes)
    k = _steps_per_generation_batch(recipe.training, completions)
    return BatchPlan(
        num_generations=group,
        prompts_per_step=completions // group,
        completions_per_step=completions,
        prompts_per_generation=completions // group * k,
        steps_per_generation_batch=k,
        num_iterations=recipe.algorithm.num_iterations,
        off_policy=k * recipe.algorithm.num_iterations > 1,
        max_micro_batch_rows=recipe.training.per_device_train_batch_size,
    )


def total_steps(recipe: Recipe, batch: BatchPlan, num_prompts: int | None) -> int:
    """Optimizer steps of the whole run: max_steps, or as many as num_train_epochs passes over the prompts take, at least 1.

    A stream, whose prompts nobody has counted (None), has max_steps: a rule sees to that.

    Each of the μ passes through a generation batch is made of steps of its own: ceil(epochs · prompts · μ / prompts_per_step).
    """
    if recipe.training.max_steps > 0:
        return recipe.training.max_steps
    assert num_prompts is not None
    epochs = Fraction(repr(recipe.training.num_train_epochs))  # as written: 0.1 of 30 prompts are 3, not 3.0000000000000004
    return max(1, math.ceil(epochs * num_prompts * batch.num_iterations / batch.prompts_per_step))


def _completions_per_step(recipe: Recipe, num_processes: int) -> int:
    training = recipe.training
    if training.prompts_per_step is not None:
        return training.prompts_per_step * recipe.generation.num_generations
    return (training.per_device_train_batch_size or DEFAULT_DEVICE_BATCH) * num_processes * (training.gradient_accumulation_steps or 1)


def _steps_per_generation_batch(training: TrainingSection, completions: int) -> int:
    if training.generation_batch_size is not None:
        return training.generation_batch_size // completions
    accumulation = training.gradient_accumulation_steps or 1
    return (training.steps_per_generation or accumulation) // accumulation


# --- faults ----------------------------------------------------------------------------------------------------------------------


def batch_faults(recipe: Recipe, num_processes: int) -> list[Fault]:
    """Everything that does not come out even, with the arithmetic and the nearest numbers that work."""
    if recipe.training.prompts_per_step is None:
        step_faults = list(_group_faults(recipe, num_processes))
    else:
        step_faults = list(_contradictions(recipe, num_processes))
    faults = [*step_faults, *_steps_per_generation_faults(recipe.training)]
    if not step_faults:
        faults += _generation_batch_faults(recipe, num_processes)
    return faults


def _processes(count: int) -> str:
    return f"{count} process{'es' if count != 1 else ''}"


def _nearest(number: int, unit: int) -> str:
    """The multiples of `unit` next to `number`: `8`, or `8 or 16`."""
    below, above = number // unit * unit, -(-number // unit) * unit
    return " or ".join(str(value) for value in sorted({below, above}) if value > 0)


def _group_faults(recipe: Recipe, num_processes: int) -> Iterator[Fault]:
    """G has to divide per_device_train_batch_size × processes × gradient_accumulation_steps."""
    training, group = recipe.training, recipe.generation.num_generations
    device = training.per_device_train_batch_size or DEFAULT_DEVICE_BATCH
    accumulation = training.gradient_accumulation_steps or 1
    total = device * num_processes * accumulation
    if total % group == 0:
        return
    default = "" if training.per_device_train_batch_size else " (the default)"
    device_unit = group // math.gcd(group, num_processes * accumulation)
    accumulation_unit = group // math.gcd(group, num_processes * device)
    yield Fault(
        ("training.per_device_train_batch_size", "training.gradient_accumulation_steps", "generation.num_generations"),
        f"{device}{default} × {_processes(num_processes)} × gradient_accumulation_steps {accumulation} = {total} completions a step, "
        f"which num_generations {group} does not divide. Nearest that work: per_device_train_batch_size "
        f"{_nearest(device, device_unit)}, or gradient_accumulation_steps {_nearest(accumulation, accumulation_unit)}, or "
        f"`prompts_per_step: {max(1, round(total / group))}` in place of both.",
    )


def _contradictions(recipe: Recipe, num_processes: int) -> Iterator[Fault]:
    """prompts_per_step and TrainingArguments' names, both given, have to say the same."""
    training, group = recipe.training, recipe.generation.num_generations
    prompts, device, accumulation = training.prompts_per_step, training.per_device_train_batch_size, training.gradient_accumulation_steps
    assert prompts is not None
    if accumulation is None:  # per_device_train_batch_size alone only caps the rows of a micro-batch
        return
    wanted = prompts * group
    says = f"{prompts} prompts × num_generations {group} = {wanted} completions a step"
    if device is not None:
        total = device * num_processes * accumulation
        if total != wanted:
            same = f" `prompts_per_step: {total // group}` would say the same." if total % group == 0 else ""
            yield Fault(
                ("training.prompts_per_step",),
                f"{says}, but per_device_train_batch_size {device} × {_processes(num_processes)} × gradient_accumulation_steps "
                f"{accumulation} = {total}. Keep one way of saying it.{same}",
            )
    elif wanted % (num_processes * accumulation):
        yield Fault(
            ("training.gradient_accumulation_steps",),
            f"{says}, which {_processes(num_processes)} × gradient_accumulation_steps {accumulation} do not divide. "
            "Remove gradient_accumulation_steps: prompts_per_step says it all.",
        )


def _steps_per_generation_faults(training: TrainingSection) -> Iterator[Fault]:
    steps, accumulation = training.steps_per_generation, training.gradient_accumulation_steps or 1
    if steps is not None and training.generation_batch_size is not None:
        yield Fault(
            ("training.generation_batch_size",), "steps_per_generation and generation_batch_size say the same thing; keep one of them."
        )
    elif steps is not None and steps % accumulation:
        yield Fault(
            ("training.steps_per_generation",),
            f"{steps} is no multiple of gradient_accumulation_steps {accumulation}: a generation batch serves whole optimizer steps. "
            f"Nearest that work: {_nearest(steps, accumulation)}.",
        )


def _generation_batch_faults(recipe: Recipe, num_processes: int) -> Iterator[Fault]:
    size, completions = recipe.training.generation_batch_size, _completions_per_step(recipe, num_processes)
    total = completions * _steps_per_generation_batch(recipe.training, completions)
    if total > MOST_COMPLETIONS:
        yield Fault(
            ("training.prompts_per_step", "training.per_device_train_batch_size", "training.gradient_accumulation_steps"),
            f"a generation batch would be {total:,} completions; it is held in memory as a whole, and {MOST_COMPLETIONS:,} is the most.",
        )
    if size is not None and size % completions:
        yield Fault(
            ("training.generation_batch_size",),
            f"{size} is no multiple of the {completions} completions of an optimizer step (on {_processes(num_processes)}). "
            f"Nearest that work: {_nearest(size, completions)}.",
        )
