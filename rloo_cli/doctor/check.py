"""What a look at one thing comes to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    """A run may work, more slowly or with a risk."""
    FAIL = "fail"
    """A run would not work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at. Example: `Check(name="python", level=Level.OK, said="3.11.7")`."""

    name: str
    level: Level
    said: str
    """What was found, in one sentence."""
    remedy: str = ""
    """What to do; empty where all is well."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """The same as values, for --json."""


def judged(name: str, said: str, *, remedy: str = "", fails: bool = False, warns: bool = False, **facts: Any) -> Check:
    """A check whose level follows from what is wrong; the remedy is kept only where something is."""
    level = Level.FAIL if fails else Level.WARN if warns else Level.OK
    return Check(name=name, level=level, said=said, remedy=remedy if level is not Level.OK else "", facts=facts)


Look = Callable[[], Check]
"""Looks at one thing."""
