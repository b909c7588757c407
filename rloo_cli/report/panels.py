"""Which curves a report has: each panel with its lines, from the metrics of one run or of several laid over each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rloo_cli.inspect.series import Series
from rloo_cli.report.run_view import RunView
from rloo_cli.report.wording import number, percent
from rloo_cli.run.metrics import find_metric

COLORS = 6
"""Colours that can be told apart; further lines begin again, dashed."""
PHASES = ("generate", "reward", "reference", "train", "sync", "wait", "save")
"""Of a step, in the order in which they happen."""
KEYS = (
    *("reward", "rewards/<name>/mean", "completions/mean_length", "completions/clipped_ratio"),
    *("entropy", "kl", "reward_std", "groups/zero_std", "groups/no_signal", "rows/unscored", "rewards/failures", "custom/<name>"),
    *("grad_norm", "clip_ratio/region_mean", "loss", "learning_rate"),
    *("sampling/logp_diff_mean", "sampling/ess", "sampling/staleness"),
    *("perf/seconds/<phase>", "perf/tokens_per_second", "perf/peak_memory_mb"),
)
"""What is drawn, in this order."""
ROUNDING = 1e-5
"""Relative difference below which numbers are the same."""
ALWAYS = ("reward",)
"""Drawn even where it never changes."""
LENGTH = "completions/mean_length"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One curve."""

    label: str
    series: Series
    color: int
    """From 0."""
    style: Literal["line", "points", "area"] = "line"
    """Points: evaluations, few and each measured on its own. Areas are stacked."""
    low: Series | None = None
    high: Series | None = None
    """A band around it, at the same steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One picture."""

    title: str
    """A key of metrics.jsonl."""
    unit: str
    meaning: str
    lines: tuple[Line, ...]
    summary: str
    """Beginning and end of its only line; nothing where there are several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panels:
    """All pictures, and (key, value) of what never changes: told, not drawn."""

    drawn: tuple[Panel, ...]
    constants: tuple[tuple[str, str], ...]


def make_panels(views: Sequence[RunView]) -> Panels:
    """Every panel that the runs have numbers for."""
    panels, constants = [], []
    for key in _concrete(views):
        lines = _lines(key, views)
        if lines and key not in ALWAYS and _is_constant(lines):
            constants.append((key, number(lines[0].series.values[-1])))
        elif lines:
            panels.append(_panel(key, lines))
    return Panels(drawn=tuple(panels), constants=tuple(constants))


def _is_constant(lines: Sequence[Line]) -> bool:
    values = [value for line in lines for value in line.series.values]
    return max(values) - min(values) <= ROUNDING * max(map(abs, values))


def _concrete(views: Sequence[RunView]) -> Iterator[str]:
    """The keys with names in place of `<name>`; those of one run that belong into one picture stay as they are."""
    every = list(dict.fromkeys(name for view in views for name in view.metrics.names()))
    for key in KEYS:
        names = _matching(key, every)
        together = len(views) == 1 and "custom" not in key and len(names) > 1
        if "<" not in key or together:
            yield key
        elif "rewards/" not in key or len(names) > 1:  # a single function's mean is the reward
            yield from names


def _matching(key: str, every: Sequence[str]) -> list[str]:
    head, _, rest = key.partition("<")
    tail = rest.partition(">")[2]
    if key == "perf/seconds/<phase>":
        return [f"{head}{phase}" for phase in PHASES if f"{head}{phase}" in every]
    return [found for found in every if found.startswith(head) and found.endswith(tail) and len(found) > len(head) + len(tail)]


def _lines(key: str, views: Sequence[RunView]) -> list[Line]:
    if "<" in key:
        return _lines_of_one(key, views[0])
    lines = []
    for color, view in enumerate(views):
        label = view.name if len(views) > 1 else "training"
        found = view.metrics.series(key).thinned()
        low, high = (view.metrics.series(f"completions/{end}_length").thinned() for end in ("min", "max"))
        has_band = key == LENGTH and len(views) == 1 and low.steps == high.steps == found.steps
        if found:
            lines.append(Line(label=label, series=found, color=color, low=low if has_band else None, high=high if has_band else None))
        lines += _evaluation_line(key, view, color if len(views) > 1 else 1, label if len(views) > 1 else "")
    return lines


def _evaluation_line(key: str, view: RunView, color: int, run: str) -> list[Line]:
    series = view.metrics.series(f"eval/{key}") if key in ("reward", LENGTH) else Series((), ())
    return [Line(label=f"{run} evaluation".strip(), series=series, color=color, style="points")] if series else []


def _lines_of_one(key: str, view: RunView) -> list[Line]:
    names = _matching(key, view.metrics.names())
    style: Literal["line", "area"] = "area" if "<phase>" in key else "line"
    head, tail = key.split("<name>") if "<name>" in key else ("perf/seconds/", "")
    if style == "line":
        found = [(name, view.metrics.series(name)) for name in names]
    else:  # a stack needs every phase at every step
        rows = [row for row in view.metrics.train if any(name in row for name in names)]
        steps = tuple(row["step"] for row in rows)
        found = [(name, Series(steps, tuple(row.get(name, 0.0) for row in rows))) for name in names]
    drawn = [(name, series) for name, series in found if series and (style == "line" or any(series.values))]
    return [
        Line(label=name.removeprefix(head).removesuffix(tail), series=series.thinned(), color=color, style=style)
        for color, (name, series) in enumerate(drawn)
    ]


def _panel(key: str, lines: Sequence[Line]) -> Panel:
    if key == "perf/seconds/<phase>":
        return Panel(title="perf/seconds/…", unit="s", meaning="Wall time of a step by phase.", lines=tuple(lines), summary="")
    meaning = find_metric(key.replace("<name>", "name"))
    main = [line for line in lines if line.style != "points"]
    return Panel(
        title=key.replace("<name>", "…"),
        unit=meaning.unit if meaning is not None else "",
        meaning=meaning.description if meaning is not None else "",
        lines=tuple(lines),
        summary=_summary(main[0].series, meaning.unit if meaning is not None else "") if len(main) == 1 else "",
    )


def _summary(series: Series, unit: str) -> str:
    show = percent if unit == "share" else number
    return f"{show(series.head)} → {show(series.tail)}" if len(series.values) > 1 else show(series.values[0])
