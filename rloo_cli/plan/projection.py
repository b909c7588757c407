"""From a short measurement to a step and a whole run: seconds, tokens, disk, each as a range where only a part was measured.

A part of a batch is scaled up in two ways. Training goes through as many more tokens. Sampling costs at least as much as was measured,
since more rows at once may cost nothing more, and at most in proportion. Rows that were left out of the pass, their advantages being 0,
are counted at their full price in the upper end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rloo_cli.training.measure import Batch, Measurement

PHASES = ("generate", "reward", "train", "sync")


def measured_document(measurement: Measurement, *, total_steps: int, completion_max: int | None) -> dict[str, Any]:
    """What was measured, and what it comes to for a step and for the run."""
    batches, uses = measurement.batches, measurement.uses
    scale = measurement.batch_prompts / batches[0].prompts
    lows = [batch_seconds(batch, scale, overlaps=measurement.overlaps, is_upper=False) / uses for batch in batches]
    highs = [batch_seconds(batch, scale, overlaps=measurement.overlaps, is_upper=True) / uses for batch in batches]
    tokens, completions = sum(batch.tokens for batch in batches), sum(batch.completions for batch in batches)
    return {
        "batches": len(batches),
        "prompts": batches[0].prompts,
        "batch_prompts": measurement.batch_prompts,
        "uses": uses,
        "load_seconds": measurement.load_seconds,
        "seconds": {name: _mean(batches, name) for name in (*PHASES, "total")},
        "tokens_per_batch": tokens / len(batches),
        "tokens_per_second": tokens / sum(batch.generate for batch in batches),
        "mean_length": tokens / completions,
        "completion_max": completion_max,
        "truncated": _mean(batches, "truncated"),
        "skipped": sum(batch.skipped for batch in batches) / sum(batch.rows for batch in batches),
        "step_seconds": {"low": min(lows), "high": max(highs)},
        "run_seconds": {"low": min(lows) * total_steps, "high": max(highs) * total_steps},
        "step_tokens": tokens / len(batches) * scale / uses,
        "peak_bytes": measurement.peak_bytes,
        "rollout_bytes": round(sum(batch.rollout_bytes for batch in batches) / len(batches) * scale * total_steps / uses),
    }


def batch_seconds(batch: Batch, scale: float, *, overlaps: bool, is_upper: bool) -> float:
    """Seconds of a whole generation batch and its optimizer steps, from those of one that is `scale` times smaller: the lower or the upper end."""
    sampling = (batch.generate + batch.reward) * (scale if is_upper else 1.0)
    train = batch.train * scale
    if is_upper and 0 < batch.skipped < batch.rows:
        train *= batch.rows / (batch.rows - batch.skipped)
    return (max(sampling, train) if overlaps else sampling + train) + batch.sync


def _mean(batches: Sequence[Batch], name: str) -> float:
    return float(sum(getattr(batch, name) for batch in batches)) / len(batches)


def show_seconds(seconds: float) -> str:
    """`0.21 s`, `14 s`, `3.5 min`, `2.1 h`, `4.0 days`."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    if seconds < 0.005:
        return "0 s"
    return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def show_range(ends: Mapping[str, float]) -> str:
    """`3.1 to 4.0 s`, or one of them where both read alike."""
    low, high = show_seconds(ends["low"]), show_seconds(ends["high"])
    return low if low == high else f"{low} to {high}"
