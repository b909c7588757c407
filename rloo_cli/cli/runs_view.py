"""How runs are shown: a line each, a page of one, several side by side. Formatting alone; inspect/ has read everything before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo_cli.cli.page import ABSENT, columns, number
from rloo_cli.inspect.recipe_values import changed_values, default_values, differences, json_values, shown_value
from rloo_cli.inspect.run_attempts import Attempt, read_warnings
from rloo_cli.inspect.run_page import Curve, SavedStep, curves, next_commands, side_by_side
from rloo_cli.inspect.run_state import RunFacts, RunSummary, StateName, distinct_names
from rloo_cli.inspect.series import sparkline
from rloo_cli.inspect.words import plural, seconds
from rloo_cli.run.visible import on_one_line, visible

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

LIST_HEADER = ["run", "state", "steps", "reward", "eval", "best", "began", "took"]
LIST_LEFT = ["run", "state", "began", "why"]
STYLES = {
    StateName.RUNNING: "cyan",
    StateName.FINISHED: "green",
    StateName.STOPPED: "yellow",
    StateName.FAILED: "red",
    StateName.DIED: "red",
}
MOST_WARNINGS = 5
NARROWEST_CURVE, WIDEST_CURVE = 8, 48
CURVE_MARGIN = 13
"""Characters between the columns of the table of curves."""
COMPLAINTS = (StateName.FAILED, StateName.DIED, StateName.STOPPED)


def list_rows(summaries: Sequence[RunSummary], root: Path, *, with_reason: bool) -> tuple[list[str], list[list[str]]]:
    """(header, a row a run); with the reason of its end as a last column where the table is for a pipe."""
    header = [*LIST_HEADER, *(["why"] if with_reason else [])]
    return header, [[*_line(summary, root), *([summary.reason] if with_reason else [])] for summary in summaries]


def reasons(summaries: Sequence[RunSummary], root: Path) -> Iterator[RenderableType]:
    """A line for each run that did not end well: why."""
    from rich.text import Text

    told = [summary for summary in summaries if summary.state in COMPLAINTS and summary.reason]
    if told:
        yield Text()
    for summary in told:
        text = Text(visible(f"{_name(summary.path, root)}: "))
        yield text.append(visible(summary.reason), style=STYLES.get(summary.state, ""))


def _line(summary: RunSummary, root: Path) -> list[str]:
    return [
        _name(summary.path, root),
        state_words(summary),
        f"{summary.step}/{summary.total_steps}" if summary.total_steps else str(summary.step),
        number(summary.reward),
        number(summary.evaluation),
        number(summary.best),
        when(summary.started),
        took(summary.seconds),
    ]


def _name(path: Path, root: Path) -> str:
    return path.name if path == root else str(path.relative_to(root))


def state_words(summary: RunSummary) -> str:
    """`failed (4)`: the state with the exit code where that says something."""
    return f"failed ({summary.exit_code})" if summary.state is StateName.FAILED and summary.exit_code else str(summary.state)


def when(moment: datetime | None) -> str:
    """Date and time to the minute."""
    return ABSENT if moment is None else f"{moment:%Y-%m-%d %H:%M}"


def took(time: float | None) -> str:
    """A duration in seconds; a dash where it is not known."""
    return ABSENT if time is None else seconds(time)


def size_words(size: int) -> str:
    """Bytes in the unit that fits: `5.3 MB`."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


# --- a page of one run -------------------------------------------------------------------------------------------------------------


def run_document(facts: RunFacts, saved: Sequence[SavedStep]) -> dict[str, Any]:
    """The page for machines."""
    return {
        "summary": facts.summary,
        "id": facts.folder.run_id(),
        "environment": {key: facts.environment.get(key) for key in ("command", "working_folder", "host", "packages", "git", "gpus")},
        "recipe": changed_values(facts.recipe) if facts.recipe is not None else None,
        "curves": {curve.key: curve.values for curve in curves(facts.metrics)},
        "checkpoints": saved,
        "attempts": facts.attempts,
        "warnings": _warnings(facts),
        "damaged_metrics_lines": facts.metrics.damaged_lines,
        "next": dict(next_commands(facts)),
    }


def run_parts(console: Console, facts: RunFacts, saved: Sequence[SavedStep]) -> Iterator[RenderableType]:
    """The page."""
    from rich.text import Text

    summary = facts.summary
    head = Text(visible(str(summary.path)), style="bold").append("  ")
    head.append(state_words(summary), style=STYLES.get(summary.state, ""))
    yield head.append(f" at step {summary.step}" + (f" of {summary.total_steps}" if summary.total_steps else ""))
    if summary.reason:
        yield Text("  " + visible(summary.reason), style=STYLES.get(summary.state, ""))
    yield from _pairs(_identity(facts))
    yield from _titled("Recipe, where it differs from the defaults", _pairs(_recipe_lines(facts)))
    yield from _titled("Curves", [_curve_table(console, found)] if (found := curves(facts.metrics)) else [])
    if facts.metrics.damaged_lines:
        lines = plural(facts.metrics.damaged_lines, "line")
        yield Text(f"  left out of metrics.jsonl, since damaged: {lines}", style="yellow")
    yield from _titled("Checkpoints", [_saved_table(saved, summary.best_step)] if saved else [])
    yield from _titled("Attempts", [_attempt_table(facts.attempts)] if facts.attempts else [])
    yield from _titled("Warnings", [Text(f"  {on_one_line(line, 400)}") for line in _warnings(facts)])
    yield from _titled("Next", _pairs(next_commands(facts)))


def _titled(title: str, parts: Iterable[RenderableType]) -> Iterator[RenderableType]:
    """The parts below a title; nothing where there are none."""
    from rich.text import Text

    found = list(parts)
    if found:
        yield Text()
        yield Text(title, style="bold")
        yield from found


def _pairs(lines: Sequence[tuple[str, str]]) -> Iterator[RenderableType]:
    """Names and values in two columns."""
    if lines:
        table = columns(["", ""], left=["", ""])
        table.show_header, table.pad_edge, table.padding = False, True, (0, 1, 0, 1)
        table.columns[0].no_wrap = True
        for name, value in lines:
            table.add_row(visible(name), visible(value))
        yield table


def _identity(facts: RunFacts) -> list[tuple[str, str]]:
    environment, summary = facts.environment, facts.summary
    packages, git = environment.get("packages"), environment.get("git")
    versions = (
        [f"{name} {packages[name]}" for name in ("rloo", "torch", "transformers", "vllm") if name in packages]
        if isinstance(packages, dict)
        else []
    )
    commit = [f"commit {str(git.get('commit'))[:8]}{', changed' if git.get('changed') else ''}"] if isinstance(git, dict) else []
    command = environment.get("command")
    gpus = environment.get("gpus")
    machine = f"{environment.get('host')}, {len(gpus)} GPUs" if isinstance(gpus, list) and gpus else str(environment.get("host", ""))
    lines = [
        ("id", (facts.folder.run_id() or "")[:12]),
        ("began", f"{when(summary.started)}, ran {took(summary.seconds)}" if summary.started is not None else ""),
        ("on", machine),
        ("with", ", ".join([*versions, *commit])),
        (
            "command",
            " ".join([Path(command[0]).name, *command[1:]])
            if isinstance(command, list) and command and all(isinstance(w, str) for w in command)
            else "",
        ),
    ]
    return [(name, value) for name, value in lines if value]


def _recipe_lines(facts: RunFacts) -> list[tuple[str, str]]:
    if facts.recipe is None:
        return [("recipe.yaml", "cannot be read")]
    defaults = default_values(facts.recipe)
    return [
        (name, shown_value(value) + (f"   (default {shown_value(defaults[name])})" if name in defaults else ""))
        for name, value in changed_values(facts.recipe).items()
    ]


def _curve_table(console: Console, found: Sequence[Curve]) -> RenderableType:
    """Curves as wide as the terminal leaves room for."""
    table = columns(["", "", "first", "last", "low", "high"], left=["", ""])
    table.pad_edge = table.columns[0].no_wrap = True
    rows = [
        (curve, visible(curve.key), [_rounded(value) for value in (curve.values[0], curve.last, curve.low, curve.high)]) for curve in found
    ]
    taken = max(len(key) for _, key, _ in rows) + sum(max(len(cells[i]) for _, _, cells in rows) for i in range(4)) + CURVE_MARGIN
    width = max(NARROWEST_CURVE, min(WIDEST_CURVE, console.width - taken))
    for curve, key, cells in rows:
        table.add_row(key, sparkline(curve.values, width), *cells)
    return table


def _rounded(value: float) -> str:
    """Three digits, and whole numbers between a thousand and a million."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else number(value, ".3g")


def _saved_table(saved: Sequence[SavedStep], best_step: int | None) -> RenderableType:
    from rich.text import Text

    table = columns(["step", "", "size", "state"], left=["", "state"])
    table.pad_edge = True
    for each in saved:
        state = Text(visible(f"damaged: {each.damage}"), style="red") if each.damage else Text("whole", style="green")
        mark = "final/" if each.name == "final" else "best evaluation" if each.step == best_step else ""
        table.add_row(ABSENT if each.step is None else str(each.step), mark, size_words(each.size), state)
    return table


def _attempt_table(attempts: Sequence[Attempt]) -> RenderableType:
    table = columns(["", "began", "took", "exit", "rank", "why"], left=["began", "why"])
    table.pad_edge = True
    for attempt in attempts:
        cause = attempt.cause
        end = (ABSENT, "", "") if cause is None else (str(cause.exit_code), str(cause.rank), cause.reason or "done")
        table.add_row(str(attempt.number), when(attempt.started), took(attempt.seconds), *map(visible, end))
    return table


def _warnings(facts: RunFacts) -> list[str]:
    """The last warnings of the last attempt."""
    return read_warnings(facts.folder.attempt(facts.attempts[-1].number))[-MOST_WARNINGS:] if facts.attempts else []


# --- several side by side ----------------------------------------------------------------------------------------------------------


def comparison_document(runs: Sequence[RunFacts]) -> dict[str, Any]:
    """The comparison for machines."""
    names = distinct_names([run.folder.path for run in runs])
    fields = differences([run.recipe for run in runs if run.recipe is not None]) if all(run.recipe is not None for run in runs) else []
    return {
        "runs": [{"name": name, "path": run.folder.path} for name, run in zip(names, runs, strict=True)],
        "numbers": {title: dict(zip(names, values, strict=True)) for title, values in side_by_side(runs)},
        "recipe": [json_values(each, names) for each in fields],
    }


def comparison_rows(runs: Sequence[RunFacts]) -> tuple[list[str], list[list[str]]]:
    """(header, rows) of both parts in one table, for a pipe."""
    header = ["", *distinct_names([run.folder.path for run in runs])]
    numbers = [[title, *map(_cell, values)] for title, values in side_by_side(runs)]
    return header, [*numbers, *_recipe_rows(runs)]


def comparison_parts(console: Console, runs: Sequence[RunFacts]) -> Iterator[RenderableType]:
    """Curves of the reward, numbers, and what differs in the recipes."""
    names = distinct_names([run.folder.path for run in runs])
    header = ["", *names]
    lines = [
        [key, *(sparkline(run.metrics.series(key).values, 20) for run in runs)]
        for key in ("reward", "eval/reward", "completions/mean_length")
    ]
    numbers = [[title, *map(_cell, values)] for title, values in side_by_side(runs)]
    yield _side_table(header, [*(line for line in lines if any(line[1:])), *numbers], left=[""])
    yield from _titled("Recipe", [_side_table(header, rows, left=header)] if (rows := _recipe_rows(runs)) else [])


def _recipe_rows(runs: Sequence[RunFacts]) -> list[list[str]]:
    missing = [str(run.folder.path) for run in runs if run.recipe is None]
    if missing:
        return [["recipe.yaml", *("cannot be read" if run.recipe is None else "" for run in runs)]]
    found = differences([run.recipe for run in runs if run.recipe is not None])
    return [[each.field, *map(shown_value, each.values)] for each in found]


def _side_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[str]) -> RenderableType:
    table = columns([visible(name) for name in header], left=[visible(name) for name in left])
    for row in rows:
        table.add_row(*map(visible, row))
    return table


def _cell(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ABSENT
    return str(value) if isinstance(value, int) else number(float(value), ".4g")
