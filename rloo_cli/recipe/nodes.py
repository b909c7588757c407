"""What reading a YAML text gives: values with their places, and the problems found on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

MAX_SHOWN = 50
"""Problems that are written out; the others are counted."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where something was written. Example: `str(Place("recipes/my.yaml", 9, 5)) == "recipes/my.yaml:9:5"`."""

    origin: str
    """The file as it was named, or `--set beta=0.1`."""
    line: int = 0
    """From 1; 0 = the origin as a whole."""
    column: int = 0

    def __str__(self) -> str:
        return f"{self.origin}:{self.line}:{self.column}" if self.line else self.origin


@dataclass(frozen=True, slots=True)
class Scalar:
    """One value as it was written."""

    place: Place
    text: str
    is_plain: bool
    """Whether it stood without quotes."""


@dataclass(frozen=True, slots=True)
class Items:
    """A list."""

    place: Place
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """A key's place and its value."""

    key_place: Place
    node: Node


@dataclass(frozen=True, slots=True)
class Fields:
    """A mapping, in the order of the text."""

    place: Place
    pairs: dict[str, Pair]


@dataclass(frozen=True, slots=True)
class Broken:
    """Stands where something was refused, so that nothing further is said about it."""

    place: Place


Node = Scalar | Items | Fields | Broken


@dataclass(slots=True)
class Problems:
    """What is wrong with a recipe, collected before anything is raised."""

    found: list[tuple[Place, str, str | Callable[[], str]]] = field(default_factory=list)
    count: int = 0
    _origins: dict[str, int] = field(default_factory=dict)

    def rank(self, origin: str) -> None:
        """Let the problems of this origin stand before those of origins that come later."""
        self._origins.setdefault(origin, len(self._origins))

    def add(self, place: Place, name: str, message: str | Callable[[], str]) -> None:
        """Note one problem; `name` is the field, `section.field`, or empty. A callable message is made only if it is shown."""
        self.count += 1
        self.rank(place.origin)
        if len(self.found) < 20 * MAX_SHOWN:
            self.found.append((place, name, message))

    def lines(self) -> list[str]:
        """One `place: field: message` line each, in the order of the files and their lines, the last MAX_SHOWN left out."""
        ordered = sorted(self.found, key=lambda problem: (self._origins[problem[0].origin], problem[0].line, problem[0].column))
        lines = [_one_line(place, name, message) for place, name, message in ordered[:MAX_SHOWN]]
        if self.count > MAX_SHOWN:
            lines.append(f"… and {self.count - MAX_SHOWN} more.")
        return lines

    def last_section(self) -> str | None:
        """The section of the last problem that has one, to point the reader to."""
        names = [name.partition(".")[0].partition("[")[0] for _, name, _ in self.found if "." in name or name.startswith("rewards")]
        return names[-1] if names else None


def _one_line(place: Place, name: str, message: str | Callable[[], str]) -> str:
    text = message if isinstance(message, str) else message()
    return printable(": ".join(part for part in (str(place), name, text) if part), 2000)


def printable(text: str, limit: int = 60) -> str:
    """The text on one line, shortened, control characters escaped: safe inside a message."""
    shown = text if len(text) <= limit else text[: limit - 1] + "…"
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in shown)
