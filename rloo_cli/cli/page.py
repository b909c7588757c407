"""What the commands that show things share: text blocks, numbers, JSON; safe for terminals, pipes and pagers."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any

import typer

from rloo_cli.run.visible import visible

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

    Row = Sequence[str | Text]

BROKEN_PIPE = 141
ABSENT = "—"
BAR = "│ "
CUT_LINES = 12
"""Lines of a text that are shown unless all are asked for."""
SPECIAL_MARK = r"<\|[^|<>\s]*\|>|</?s>|<pad>|<unk>|<bos>|<eos>|\[(?:PAD|CLS|SEP|UNK|BOS|EOS)\]"


def new_console() -> Console:
    """A console as wide as the terminal, or 80 columns (or COLUMNS) in a pipe."""
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False)


def print_page(console: Console, parts: Iterable[RenderableType]) -> None:
    """Print the parts, by way of typer: a reader that leaves early (`| head`) is met in one place, at the edge."""
    for part in parts:
        with console.capture() as captured:
            console.print(part)
        echo(captured.get())


def echo(text: str) -> None:
    """Print the text as it is; where the reader has left, end quietly with the code that a shell gives to SIGPIPE."""
    try:
        typer.echo(text, nl=False, color=True)  # rich has decided on colours already (NO_COLOR, FORCE_COLOR, a pipe)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(BROKEN_PIPE) from None


def print_json(value: Any) -> None:
    """Print one JSON document; NaN and infinities become strings, which JSON can hold, and control characters are escaped."""
    text = json.dumps(plain(value), indent=2, ensure_ascii=False, default=str)
    echo("".join(character if character == "\n" else _escaped(character) for character in text) + "\n")


def _escaped(character: str) -> str:
    return json.dumps(character)[1:-1] if not character.isprintable() else character


def plain(value: Any) -> Any:
    """Dataclasses and mappings as dictionaries, non-finite numbers as strings."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def number(value: float | None, form: str = ".3f") -> str:
    """The value in a few digits; a dash where it is absent."""
    if value is None:
        return ABSENT
    if isinstance(value, float) and (not math.isfinite(value) or abs(value) >= 1e5):
        return f"{value:.3g}"
    return f"{value:{form}}"


def signed(value: float | None) -> str:
    """The value with its sign, none for 0."""
    return number(value, "+.3f") if value else number(value)


def share(value: float | None) -> str:
    """A share as a percentage."""
    return ABSENT if value is None else f"{value:.0%}"


def duration(seconds: float) -> str:
    """A time in seconds or milliseconds."""
    return f"{seconds:.2g} s" if seconds >= 0.1 else f"{seconds * 1e3:.2g} ms"


def row_number(value: int | None) -> str:
    """The number of a row, from 0."""
    return ABSENT if value is None else str(value)


def sign_style(value: float | None) -> str:
    """Green above 0, red below it or for what is no number, dim for 0 and what is absent."""
    if value is None or value == 0:
        return "dim"
    return "green" if value > 0 else "red"


def columns(header: Sequence[str], *, left: Sequence[str] = ()) -> Table:
    """An empty table whose columns are numbers, set to the right, but for those named `left`."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in header:
        table.add_column(title, justify="left" if title in left else "right", overflow="fold")
    return table


def fitting_tables(
    console: Console, header: Sequence[str], rows: Sequence[Row], *, left: Sequence[str] = (), own: int, styles: Sequence[str] = ()
) -> Iterator[RenderableType]:
    """A table of these rows; where it is too wide, the columns from `own` on come in a table of their own, the first column repeated."""
    from rich.text import Text

    whole = _filled(header, rows, left, styles)
    is_narrow = console.measure(whole, options=console.options.update(width=1000)).maximum <= console.width
    if is_narrow or own >= len(header):
        yield whole
        return
    yield _filled(header[:own], [row[:own] for row in rows], left, styles)
    yield Text()
    yield _filled([header[0], *header[own:]], [[row[0], *row[own:]] for row in rows], left, styles)


def _filled(header: Sequence[str], rows: Sequence[Row], left: Sequence[str], styles: Sequence[str]) -> Table:
    table = columns(header, left=left)
    for row, style in zip(rows, styles or [""] * len(rows), strict=True):
        table.add_row(*row, style=style)
    return table


def text_block(
    console: Console, text: str | None, *, indent: int = 2, style: str = "dim", full: bool = False, special: bool = False
) -> Text:
    """A text behind a bar, broken between words; its first lines where it is long and `full` is not set."""
    from rich.text import Text

    if not text:
        return Text(" " * indent).append(BAR, style=style).append("(empty)" if text == "" else "(none was stored)", style="dim italic")
    shown = Text(visible(text))
    if special:
        shown.highlight_regex(SPECIAL_MARK, "magenta")
    lines = list(shown.wrap(console, max(20, console.width - indent - len(BAR)), tab_size=4))
    hidden = 0 if full or len(lines) <= CUT_LINES + 2 else len(lines) - CUT_LINES
    block = [Text(" " * indent).append(BAR, style=style).append_text(line) for line in lines[: len(lines) - hidden]]
    if hidden:
        block.append(Text(" " * indent).append(BAR, style=style).append(f"… {hidden} more lines (--full shows them)", style="dim italic"))
    return Text("\n").join(block)
