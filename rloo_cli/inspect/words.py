"""Counts and durations in words."""

from __future__ import annotations


def plural(count: int, noun: str) -> str:
    """`1 group`, `3,072 groups`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def seconds(value: float) -> str:
    """A duration of two parts.

    >>> seconds(0.84), seconds(37.7), seconds(754), seconds(12_000), seconds(200_000)
    ('0.84 s', '38 s', '12 min 34 s', '3 h 20 min', '2 d 7 h')
    """
    if value < 10:
        return f"{value:.2g} s"
    whole = round(value)
    for name, size, below, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size} {name} {whole % size // part} {below}"
    return f"{whole} s"
