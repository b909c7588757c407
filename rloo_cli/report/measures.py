"""The quantities that health checks look at. Beginning and end of a run are means over a tenth of its steps (`Series.head`, `Series.tail`)."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from rloo_cli.inspect.series import Series
from rloo_cli.recipe.reward_rules import reward_name
from rloo_cli.report.run_view import RunView
from rloo_cli.report.wording import number, percent

FEWEST_STEPS = 10
"""Steps below which a run has no beginning and end to compare."""
MISMATCH_WORTH_A_LOOK = 0.003
"""Nats a token below which a growing difference between sampler and trainer is rounding."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A quantity, and the numbers that it comes from in words."""

    value: float
    detail: str


def reward_rise(view: RunView) -> Measured | None:
    """End minus beginning, over the deviation of single steps from their neighbours' mean."""
    series = _long(view, "reward")
    if series is None:
        return None
    change = series.tail - series.head
    noise = step_noise(series)
    value = change / noise if noise > 0 else math.copysign(math.inf, change) if change else 0.0
    return Measured(max(-99.0, min(99.0, value)), f"reward {_from_to(series)}, a step's noise {number(noise, 2)}")


def step_noise(series: Series) -> float:
    """Standard deviation of a single step, from the differences of neighbours: a trend does not count."""
    differences = [after - before for before, after in zip(series.values, series.values[1:], strict=False)]
    return math.sqrt(math.fsum(d * d for d in differences) / (2 * len(differences))) if differences else 0.0


def evaluation_drop(view: RunView) -> Measured | None:
    """Last minus best evaluation in standard errors of such a difference, as if prompts were independent of each other."""
    rewards = view.metrics.series("eval/reward")
    if len(rewards.values) < 2:
        return None
    error = evaluation_error(view)
    last, best = rewards.values[-1], max(rewards.values)
    if error is None:
        return None
    value = (last - best) / (math.sqrt(2) * error) if error > 0 else (0.0 if last == best else -99.0)
    step = rewards.steps[rewards.values.index(best)]
    return Measured(max(-99.0, value), f"best {number(best)} after step {step:.0f}, last {number(last)} after step {rewards.steps[-1]:.0f}")


def evaluation_error(view: RunView) -> float | None:
    """Standard error of an evaluation's mean reward, at most: deviations of the functions are added up with their weights."""
    row = view.metrics.evaluations[-1]
    prompts = row.get("eval/prompts")
    names = {key.removeprefix("eval/rewards/").removesuffix("/std"): value for key, value in row.items() if key.endswith("/std")}
    if not prompts or not names:
        return None
    return math.fsum(abs(_weight(view, name)) * value for name, value in names.items()) / math.sqrt(prompts)


def _weight(view: RunView, name: str) -> float:
    if view.recipe is None:
        return 1.0
    for entry in view.recipe.rewards:
        if name == reward_name(entry):
            return float(entry.weight)
    return 1.0


def entropy_share(view: RunView) -> Measured | None:
    """End over beginning."""
    series = _long(view, "entropy")
    if series is None or series.head <= 0:
        return None
    return Measured(series.tail / series.head, f"entropy {_from_to(series)} nats")


def dead_groups(view: RunView) -> Measured | None:
    """Share of groups whose rewards are all equal, at the end."""
    series = _long(view, "groups/zero_std")
    return None if series is None else Measured(series.tail, f"{percent(series.head)} at the beginning, {percent(series.tail)} at the end")


def unscored_share(view: RunView) -> Measured | None:
    """Share of a step's completions without any reward, at the end."""
    series, rows = _long(view, "rows/unscored"), view.environment.get("completions_per_step")
    if series is None or not isinstance(rows, int) or rows < 1:
        return None
    failures = view.metrics.total("rewards/failures")
    failed = f", {number(failures)} failed in all" if failures else ""
    return Measured(series.tail / rows, f"{number(series.tail)} of {rows} completions a step at the end{failed}")


def truncated_share(view: RunView) -> Measured | None:
    """Share of completions that reached the length limit, at the end."""
    series = _long(view, "completions/clipped_ratio")
    if series is None:
        return None
    limit = f", limit {view.recipe.generation.max_completion_length} tokens" if view.recipe is not None else ""
    return Measured(series.tail, f"{percent(series.head)} at the beginning, {percent(series.tail)} at the end{limit}")


def length_drift(view: RunView) -> Measured | None:
    """The larger mean length over the smaller."""
    series = _long(view, "completions/mean_length")
    if series is None or min(series.head, series.tail) <= 0:
        return None
    reward = view.metrics.series("reward")
    beside = f" while reward went {_from_to(reward)}" if reward else ""
    return Measured(max(series.tail / series.head, series.head / series.tail), f"{_from_to(series)} tokens{beside}")


def clipped_ratios(view: RunView) -> Measured | None:
    """Share of rows whose ratio is clipped, at the end; nothing of runs that are on-policy throughout."""
    series = _long(view, "clip_ratio/region_mean")
    if series is None or not any(series.values):
        return None
    return Measured(series.tail, f"{percent(series.head)} at the beginning, {percent(series.tail)} at the end")


def clipped_gradients(view: RunView) -> Measured | None:
    """Share of steps whose gradient is longer than the limit."""
    series = _long(view, "grad_norm")
    limit = view.recipe.training.max_grad_norm if view.recipe is not None else None
    if series is None or not limit:
        return None
    clipped = sum(value > limit for value in series.values)
    median = number(statistics.median(series.values))
    return Measured(clipped / len(series.values), f"{clipped} of {len(series.values)} steps, median norm {median}, limit {number(limit)}")


def gradient_spike(view: RunView) -> Measured | None:
    """The largest norm over the median of those that are not 0."""
    series = _long(view, "grad_norm")
    norms = [value for value in series.values if value > 0] if series is not None else []
    if series is None or not norms:
        return None
    most, median = max(norms), statistics.median(norms)
    step = series.steps[series.values.index(most)]
    return Measured(most / median, f"{number(most)} at step {step:.0f}, median {number(median)}")


def distance(view: RunView) -> Measured | None:
    """KL to the reference a token, at the end."""
    series = _long(view, "kl")
    return None if series is None else Measured(series.tail, f"kl {_from_to(series)} nats a token")


def mismatch(view: RunView) -> Measured | None:
    """Mean difference of log-probs, at the end."""
    series = _long(view, "sampling/logp_diff_mean")
    return None if series is None else Measured(series.tail, f"{_from_to(series)} nats a token")


def mismatch_growth(view: RunView) -> Measured | None:
    """The same, end over beginning, where it is more than rounding."""
    series = _long(view, "sampling/logp_diff_mean")
    if series is None or series.tail < MISMATCH_WORTH_A_LOOK or series.head <= 0:
        return None
    return Measured(series.tail / series.head, f"{_from_to(series)} nats a token")


def effective_samples(view: RunView) -> Measured | None:
    """Effective sample size as a share of the rows, at the end."""
    series = _long(view, "sampling/ess")
    return None if series is None else Measured(series.tail, f"{percent(series.head)} at the beginning, {percent(series.tail)} at the end")


def _long(view: RunView, key: str) -> Series | None:
    series = view.metrics.series(key)
    return series if len(series.values) >= FEWEST_STEPS else None


def _from_to(series: Series) -> str:
    return f"{number(series.head)} → {number(series.tail)}"
