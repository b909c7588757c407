"""Which groups of a file are shown."""

from __future__ import annotations

from collections.abc import Sequence

from rloo_cli.errors import RefusedError
from rloo_cli.inspect.rollout_files import RolloutFile, RolloutKind
from rloo_cli.inspect.stored import StoredGroup, failure_facts

MOST_LISTED = 12


def pick_groups(
    groups: Sequence[StoredGroup],
    file: RolloutFile,
    *,
    prompt_row: int | None = None,
    containing: str | None = None,
    finish_reason: str | None = None,
    order: str | None = None,
    count: int = 1,
) -> list[StoredGroup]:
    """At most `count` groups of a file.

    Args:
        groups: all of the file.
        file: where they are from; of a batch that a run stopped at, the group with the fault comes first.
        prompt_row: only groups of this prompt.
        containing: only groups in which a completion holds this text.
        finish_reason: only groups in which a completion ended so.
        order: `best` or `worst`: by mean reward; None = as they stand.
        count: how many.

    Raises:
        RefusedError: none is left.
    """
    if not groups:
        raise RefusedError(f"step {file.label} holds no rows ({file.path}).")
    found = [group for group in groups if prompt_row is None or group.prompt_row == prompt_row]
    if not found:
        rows = sorted({group.prompt_row for group in groups if group.prompt_row is not None})
        listed = ", ".join(map(str, rows[:MOST_LISTED])) + (", …" if len(rows) > MOST_LISTED else "")
        raise RefusedError(f"step {file.label} has no prompt {prompt_row}; its prompts are rows {listed or 'of unknown number'}.")
    if containing is not None:
        found = [group for group in found if any(containing in (completion.text or "") for completion in group.completions)]
    if finish_reason is not None:
        found = [group for group in found if any(completion.finish_reason == finish_reason for completion in group.completions)]
    if not found:
        reasons = sorted({completion.finish_reason or "unknown" for group in groups for completion in group.completions})
        raise RefusedError(f"no completion of step {file.label} is like that (they ended: {', '.join(reasons)}).")
    if order is not None:
        found = [group for group in found if group.mean_reward is not None] or found
        found.sort(key=lambda group: group.mean_reward or 0.0, reverse=order == "best")
    elif file.kind is RolloutKind.FAILED and prompt_row is None:
        found = _with_fault_first(found, file)
    return found[:count]


def _with_fault_first(groups: list[StoredGroup], file: RolloutFile) -> list[StoredGroup]:
    row = failure_facts(file).get("row")
    if not isinstance(row, int):
        return groups
    return sorted(groups, key=lambda group: not group.first_row <= row < group.first_row + len(group.completions))
