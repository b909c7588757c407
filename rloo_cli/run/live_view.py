"""What the live view of a run shows, as lines: a pure function of what is known and of the terminal's size."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from rloo_cli.run.visible import visible

SHOWN = (
    ("reward", "reward", "{:.3f}"),
    ("completions/mean_length", "length", "{:.1f}"),
    ("perf/tokens_per_second", "tok/s", "{:.0f}"),
    ("kl", "kl", "{:.4f}"),
    ("loss", "loss", "{:.4f}"),
    ("grad_norm", "grad", "{:.3f}"),
)
"""Metric, its short name, and how it is printed: the columns of a line, the most telling first."""

SHOWN_EVALUATION = (
    ("eval/reward", "reward {:.4f}"),
    ("eval/rewards/(.+)/mean", "{name} {:.4f}"),
    ("eval/rewards/(.+/pass@.+)", "{name} {:.4f}"),
    ("eval/completions/mean_length", "length {:.1f}"),
    ("eval/completions/clipped_ratio", "clipped {:.0%}"),
    ("eval/prompts", "{:.0f} prompts"),
)
"""Patterns of what an evaluation's line shows, in this order, and how; metrics.jsonl has everything."""

PHASES = ("wait", "generate", "reward", "reference", "train", "sync", "save")
"""Phases of a step whose seconds are shown, in their order."""
BARS = "▁▂▃▄▅▆▇█"
BAR_WIDTH = 24
COMPLETION_LINES = 6
LABEL = 11
"""Columns before a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A completion to look at."""

    step: int
    prompt: str
    """As the model saw it."""
    completion: str
    reward: float | None
    """None = unscored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What is known at a moment."""

    step: int
    total: int
    elapsed: float
    """Seconds since this attempt began."""
    left: float | None
    """Seconds until the last step; None before the first."""
    row: Mapping[str, float]
    """The metrics of the last step."""
    rewards: Sequence[float]
    """Mean reward of the steps so far, the last at the end."""
    evaluation: Mapping[str, float]
    """The metrics of the last evaluation; empty = none yet."""
    sample: Sample | None
    phase: str
    phase_seconds: float


def view_lines(shown: Shown, *, width: int, height: int) -> list[Text]:
    """The view's lines, at most `height` of them and none wider than `width`; what tells least is left out first."""
    lines = [(0, _head(shown, width)), (1, _labelled("now", f"{shown.phase} {format_seconds(shown.phase_seconds)}"))]
    if shown.rewards:
        lines.insert(1, (2, _reward(shown.rewards, width)))
    if values := step_values(shown.row, width - LABEL, leave_out="reward"):
        lines.insert(-1, (4, _labelled("", values)))
    if phases := _phases(shown.row):
        lines.insert(-1, (5, _labelled("step took", phases)))
    if shown.evaluation:
        step = f"step {int(shown.evaluation['step'])}: "
        lines.insert(-1, (3, _labelled("evaluation", step + evaluation_values(shown.evaluation, width - LABEL - len(step)))))
    room = height - len(lines)
    while len(lines) > max(1, height):
        lines.remove(max(lines, key=lambda line: line[0]))
    texts = [text for _, text in lines]
    if shown.sample is not None and room >= 3:
        texts += _sample(shown.sample, width, min(room, COMPLETION_LINES + 2))
    for text in texts:
        text.no_wrap = True
        text.truncate(width, overflow="ellipsis")
    return texts


def step_values(row: Mapping[str, float], width: int | None = None, *, leave_out: str | None = None) -> str:
    """`reward 0.512 | length 33.2 | …` of a row of metrics, as much as `width` columns hold."""
    return _joined([f"{name} {form.format(row[key])}" for key, name, form in SHOWN if key in row and key != leave_out], width)


def evaluation_values(row: Mapping[str, float], width: int | None = None) -> str:
    """`reward 0.7500 | …` of an evaluation's metrics, as much as `width` columns hold."""
    parts = []
    for pattern, form in SHOWN_EVALUATION:
        for key, value in row.items():
            if match := re.fullmatch(pattern, key):
                parts.append(form.format(value, name=match[1] if match.groups() else ""))
    return _joined(parts, width)


def _joined(parts: list[str], width: int | None) -> str:
    while width is not None and parts and len(" | ".join(parts)) > width:
        parts = parts[:-1]
    return " | ".join(parts)


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as bars from the smallest to the largest; where there are more than columns, each bar is a mean.

    >>> sparkline([0.0, 0.5, 1.0], 10)
    '▁▄█'
    """
    if width < 1:
        return ""
    if len(values) > width:
        edges = [i * len(values) // width for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low = min(values, default=0.0)
    spread = max(values, default=0.0) - low
    return "".join(BARS[int((value - low) / spread * (len(BARS) - 1)) if spread > 0 else 0] for value in values)


def format_seconds(seconds: float) -> str:
    """A duration as a person reads it: `42s`, `3m 05s`, `2h 07m`."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


def _head(shown: Shown, width: int) -> Text:
    if not shown.total:
        return Text(format_seconds(shown.elapsed), style="bold")
    share = shown.step / shown.total
    times = format_seconds(shown.elapsed) + (f", {format_seconds(shown.left)} left" if shown.left is not None else "")
    head, tail = f"step {shown.step}/{shown.total}", f"{share:4.0%}  {times}"
    if width < len(head) + len(tail) + BAR_WIDTH + 3:
        return Text(f"{head} {tail}", style="bold")
    full = round(share * BAR_WIDTH)
    return Text.assemble((head, "bold"), "  ", ("━" * full, "green"), ("─" * (BAR_WIDTH - full), "dim"), " ", (tail, "bold"))


def _reward(rewards: Sequence[float], width: int) -> Text:
    value, scale = f"{rewards[-1]:.3f}", f"{min(rewards):.3g} to {max(rewards):.3g}"
    bars = sparkline(rewards, max(0, width - LABEL - len(value) - len(scale) - 4))
    return Text.assemble(("reward".ljust(LABEL), "dim"), (value, "bold"), "  ", (bars, "green"), "  ", (scale, "dim"))


def _labelled(label: str, text: str) -> Text:
    return Text.assemble((label.ljust(LABEL), "dim"), visible(text))


def _phases(row: Mapping[str, float]) -> str:
    seconds = [(name, row[f"perf/seconds/{name}"]) for name in PHASES if f"perf/seconds/{name}" in row]
    whole = f"{_short(row['perf/seconds/step'])} s: " if "perf/seconds/step" in row else ""
    return whole + " ".join(f"{name} {_short(value)}" for name, value in seconds) if seconds else ""


def _short(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds < 10 else f"{seconds:.0f}"


def _sample(sample: Sample, width: int, lines: int) -> list[Text]:
    """A rule, the prompt's tail on one line, and the completion on the rest, cut where it does not fit."""
    reward = f"reward {sample.reward:.3f}" if sample.reward is not None else "unscored"
    title = f"── a completion of step {sample.step}, {reward} "
    completion = _flat(sample.completion[: width * lines].rstrip("\n")) or "(empty)"
    return [
        Text(title + "─" * max(0, width - cell_len(title)), style="dim"),
        Text(_tail(_flat(sample.prompt[-2 * width :]), width), style="dim"),
        *(Text(line) for line in _cut(completion, width, lines - 2)),
    ]


def _flat(text: str) -> str:
    """On one line, with what a terminal would obey spelled out."""
    return visible(text.replace("\n", "⏎"))


def _tail(text: str, width: int) -> str:
    """The end of a text, as much as `width` columns hold."""
    while cell_len(text) > width:
        text = "…" + text[2:]
    return text


def _cut(text: str, width: int, lines: int) -> list[str]:
    """The beginning of a text on so many lines."""
    cut: list[str] = []
    while text and len(cut) < lines:
        line = text
        if cell_len(line) > width:
            line = set_cell_size(line, width).rstrip() if len(cut) < lines - 1 else set_cell_size(line, width - 1).rstrip() + "…"
        cut.append(line)
        text = text[len(line) :].lstrip()
    return cut
