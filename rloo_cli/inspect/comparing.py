"""The same prompts in two rollout files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rloo_cli.errors import RefusedError
from rloo_cli.inspect.rollout_files import RolloutFile, RolloutKind, name_steps
from rloo_cli.inspect.stored import StoredCompletion, StoredGroup, read_table


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPair:
    """A prompt's group in both files."""

    before: StoredGroup
    after: StoredGroup

    @property
    def change(self) -> float | None:
        """Mean reward after minus before; None where one is unknown."""
        before, after = self.before.mean_reward, self.after.mean_reward
        return None if before is None or after is None else after - before


def pair_groups(before: Sequence[StoredGroup], after: Sequence[StoredGroup]) -> list[GroupPair]:
    """The groups with the same prompt, in the order of `before`; a prompt that comes more than once is paired in turn."""
    waiting: dict[str, list[StoredGroup]] = {}
    for group in after:
        waiting.setdefault(group.key, []).append(group)
    return [GroupPair(before=group, after=waiting[group.key].pop(0)) for group in before if waiting.get(group.key)]


def mean_length(group: StoredGroup) -> float | None:
    """Mean tokens of the completions whose length is known."""
    known = [completion.tokens for completion in group.completions if completion.tokens is not None]
    return sum(known) / len(known) if known else None


def best_completion(group: StoredGroup) -> StoredCompletion:
    """The completion with the highest reward, the first of equals; an unknown reward comes last."""
    return max(group.completions, key=lambda completion: (completion.reward is not None, completion.reward or 0.0))


def nothing_in_common(before: RolloutFile, after: RolloutFile, others: Sequence[RolloutFile]) -> RefusedError:
    """The error for two files without a common prompt; `others`: files of the second run, searched for one that has some."""
    wanted = _prompts(before)
    fitting = [file for file in others if file.path not in (before.path, after.path) and wanted & _prompts(file)]
    evaluations = [file for file in others if file.kind is RolloutKind.EVAL]
    hint = ""
    if fitting:
        hint = f" Steps with prompts of step {before.label}: {name_steps(fitting)}."
    elif before in others and len(evaluations) > 1:
        hint = f" Evaluations have the same prompts every time: {name_steps(evaluations)}."
    return RefusedError(f"steps {before.label} and {after.label} have no prompt in common.{hint}")


def _prompts(file: RolloutFile) -> set[str | None]:
    column = read_table(file, ("prompt",))
    return set(column.column("prompt").to_pylist()) - {None} if "prompt" in column.column_names else set()
