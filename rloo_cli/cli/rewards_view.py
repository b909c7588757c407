"""What was found out about reward functions, as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo_cli.cli.page import ABSENT, columns, duration, number
from rloo_cli.inspect.probes import GIVEN, KINDS, ProbeData
from rloo_cli.inspect.reward_check import CheckedReward, TriedRow, legend
from rloo_cli.inspect.reward_names import RewardName, summary_of
from rloo_cli.run.visible import on_one_line, visible
from rloo_cli.types import PromptContent

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

FAILED = "fails"
OUTPUT_LINES = 8
LONGEST_TEXT = 46
NARROWEST_PROMPT = 14


def names_table(names: Sequence[RewardName]) -> RenderableType:
    """Reward functions with what they are set by and what they do."""
    from rich.text import Text

    table = columns(["function", "what it gives"], left=["function", "what it gives"])
    table.columns[0].no_wrap = True
    for name in names:
        settings = Text(f"settings: {', '.join(name.settings)}", style="dim") if name.settings else None
        table.add_row(name.function, Text("\n").join(part for part in (Text(visible(name.summary) or ABSENT), settings) if part))
    return table


def check_parts(console: Console, checked: CheckedReward, data: ProbeData) -> Iterator[Any]:
    """One function: what it is given, what it gave, how long it took, what looks wrong."""
    from rich.rule import Rule
    from rich.text import Text

    source = checked.source
    yield Rule(Text(checked.name, style="bold"), align="left", style="dim")
    yield Text(f"{_short(source.file)}:{source.line}", style="dim")
    summary = summary_of(source)
    if summary:
        yield Text(visible(summary))
    yield Text()
    yield _argument_table(checked)
    if checked.unused:
        yield Text(f"not given to it: {', '.join(map(visible, checked.unused))}", style="dim")
    yield Text()
    yield Text("Tried on", style="bold").append(f" {_rows_words(checked, data)}", style="not bold")
    yield _legend_table(console, checked.rows)
    yield Text()
    yield _value_table(console, checked)
    yield from _given_parts(checked.rows)
    yield Text()
    yield from _closing_parts(checked)


def _argument_table(checked: CheckedReward) -> RenderableType:
    table = columns(["argument", "what it gets"], left=["argument", "what it gets"])
    first = checked.rows[0].probed.columns if checked.rows else {}
    for name, origin in checked.arguments:
        example = f": {on_one_line(repr(first[name]), LONGEST_TEXT)}, …" if name in first else ""
        table.add_row(visible(name), visible(origin) + example)
    return table


def _rows_words(checked: CheckedReward, data: ProbeData) -> str:
    count = len(checked.rows)
    gold = f"gold answers: column `{data.gold_column}`" if data.gold_column else "no gold answers (name their column by --column)"
    return f"{count} row{'' if count == 1 else 's'} of {data.source}; {gold}"


def _legend_table(console: Console, rows: Sequence[TriedRow]) -> RenderableType:
    from rich.text import Text

    table = columns(["", " ", "  "], left=["", " ", "  "])
    table.show_header = False
    room = max(16, console.width - 12 - max(map(len, KINDS.values())))
    for probe in legend(rows):
        if probe.kind != GIVEN:
            table.add_row(
                probe.kind,
                on_one_line(probe.text, room) or Text("(empty)", style="dim italic"),
                Text(KINDS[probe.kind], style="dim"),
            )
    return table


def _value_table(console: Console, checked: CheckedReward) -> RenderableType:
    """A row of the data a line, a kind of completion a column."""
    kinds = [probe.kind for probe in legend(checked.rows) if probe.kind != GIVEN]
    table = columns(["row", "prompt", *kinds], left=["prompt"])
    room = max(NARROWEST_PROMPT, console.width - 8 - 9 * len(kinds))
    for row in checked.rows:
        table.add_row(str(row.probed.row), on_one_line(_prompt_words(row.probed.content), room), *(_cell(row, kind) for kind in kinds))
    if len(checked.rows) > 1:
        table.add_row(
            "", "mean", *(_mean([value for row in checked.rows for value in row.values_of(kind)]) for kind in kinds), style="bold"
        )
    return table


def _cell(row: TriedRow, kind: str) -> Text:
    from rich.text import Text

    position = next((i for i, probe in enumerate(row.probed.probes) if probe.kind == kind), None)
    if position is None:
        return Text("")
    if position in row.failures:
        return Text(FAILED, style="red")
    value = row.values[position]
    return Text("None" if value is None else number(value), style="dim" if not value else "")


def _given_parts(rows: Sequence[TriedRow]) -> Iterator[Any]:
    """The completions that the user brought, a line each."""
    from rich.text import Text

    given = [(row, i) for row in rows for i, probe in enumerate(row.probed.probes) if probe.kind == GIVEN]
    if not given:
        return
    table = columns(["row", "reward", "completion"], left=["completion"])
    for row, position in given:
        value = Text(FAILED, style="red") if position in row.failures else number(row.values[position])
        table.add_row(str(row.probed.row), value, on_one_line(row.probed.probes[position].text, LONGEST_TEXT))
    yield Text()
    yield table


def _closing_parts(checked: CheckedReward) -> Iterator[Any]:
    from rich.table import Table
    from rich.text import Text

    lines = Table.grid(padding=(0, 2, 0, 0))
    if checked.seconds is not None:
        lines.add_row("time", f"{duration(checked.seconds)} a completion")
    for name, value in checked.metrics.items():
        lines.add_row("metric", f"{visible(name)} {number(value)}")
    told = [("notice", "", checked.notices), ("refused", "red", [checked.refusal] if checked.refusal else [])]
    told += [("failure", "red", _distinct(checked.failures)), ("warning", "yellow", checked.warnings)]
    for word, style, messages in told:
        for message in messages:
            lines.add_row(Text(word, style=style), visible(message))
    yield lines
    if not (checked.warnings or checked.refusal):
        yield Text("nothing looks wrong", style="green")
    yield from _output_parts(checked.output)


def _output_parts(output: str) -> Iterator[Any]:
    from rich.text import Text

    lines = output.rstrip("\n").split("\n") if output.strip() else []
    if lines:
        yield Text(f"printed  {len(lines)} line{'' if len(lines) == 1 else 's'}, the last of them:")
    for line in lines[-OUTPUT_LINES:]:
        yield Text(f"         {on_one_line(line, 160)}", style="dim")


def _distinct(lines: Sequence[str], most: int = 3) -> list[str]:
    """The first line of each reason."""
    found = {line.partition(": ")[2]: line for line in reversed(lines)}
    return list(reversed(found.values()))[:most]


def _prompt_words(content: PromptContent) -> str:
    return content if isinstance(content, str) else str(content[-1].get("content"))


def _mean(values: Sequence[float]) -> str:
    return number(sum(values) / len(values)) if values else ABSENT


def _short(file: str) -> str:
    """The path as a reader would type it."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file
