"""What a rollout file comes to: rewards, lengths, how completions ended, groups without signal."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rloo_cli.inspect.rollout_files import RolloutFile, RolloutKind
from rloo_cli.inspect.stored import REWARDS, group_bounds, read_table

COLUMNS_READ = ("prompt_row", "completion", "reward", REWARDS, "finish_reason", "advantage")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Numbers in short; None where there are none."""

    count: int
    """How many are known."""
    mean: float | None
    std: float | None
    """With n − 1."""
    least: float | None
    most: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """One file. Names are those of metrics.jsonl, and so are the definitions."""

    label: str
    kind: RolloutKind
    step: int | None
    groups: int
    completions: int
    reward: Spread
    """Over all completions that have one."""
    reward_std: float | None
    """Standard deviation within a group, averaged over groups."""
    lengths: Spread
    """Tokens."""
    finish_reasons: Mapping[str, int]
    """How often; completions that have none are not in it."""
    no_signal: float | None
    """Share of groups whose advantages are all 0; None where there are no advantages (evaluations)."""
    rewards: Mapping[str, Spread]
    """By function."""


def spread(values: Sequence[float | None]) -> Spread:
    """Mean, deviation and range of the values that are known and finite.

    >>> spread([1.0, None, 3.0])
    Spread(count=2, mean=2.0, std=1.4142135623730951, least=1.0, most=3.0)
    """
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return Spread(count=0, mean=None, std=None, least=None, most=None)
    mean = math.fsum(known) / len(known)
    return Spread(count=len(known), mean=mean, std=deviation(known), least=min(known), most=max(known))


def deviation(values: Sequence[float]) -> float | None:
    """The standard deviation with n − 1, exactly 0 where all are equal; None for fewer than two."""
    if len(values) < 2:
        return None
    if min(values) == max(values):
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def summarize(file: RolloutFile) -> StepSummary:
    """What the file comes to.

    Raises:
        StorageError, RefusedError: it is no readable rollout file.
    """
    import pyarrow.compute as pc

    table = read_table(file, COLUMNS_READ)  # "completion" brings completion_ids along
    column = {name: table.column(name).to_pylist() for name in table.column_names if not name.startswith("completion")}
    nothing: list[None] = [None] * table.num_rows
    lengths = pc.list_value_length(table.column("completion_ids")).to_pylist() if "completion_ids" in table.column_names else nothing
    bounds = group_bounds(column["prompt_row"], file)
    rewards, advantages = column.get("reward", nothing), column.get("advantage", nothing)
    reasons = Counter(reason for reason in column.get("finish_reason", nothing) if reason is not None)
    return StepSummary(
        label=file.label,
        kind=file.kind,
        step=file.step,
        groups=len(bounds),
        completions=table.num_rows,
        reward=spread(rewards),
        reward_std=_mean_deviation([rewards[start:end] for start, end in bounds]),
        lengths=spread(lengths),
        finish_reasons=dict(reasons),
        no_signal=_share_without_signal([advantages[start:end] for start, end in bounds]),
        rewards={name.removeprefix(REWARDS): spread(values) for name, values in column.items() if name.startswith(REWARDS)},
    )


def _mean_deviation(groups: Sequence[Sequence[float | None]]) -> float | None:
    known = [[value for value in group if value is not None and math.isfinite(value)] for group in groups]
    deviations = [found for group in known if (found := deviation(group)) is not None]
    return sum(deviations) / len(deviations) if deviations else None


def _share_without_signal(groups: Sequence[Sequence[float | None]]) -> float | None:
    with_advantages = [group for group in groups if all(value is not None for value in group)]
    if not with_advantages:
        return None
    return sum(all(value == 0 for value in group) for group in with_advantages) / len(with_advantages)
