"""What is known of every call since the last collection, and the first error among them. No processes here."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rloo_cli.errors import RewardError
from rloo_cli.rewards.jobs import Call, assemble, new_call
from rloo_cli.types import Group, GroupRewards, TrainerState

if TYPE_CHECKING:
    from rloo_cli.recipe.schema import RewardEntry

LOGGER = logging.getLogger(__name__)


class Ledger:
    """Takes results, says which rows to call again, and puts each group's rewards together."""

    def __init__(self, entries: Sequence[RewardEntry], names: Sequence[str]) -> None:
        self.groups: dict[int, Group] = {}
        self.state = TrainerState(step=0, max_steps=0)
        self._entries = entries
        self._names = names
        self._calls: list[Call] = []
        self._parts: dict[int, list[tuple[Call, int]]] = {}
        """The calls of each group, with the position of its first row in them."""
        self._error: RewardError | None = None

    def add_group(self, key: int, group: Group, state: TrainerState) -> None:
        """Note a group. Raises ValueError where the key was used since the last collection."""
        if key in self.groups:
            raise ValueError(f"key {key} was submitted before")
        self.groups[key], self._parts[key], self.state = group, [], state

    def add_call(self, function: int, groups: Sequence[tuple[int, Group]]) -> Call:
        """A new call of a function over groups that were added."""
        call, first = new_call(function, groups), 0
        self._calls.append(call)
        for key, group in groups:
            self._parts[key].append((call, first))
            first += len(group.texts)
        return call

    def forget(self) -> None:
        """Begin anew."""
        self.groups, self._calls, self._parts, self._error = {}, [], {}, None

    def unfinished(self) -> list[Call]:
        """The calls with rows that are not decided."""
        return [call for call in self._calls if call.pending]

    def raise_error(self) -> None:
        """Raise the first failure that stops the run, if there is one."""
        if self._error is not None:
            raise self._error

    def rewards(self) -> dict[int, GroupRewards]:
        """The rewards of every group, all calls being finished."""
        return {key: assemble(self._parts[key], self._names, group) for key, group in self.groups.items()}

    def settle(self, call: Call, items: Sequence[int], result: Mapping[str, Any], *, is_first: bool) -> list[int]:
        """The rows that are to be called again, one by one, after what this call over `items` came to."""
        if "error" in result:
            lines = dict.fromkeys(items, result["error"])
            again = is_first and result["retry"]
        else:
            call.take(items, result)
            lines = {items[int(i)]: line for i, line in result["bad"].items()}
            again = is_first
        if not lines:
            return []
        self._tell(call, lines, result, again=again)
        if again:
            return sorted(lines)
        for item, line in lines.items():
            call.fail(item, line)
        return []

    def place(self, call: Call, item: int | None = None) -> str:
        """`step 3, prompt row 12, completion 1`: where a row of a call lies, or the call itself."""
        group, g = call.place(item or 0)
        step = f"step {self.state.step}, " if self.state.step else ""
        return f"{step}prompt row {group.prompt.row}" + ("" if item is None else f", completion {g}")

    def _tell(self, call: Call, lines: Mapping[int, str], result: Mapping[str, Any], *, again: bool) -> None:
        """Log failures; keep the first for good as the error to raise, where they stop the run."""
        item, line = next(iter(lines.items()))
        is_whole = "error" in result and len(lines) > 1
        message = f"reward `{self._names[call.function]}`: {self.place(call, None if is_whole else item)}: {line}"
        stops = not again and self._entries[call.function].on_error == "stop"
        trace = f"\n{result['traceback']}" if result.get("traceback") else ""
        LOGGER.log(logging.INFO if stops else logging.WARNING, "%s%s%s", message, " (called again)" if again else "", trace)
        if stops and self._error is None:
            self._error = RewardError(f"{message}. `on_error: unscored` in the recipe would leave such completions out.")
