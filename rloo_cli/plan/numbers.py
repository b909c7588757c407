"""Numbers of bytes, and how they are told."""

from __future__ import annotations

FLOAT32, BFLOAT16 = 4, 2
"""Bytes of a number."""
GIB, MIB = 1 << 30, 1 << 20


def show_size(size: float) -> str:
    """`18 KiB`, `12.3 MiB`, `4.56 GiB`."""
    if 0 < size < MIB / 10:
        return f"{size / 1024:.0f} KiB"
    return f"{size / GIB:,.2f} GiB" if size >= GIB else f"{size / MIB:.1f} MiB"
