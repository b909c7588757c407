"""A panel as SVG, drawn by matplotlib. Text stays text, and colours are CSS variables, so that the page decides about light and dark."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rloo_cli.inspect.series import Series, smoothing_width
from rloo_cli.report.panels import COLORS, Line, Panel
from rloo_cli.report.wording import MINUS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 380.0, 168.0
"""Of a picture, in pixels of the page where it is not scaled."""
LEFT, RIGHT, BOTTOM, TOP = 40.0, 10.0, 20.0, 8.0
"""Margins of its axes, pixels."""
POINTS_PER_INCH = 72
ROOM = 0.06
"""Above and below the curves, as a share of their range."""
LOW_QUANTILE, HIGH_QUANTILE, OUTLIER = 0.02, 0.98, 4.0
"""Single steps that are further out than so many times the range between the quantiles do not set the scale; they leave the picture."""
VARIABLES = {"#000001": "--ink-faint", "#000002": "--grid", **{f"#0000{16 + i:02x}": f"--line-{i}" for i in range(COLORS)}}
"""What is drawn in a colour that nobody would choose → the page's variable."""
UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
INK, GRID = "#000001", "#000002"
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "rloo", "path.simplify_threshold": 0.3, "text.parse_math": False, "font.size": 10}

_PROLOGUE = re.compile(r"^.*?(?=<svg)|<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", re.DOTALL)
_IDS = re.compile(
    r' id="(?:figure|axes|patch|matplotlib\.axis|xtick|ytick|line2d|text|FillBetweenPolyCollection|legend|PolyCollection)_\d+"'
)
_PATH = re.compile(r' d="([^"]*)"')
_DECIMALS = re.compile(r"(\.\d)\d+")
_FONT = re.compile(r"font-family: [^;\"]*; ?|(?<=\") transform=\"rotate\(-0 [^)]*\)\"")
_COLOR = re.compile(r"#0000[0-9a-f]{2}")
_SIZE = re.compile(r' (?:width|height)="[^"]*pt"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A picture and where its data lie in it."""

    svg: str
    x_limits: tuple[float, float]
    left: float = LEFT / WIDTH
    right: float = 1 - RIGHT / WIDTH
    """Shares of the width at which the x limits lie."""


def draw(panel: Panel) -> Drawing:
    """The panel's picture."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH / POINTS_PER_INCH, HEIGHT / POINTS_PER_INCH), dpi=POINTS_PER_INCH)
        axes = figure.add_axes(
            (LEFT / WIDTH, BOTTOM / HEIGHT, (WIDTH - LEFT - RIGHT) / WIDTH, (HEIGHT - BOTTOM - TOP) / HEIGHT), facecolor="none"
        )
        figure.patch.set_visible(False)
        low, high = _set_limits(axes, panel)
        _draw_lines(axes, panel.lines, low, high)
        _style(axes)
        low, high = axes.get_xlim()
        return Drawing(svg=_page_svg(figure), x_limits=(float(low), float(high)))


def _draw_lines(axes: Axes, lines: Sequence[Line], low: float, high: float) -> None:
    """The thick lines are means of what the picture shows: a step outside of it counts as much as its edge."""
    thin = 0.38 if sum(line.style == "line" for line in lines) == 1 else 0.22
    areas = [line for line in lines if line.style == "area"]
    if areas:
        stack = [line.series.smoothed() for line in areas]
        colors = [_color(line.color) for line in areas]
        axes.stackplot(stack[0].steps, [series.values for series in stack], colors=colors, linewidth=0, alpha=0.85)
    for line in lines:
        dashes = "--" if line.color >= COLORS else "-"
        color, steps, values = _color(line.color), line.series.steps, line.series.values
        if line.style == "points":
            axes.plot(steps, values, color=color, linewidth=1.2, marker="o", markersize=4.5, linestyle=dashes, zorder=4)
        elif line.style == "line":
            if line.low is not None and line.high is not None:
                axes.fill_between(steps, line.low.values, line.high.values, color=color, alpha=0.13, linewidth=0)
            smooth = Series(steps, tuple(min(high, max(low, value)) for value in values)).smoothed()
            if smoothing_width(len(steps)) > 1:
                axes.plot(steps, values, color=color, linewidth=0.8, alpha=thin, zorder=2)
            marker = "o" if len(steps) == 1 else ""
            axes.plot(steps, smooth.values, color=color, linewidth=1.8, linestyle=dashes, marker=marker, markersize=4, zorder=3)


def _color(index: int) -> str:
    return f"#0000{16 + index % COLORS:02x}"


def _set_limits(axes: Axes, panel: Panel) -> tuple[float, float]:
    """Sets both scales; the ends of that of the values."""
    steps = [step for line in panel.lines for step in (line.series.steps[0], line.series.steps[-1])]
    first, last = min(steps), max(steps)
    margin = (last - first) * 0.015 or 0.5
    axes.set_xlim(first - margin, last + margin)
    low, high = _value_range(panel)
    room = (high - low) * ROOM or abs(high) * 0.1 or 0.5
    is_stacked = any(line.style == "area" for line in panel.lines)
    axes.set_ylim(0.0 if is_stacked else low - room, high + room)
    return low - room, high + room


def _value_range(panel: Panel) -> tuple[float, float]:
    """What the scale has to show: all, without single steps that are far out of the rest; shares and what is near 0 begin at 0."""
    areas = [line.series.smoothed().values for line in panel.lines if line.style == "area"]
    if areas:
        return 0.0, max(map(sum, zip(*areas, strict=True)))
    ranges = [_without_outliers(series) for line in panel.lines for series in (line.series, line.low, line.high) if series]
    low, high = min(low for low, _ in ranges), max(high for _, high in ranges)
    if 0 <= low < 0.5 * high:
        low = 0.0
    return low, high


def _without_outliers(series: Series) -> tuple[float, float]:
    ordered = sorted(series.values)
    low, high = (ordered[round(share * (len(ordered) - 1))] for share in (LOW_QUANTILE, HIGH_QUANTILE))
    reach = OUTLIER * (high - low)
    if reach == 0:
        return ordered[0], ordered[-1]
    return max(ordered[0], low - reach), min(ordered[-1], high + reach)


def _style(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))
    axes.tick_params(length=0, labelcolor=INK, pad=5)
    axes.grid(axis="y", color=GRID, linewidth=1)
    axes.set_axisbelow(True)
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)


def tick(value: float) -> str:
    """A short label of an axis.

    >>> tick(0.30000000000000004), tick(12500.0), tick(-2.0), tick(0.0), tick(2e-05)
    ('0.3', '12.5k', '−2', '0', '2e−5')
    """
    if value == 0:
        return "0"
    size, unit = next(((size, unit) for size, unit in UNITS if abs(value) >= size), (1.0, ""))
    value /= size
    mantissa, exponent, power = f"{value:.4g}".partition("e")
    return (f"{mantissa}e{int(power)}" if exponent else mantissa).replace("-", MINUS) + unit


def _page_svg(figure: Figure) -> str:
    """The figure for use inside a page: without its prologue, its ids and a size of its own, with fewer decimals and the page's colours."""
    sink = io.StringIO()
    figure.savefig(sink, format="svg", transparent=True, metadata={"Date": None, "Creator": None, "Type": None, "Format": None})
    return _shortened(sink.getvalue())


def _shortened(svg: str) -> str:
    text = _FONT.sub("", _IDS.sub("", _PROLOGUE.sub("", svg)))
    text = _PATH.sub(lambda match: f' d="{" ".join(_DECIMALS.sub(chr(92) + "1", match[1]).split())}"', text)
    text = _COLOR.sub(lambda match: f"var({VARIABLES[match[0]]})" if match[0] in VARIABLES else match[0], text)
    return re.sub(r"\n\s*", "", _SIZE.sub("", text))
