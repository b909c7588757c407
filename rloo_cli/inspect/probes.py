"""Completions to try a reward function on: what each row's gold answer, nonsense, silence and a cut-off answer look like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rloo_cli.data.content import prompt_content
from rloo_cli.data.problems import Problems, name_columns
from rloo_cli.data.rows import Rows
from rloo_cli.data.sections import entry_section
from rloo_cli.data.sources import read_split, source_name
from rloo_cli.errors import DataError
from rloo_cli.recipe.schema import DataSection
from rloo_cli.rewards.inputs import GOLD_COLUMNS, gold_string
from rloo_cli.types import PromptContent

GOLD, BOXED, THOUGHT, JUNK, EMPTY, CUT_OFF, GIVEN = "gold", "boxed", "thought", "junk", "empty", "cut off", "given"
KINDS = {
    GOLD: "the data's gold answer",
    BOXED: "as math answers are written",
    THOUGHT: "thought first, then answered",
    JUNK: "words that answer nothing",
    EMPTY: "nothing at all",
    CUT_OFF: "cut in two by the length limit",
    GIVEN: "from --completions",
}
JUNK_TEXT = "Colorless green ideas sleep furiously, the the the."
MOST_ROWS = 1000
"""Rows that are read: enough for `check_rows` to be told something."""
COMPLETION, ROW_COLUMNS = "completion", ("prompt_row", "row")


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A completion to try. Example: `Probe(kind="boxed", text="\\\\boxed{42}")`."""

    kind: str
    """One of KINDS."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedRow:
    """A row of the data set and the completions that are tried on it."""

    row: int
    place: str
    """`prompts.jsonl:3`."""
    content: PromptContent
    columns: Mapping[str, Any]
    probes: tuple[Probe, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeData:
    """What a reward function is tried on."""

    source: str
    rows: tuple[ProbedRow, ...]
    columns: Mapping[str, list[Any]]
    """Every column but the prompt, over all rows that were read."""
    gold_column: str | None


def read_probe_data(
    data: DataSection, split: str, *, count: int, gold_column: str | None, completions: Path | None = None, prompt_option: str
) -> ProbeData:
    """The first `count` rows of a split, or those that `completions` belong to, each with its probes.

    `prompt_option`: what the reader may change where the column of the prompts is not there.

    Raises:
        RecipeError, DataError: data or completions cannot be read.
    """
    problems = Problems()
    if data.datasets:  # of a mixture the first set
        data, split = entry_section(data, data.datasets[0]), data.datasets[0].split
    rows = read_split(data, split, problems, limit=None if completions else max(count, MOST_ROWS))
    problems.raise_if_any()
    source = source_name(data, split)
    if not len(rows):
        raise DataError(f"{source}: holds no rows.")
    for column, option in ((data.prompt_column, prompt_option), (gold_column, "--column")):
        if column is not None and column not in rows.columns:
            raise DataError(f"{source}: no column `{column}`; it has: {name_columns(rows.columns)}. Name it by {option}.")
    gold = gold_column or next((name for name in GOLD_COLUMNS if name in rows.columns), None)
    given = _read_completions(completions, len(rows), count) if completions is not None else {}
    chosen = sorted(given) if given else range(min(count, len(rows)))
    names = [name for name in rows.columns if name != data.prompt_column]
    return ProbeData(
        source=source,
        rows=tuple(_probed(rows, row, data, gold, given.get(row, ())) for row in chosen),
        columns={name: rows.column(name) for name in names},
        gold_column=gold,
    )


def probes_of(gold: Any) -> list[Probe]:
    """What is tried on a row with this gold answer; None = it has none.

    >>> [probe.text for probe in probes_of("6 * 7 = 42 #### 42")][:2]
    ['6 * 7 = 42 #### 42', '\\\\boxed{42}']
    """
    text = gold_string(gold)
    probes = []
    answer = JUNK_TEXT
    if text is not None:
        probes.append(Probe(kind=GOLD, text=text))
        answer = text if "\\boxed" in text else f"\\boxed{{{text.rpartition('####')[2].strip()}}}"
        if answer != text:
            probes.append(Probe(kind=BOXED, text=answer))
    probes.append(Probe(kind=THOUGHT, text=f"<think>\nLet me see.\n</think>\n{answer}"))
    cut = answer[: max(1, (len(answer) + answer.find("{") + 1) // 2)]
    return [*probes, Probe(kind=JUNK, text=JUNK_TEXT), Probe(kind=EMPTY, text=""), Probe(kind=CUT_OFF, text=cut)]


def _probed(rows: Rows, row: int, data: DataSection, gold: str | None, given: Sequence[str]) -> ProbedRow:
    columns = rows.row(row)
    try:
        content = prompt_content(columns.pop(data.prompt_column), data.system_prompt)
    except ValueError as error:
        raise DataError(f"{rows.place(row)}: `{data.prompt_column}` {error}") from error
    probes = [*probes_of(columns.get(gold) if gold else None), *(Probe(kind=GIVEN, text=text) for text in given)]
    return ProbedRow(row=row, place=rows.place(row), content=content, columns=columns, probes=tuple(probes))


def _read_completions(path: Path, rows: int, count: int) -> dict[int, list[str]]:
    """Row → its completions, for the first `count` rows that have some."""
    problems = Problems()
    section = DataSection(dataset_name=str(path), prompt_column=COMPLETION)
    table = read_split(section, section.dataset_train_split, problems, limit=None)
    problems.raise_if_any()
    if COMPLETION not in table.columns:
        raise DataError(f"{path}: no column `{COMPLETION}`; it has: {name_columns(table.columns)}. One completion a row is wanted.")
    texts = table.column(COMPLETION)
    row_column = next((name for name in ROW_COLUMNS if name in table.columns), None)
    numbers = table.column(row_column) if row_column else range(len(texts))
    found: dict[int, list[str]] = {}
    for index, (number, text) in enumerate(zip(numbers, texts, strict=True)):
        if not isinstance(text, str):
            raise DataError(f"{table.place(index)}: `{COMPLETION}` is no text.")
        if not isinstance(number, int) or not 0 <= number < rows:
            raise DataError(
                f"{table.place(index)}: belongs to row {number} of the data, which has {rows} rows. Completions belong to the rows in order, "
                f"or to the row that a column `{ROW_COLUMNS[0]}` names, from 0."
            )
        if number in found or len(found) < count:
            found.setdefault(number, []).append(text)
    return found
