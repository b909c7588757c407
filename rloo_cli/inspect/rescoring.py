"""Another reward function over stored completions, held against the rewards that they got."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rloo_cli.errors import RefusedError, RewardError
from rloo_cli.inspect.reward_calls import failed_items, made_up_group
from rloo_cli.inspect.rollout_files import RolloutFile
from rloo_cli.inspect.stored import StoredCompletion, StoredGroup, read_groups
from rloo_cli.rewards.runner import RewardRunner
from rloo_cli.types import TrainerState

SIGN_CHANGES = ("same", "flipped", "gained", "lost")
"""What became of an advantage's sign: kept; the opposite; nonzero where it was 0; 0 where it was not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RescoredGroup:
    """A group with old and new rewards; all sequences have one entry a completion."""

    label: str
    """Of its file."""
    group: StoredGroup
    positions: tuple[int, ...]
    """Of the completions with a text; the others cannot be scored."""
    old: tuple[float | None, ...]
    new: tuple[float | None, ...]
    failures: Mapping[int, str]
    """Position → why the new function failed there."""
    seconds: float

    @property
    def old_advantages(self) -> list[float]:
        """Leave-one-out advantages of the old rewards: no KL, no normalisation."""
        return leave_one_out(self.old)

    @property
    def new_advantages(self) -> list[float]:
        """Leave-one-out advantages of the new rewards."""
        return leave_one_out(self.new)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Old rewards against new ones."""

    groups: int
    completions: int
    compared: int
    """Completions with both rewards."""
    unscored: int
    """Completions to which the new function gave None."""
    failed: int
    old_mean: float | None
    new_mean: float | None
    correlation: float | None
    """Pearson's; None where one side is constant."""
    ordered_alike: float | None
    """Share of pairs within a group, unequal by old rewards, that the new ones put in the same order."""
    signs: Mapping[str, int]
    """How many advantages went which way, by SIGN_CHANGES."""
    old_no_signal: int
    """Groups whose old rewards are all equal."""
    new_no_signal: int
    seconds_an_item: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A completion that the two disagree about."""

    label: str
    prompt_row: int | None
    position: int
    """In its group, from 0."""
    text: str
    old: float | None
    new: float | None
    old_advantage: float
    new_advantage: float


def rescore_file(
    file: RolloutFile, runner: RewardRunner, *, columns_of: Callable[[StoredGroup], Mapping[str, Any]], against: str | None, max_steps: int
) -> list[RescoredGroup]:
    """Every group of the file with its new rewards.

    Args:
        file: the rollouts.
        runner: started, with one function that leaves failed items unscored.
        columns_of: the data set's columns of a group's prompt.
        against: the stored function that stands for the old rewards; None = their weighted sum.
        max_steps: what the function is told.

    Raises:
        RewardError: the function failed on every completion.
        RefusedError: `against` names no stored function.
    """
    groups = [group for group in read_groups(file) if _whole(group)]
    state = TrainerState(step=file.step or 0, max_steps=max_steps)
    for group in groups:
        whole = [group.completions[position] for position in _whole(group)]
        content = group.prompt if group.prompt is not None else ""
        runner.submit(
            group.index,
            made_up_group(
                row=group.prompt_row or 0,
                content=content,
                columns=columns_of(group),
                texts=[completion.text or "" for completion in whole],
                ids=[completion.token_ids or () for completion in whole],
            ),
            state,
        )
    rewards = runner.collect()
    found = [
        RescoredGroup(
            label=file.label,
            group=group,
            positions=_whole(group),
            old=tuple(_old(group.completions[position], against, file) for position in _whole(group)),
            new=rewards[group.index].values[0],
            failures=failed_items(rewards[group.index].failures, runner.names[0], group.prompt_row or 0),
            seconds=rewards[group.index].seconds,
        )
        for group in groups
    ]
    _refuse_nothing_but_failures(found, runner.names[0])
    return found


def agreement(groups: Sequence[RescoredGroup]) -> Agreement:
    """What the new rewards have in common with the old ones."""
    old = [value for group in groups for value in group.old]
    new = [value for group in groups for value in group.new]
    pairs = [(a, b) for a, b in zip(old, new, strict=True) if a is not None and b is not None]
    signs = Counter(change for group in groups for change in map(sign_change, group.old_advantages, group.new_advantages))
    failed = sum(len(group.failures) for group in groups)
    return Agreement(
        groups=len(groups),
        completions=len(old),
        compared=len(pairs),
        unscored=sum(value is None for value in new) - failed,
        failed=failed,
        old_mean=_mean([value for value in old if value is not None]),
        new_mean=_mean([value for value in new if value is not None]),
        correlation=correlation(pairs),
        ordered_alike=_ordered_alike(groups),
        signs={change: signs[change] for change in SIGN_CHANGES},
        old_no_signal=sum(not any(group.old_advantages) for group in groups),
        new_no_signal=sum(not any(group.new_advantages) for group in groups),
        seconds_an_item=sum(group.seconds for group in groups) / max(1, len(old)),
    )


def examples(groups: Sequence[RescoredGroup], count: int) -> list[Example]:
    """The completions about which old and new disagree most, flipped signs first, at most one a group."""
    chosen = [max(_examples_of(group), key=_disagreement) for group in groups]
    worth = [example for example in chosen if example.old_advantage != example.new_advantage]
    return sorted(worth, key=_disagreement, reverse=True)[:count]


def leave_one_out(rewards: Sequence[float | None]) -> list[float]:
    """Σ_j (R_i − R_j) / (n − 1) over the n rewards that are known; 0 for the others, and where n < 2.

    >>> leave_one_out([1.0, 0.0, None, 0.5])
    [0.75, -0.75, 0.0, 0.0]
    """
    known = [value for value in rewards if value is not None]
    if len(known) < 2:
        return [0.0] * len(rewards)
    return [0.0 if value is None else math.fsum(value - other for other in known) / (len(known) - 1) for value in rewards]


def sign_change(old: float, new: float) -> str:
    """Which of SIGN_CHANGES an advantage went through."""
    if (old > 0) - (old < 0) == (new > 0) - (new < 0):
        return "same"
    if old == 0:
        return "gained"
    return "lost" if new == 0 else "flipped"


def correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Pearson's correlation; None where a side is constant or there are fewer than two pairs."""
    if len(pairs) < 2 or len({a for a, _ in pairs}) < 2 or len({b for _, b in pairs}) < 2:
        return None
    mean_a, mean_b = (math.fsum(side) / len(pairs) for side in zip(*pairs, strict=True))
    both = math.fsum((a - mean_a) * (b - mean_b) for a, b in pairs)
    return both / math.sqrt(math.fsum((a - mean_a) ** 2 for a, _ in pairs) * math.fsum((b - mean_b) ** 2 for _, b in pairs))


def _whole(group: StoredGroup) -> tuple[int, ...]:
    return tuple(position for position, completion in enumerate(group.completions) if completion.text is not None)


def _old(completion: StoredCompletion, against: str | None, file: RolloutFile) -> float | None:
    if against is None:
        return completion.reward
    if against not in completion.rewards:
        raise RefusedError(f"{file.path} holds no rewards of `{against}`; there are: {', '.join(completion.rewards) or 'none'}.")
    return completion.rewards[against]


def _refuse_nothing_but_failures(groups: Sequence[RescoredGroup], name: str) -> None:
    first = next((reason for group in groups for reason in group.failures.values()), None)
    if first is not None and all(len(group.failures) == len(group.positions) for group in groups):
        raise RewardError(f"reward `{name}` failed on every completion of step {groups[0].label}: {first}")


def _ordered_alike(groups: Sequence[RescoredGroup]) -> float | None:
    verdicts = [(new_a - new_b) * (old_a - old_b) > 0 for group in groups for old_a, new_a, old_b, new_b in _pairs_within(group)]
    return sum(verdicts) / len(verdicts) if verdicts else None


def _pairs_within(group: RescoredGroup) -> Iterator[tuple[float, float, float, float]]:
    known = [(a, b) for a, b in zip(group.old, group.new, strict=True) if a is not None and b is not None]
    for i, (old_a, new_a) in enumerate(known):
        yield from ((old_a, new_a, old_b, new_b) for old_b, new_b in known[i + 1 :] if old_a != old_b)


def _examples_of(group: RescoredGroup) -> list[Example]:
    columns = zip(group.positions, group.old, group.new, group.old_advantages, group.new_advantages, strict=True)
    return [
        Example(
            label=group.label,
            prompt_row=group.group.prompt_row,
            position=position,
            text=group.group.completions[position].text or "",
            old=old,
            new=new,
            old_advantage=old_advantage,
            new_advantage=new_advantage,
        )
        for position, old, new, old_advantage, new_advantage in columns
    ]


def _disagreement(example: Example) -> tuple[bool, float]:
    flipped = sign_change(example.old_advantage, example.new_advantage) == "flipped"
    return flipped, abs(example.old_advantage - example.new_advantage)


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
