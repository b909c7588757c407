"""A reward that lets a benchmark's sides take turns: each process waits here, in every step, until it is its side's turn.

Between the release of one step and the arrival at the next lies one whole step: its update and the next batch's sampling.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

POLL_SECONDS = 0.002


class Calls:
    """How often this process was here."""

    count = 0


def reward(completion_ids: list[list[int]], gate: str, **_: object) -> list[float]:
    """1 for completions whose ids sum to an odd number, after the release of this step.

    Writes `gate/arrived-STEP-RANK` (tokens, and the time of arrival) and waits for `gate/release-STEP`.
    """
    step, rank = Calls.count, os.environ.get("RANK", "0")
    Calls.count += 1
    arrival = Path(gate) / f"arrived-{step}-{rank}"
    partial = arrival.with_name(f"{arrival.name}.partial")
    partial.write_text(f"{sum(map(len, completion_ids))} {time.monotonic()}")
    partial.rename(arrival)
    while not (Path(gate) / f"release-{step}").exists():
        time.sleep(POLL_SECONDS)
    return [float(sum(ids) % 2) for ids in completion_ids]
