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
        self._failed = dict.fromkeys(range(len(entries)), 0)
        """Completions for which a function failed for good, in the whole run."""
        self._told: set[tuple[int, str]] = set()
        """What is told once: (function, about what)."""

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
            self._notice(call, result["notices"])
        if not lines:
            return []
        if again:
            self._tell_again(call, lines, result)
            return sorted(lines)
        self._tell_failed(call, lines, result)
        for item, line in lines.items():
            call.fail(item, line)
        return []

    def place(self, call: Call, item: int | None = None) -> str:
        """`step 3, prompt row 12, completion 1`: where a row of a call lies, or the call itself."""
        group, g = call.place(item or 0)
        step = f"step {self.state.step}, " if self.state.step else ""
        return f"{step}prompt row {group.prompt.row}" + ("" if item is None else f", completion {g}")

    def _notice(self, call: Call, notices: Mapping[str, str]) -> None:
        """Warn once of what a function logged in vain, and of one that failed and did not when it was called again."""
        for about, line in notices.items():
            self._warn_once(call, f"log_metric {about}", f"{self.place(call)}: {line}. It is not told again for this metric.")
        if call.retried and not call.pending and not call.failures:
            item, failure = next(iter(call.retried.items()))
            line = f"{self.place(call, item)}: it failed, and passed when called again: {failure}"
            self._warn_once(call, "passed", f"{line}. Further ones are in the log alone.")

    def _warn_once(self, call: Call, about: str, text: str) -> None:
        if (call.function, about) not in self._told:
            self._told.add((call.function, about))
            LOGGER.warning("reward `%s`: %s", self._names[call.function], text)

    def _tell_again(self, call: Call, lines: Mapping[int, str], result: Mapping[str, Any]) -> None:
        """Log, in the file alone, what is going to be called again."""
        call.retried |= lines
        LOGGER.info("%s (called again)%s", self._message(call, lines, result), _trace(result))

    def _tell_failed(self, call: Call, lines: Mapping[int, str], result: Mapping[str, Any]) -> None:
        """Log failures for good: keep the first as the error to raise, where they stop the run; else warn, the less often the more there are."""
        message = self._message(call, lines, result)
        before = self._failed[call.function]
        self._failed[call.function] = after = before + len(lines)
        if self._entries[call.function].on_error == "stop":
            LOGGER.info("%s%s", message, _trace(result))
            if self._error is None:
                self._error = RewardError(f"{message}. `on_error: unscored` in the recipe would leave such completions out.")
            return
        is_told = before.bit_length() != after.bit_length()  # the 1st, 2nd, 4th, 8th …
        LOGGER.log(
            logging.WARNING if is_told else logging.INFO,
            "%s; left out (%d %s of this reward so far)%s",
            *(message, after, "completion" if after == 1 else "completions", _trace(result)),
        )

    def _message(self, call: Call, lines: Mapping[int, str], result: Mapping[str, Any]) -> str:
        item, line = next(iter(lines.items()))
        is_whole = "error" in result and len(lines) > 1
        return f"reward `{self._names[call.function]}`: {self.place(call, None if is_whole else item)}: {line}"


def _trace(result: Mapping[str, Any]) -> str:
    return f"\n{result['traceback']}" if result.get("traceback") else ""
