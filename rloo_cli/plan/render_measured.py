"""What was measured, and what it comes to, as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rloo_cli.plan.numbers import show_size
from rloo_cli.plan.projection import PHASES, show_range, show_seconds

ENDS = "; the lower end if more prompts at once cost sampling nothing more, the upper if they cost in proportion"


def measured_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """Seconds by phase, tokens, the projected step and run, memory beside its estimate."""
    found = document.get("measured")
    if found is None:
        return
    is_part = found["prompts"] < found["batch_prompts"]
    size = f"{found['prompts']} of {found['batch_prompts']} prompts" if is_part else f"{found['prompts']} prompts"
    count = f"{found['batches']} batches" if found["batches"] > 1 else "1 batch"
    yield f"Measured here: {count} of {size}, after {show_seconds(found['load_seconds'])} of loading; nothing was kept"
    phases = ", ".join(f"{name} {show_seconds(found['seconds'][name])}" for name in PHASES)
    serves = f" and its {found['uses']} optimizer steps" if found["uses"] > 1 else ""
    yield f"  a batch{serves}: {phases}"
    yield (
        f"  {found['tokens_per_batch']:,.0f} tokens a batch, {found['tokens_per_second']:,.0f} tokens/s while sampling; completions had "
        f"{found['mean_length']:.1f} tokens{_limit(found)}"
    )
    yield f"  a step: {show_range(found['step_seconds'])}, {found['step_tokens']:,.0f} tokens{ENDS if is_part else ''}"
    steps = document["steps"]["total"]
    yield f"  the run of {steps} steps: {show_range(found['run_seconds'])}, without evaluation and saving, while lengths stay as they are"
    yield from _skipped(found)
    estimate = document["memory"]["bytes"]["peak"]
    yield f"  memory: peak {show_size(found['peak_bytes'])} measured, {show_size(estimate)} estimated{' for the whole batch' if is_part else ''}"
    yield f"  rollouts of the run: about {show_size(found['rollout_bytes'])}"


def _limit(found: Mapping[str, Any]) -> str:
    if found["completion_max"] is None:
        return ""
    return f" of at most {found['completion_max']}, {found['truncated']:.0%} of them cut off there"


def _skipped(found: Mapping[str, Any]) -> Iterator[str]:
    """What rows without gradient hide."""
    if found["skipped"] == 1:
        yield "  no completion had a gradient, since all rewards of every group were equal: what training takes is not in these figures"
    elif found["skipped"] > 0:
        yield f"  {found['skipped']:.0%} of the completions had no gradient and cost no training; the upper end counts them all"
