"""Which checkpoint is the best, by a metric of the evaluation made at its step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rloo_cli.errors import RecipeError
from rloo_cli.recipe.schema import RunSection
from rloo_cli.run.metrics import EVALUATION_PREFIX, evaluation_key


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best checkpoint so far."""

    metric: str
    """`eval/reward`."""
    value: float
    step: int


def best_of_document(document: Any) -> Best | None:
    """From a checkpoint's position, where `asdict` put it; None where none was chosen.

    Raises:
        ValueError: it is something else.
    """
    if document is None:
        return None
    match document:
        case {"metric": str(metric), "value": float() | int() as value, "step": int(step)} if len(document) == 3:
            return Best(metric=metric, value=value, step=step)
    raise ValueError("its `best` is not a metric, a value and a step")


def choosing_value(run: RunSection, metrics: Mapping[str, float]) -> float | None:
    """What `metric_for_best_model` came to in an evaluation; None without such a field, or where nothing gave the metric a value.

    Raises:
        RecipeError: it is a metric of a reward function's own, and the functions report none of that name.
    """
    if run.metric_for_best_model is None:
        return None
    key = evaluation_key(run.metric_for_best_model)
    if key not in metrics and "/custom/" in key:
        there = ", ".join(name.removeprefix(EVALUATION_PREFIX) for name in sorted(metrics))
        raise RecipeError(f"run.metric_for_best_model: the evaluation has no `{run.metric_for_best_model}`; it has {there}.")
    return metrics.get(key)


def better_of(run: RunSection, best: Best | None, value: float | None, step: int) -> Best | None:
    """The best so far with the checkpoint of `step` taken in; of equals the earlier one."""
    if run.metric_for_best_model is None:
        return None
    key = evaluation_key(run.metric_for_best_model)
    if best is not None and best.metric != key:  # the recipe has changed its mind
        best = None
    if value is None:
        return best
    sign = -1 if run.greater_is_better is False else 1
    return Best(metric=key, value=value, step=step) if best is None or sign * value > sign * best.value else best
