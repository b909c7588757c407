"""What a reward function does with completions whose worth is known, and what looks wrong in it."""

from __future__ import annotations

import difflib
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rloo_cli.errors import DataError, RewardError
from rloo_cli.inspect.probes import BOXED, EMPTY, GOLD, JUNK, THOUGHT, Probe, ProbeData, ProbedRow
from rloo_cli.inspect.reward_calls import failed_items, made_up_group, reward_workers
from rloo_cli.recipe.schema import RewardEntry
from rloo_cli.rewards.models import OpenModel
from rloo_cli.rewards.resolve import RewardSource
from rloo_cli.rewards.runner import RewardRunner
from rloo_cli.types import GroupRewards, TrainerState

SLOW_SECONDS = 0.1
"""An item above this is told of: 128 completions a step cost a worker 13 s."""
COMPLETIONS_A_STEP = 128
MOST_OUTPUT = 4000
"""Characters of what a function printed."""

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedRow:
    """A row with the rewards of its probes."""

    probed: ProbedRow
    values: tuple[float | None, ...]
    """One a probe; None = does not apply, or failed."""
    failures: Mapping[int, str]
    """Position of the probe → why it failed."""
    extras: Mapping[str, Sequence[Any]]
    seconds_an_item: float

    def values_of(self, *kinds: str) -> list[float]:
        """The rewards that probes of these kinds got."""
        pairs = zip(self.probed.probes, self.values, strict=True)
        return [value for probe, value in pairs if probe.kind in kinds and value is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedReward:
    """What was found out about one function."""

    name: str
    source: RewardSource
    kwargs: Mapping[str, Any]
    arguments: tuple[tuple[str, str], ...]
    """Parameter → what fills it."""
    unused: tuple[str, ...]
    """Columns that it does not get."""
    rows: tuple[TriedRow, ...]
    metrics: Mapping[str, float]
    notices: tuple[str, ...]
    """What its own `check_rows` said."""
    warnings: tuple[str, ...]
    refusal: str | None
    """Why its own `check_rows` refuses the data."""
    output: str
    """What it printed."""

    @property
    def failures(self) -> list[str]:
        """A line for each completion on which it failed."""
        return [
            f"{row.probed.place}, {row.probed.probes[position].kind}: {reason}"
            for row in self.rows
            for position, reason in row.failures.items()
        ]

    @property
    def seconds(self) -> float | None:
        """What a completion takes; None where nothing was answered."""
        return _typical_seconds(self.rows)


def check_reward(
    entry: RewardEntry, data: ProbeData, *, code_dir: Path, encode: Encode, open_model: OpenModel | None = None
) -> CheckedReward:
    """The function or model, tried on every row of `data` as training would, a function in a worker; a row that takes too long is the last.

    `encode` turns a text into the token ids that the function sees; `open_model` opens reward models.

    Raises:
        RecipeError: there is no such function, it cannot be imported, or an argument is missing.
    """
    with tempfile.TemporaryDirectory(prefix="rloo-check-") as folder:
        with reward_workers(entry, code_dir=code_dir, log_dir=Path(folder), open_model=open_model) as runner:
            notices, refusal = _check_rows(runner, data)
            tried: list[TriedRow] = []
            metrics: dict[str, list[float]] = {}
            for row in data.rows:
                started = time.monotonic()
                tried.append(_try_row(runner, row, encode, metrics))
                if tried[-1].failures and time.monotonic() - started > entry.timeout:
                    break
            name, source = runner.names[0], runner.sources[0]
        output = _output(Path(folder))
    arguments, unused = _arguments(source, entry.kwargs, list(data.columns))
    return CheckedReward(
        name=name,
        source=source,
        kwargs=entry.kwargs,
        arguments=arguments,
        unused=unused,
        rows=tuple(tried),
        metrics={key: math.fsum(values) / len(values) for key, values in metrics.items()},
        notices=notices,
        warnings=(*_kwargs_warnings(source, entry.kwargs), *warnings_about(tried, len(data.rows), has_gold=data.gold_column is not None)),
        refusal=refusal,
        output=output,
    )


def warnings_about(rows: Sequence[TriedRow], wanted: int, *, has_gold: bool) -> list[str]:
    """What looks wrong in these rewards, a line each."""
    values = [value for row in rows for value in row.values if value is not None]
    failed = sum(len(row.failures) for row in rows)
    found = []
    if failed:
        found.append(
            f"fails on {failed} of {sum(len(row.values) for row in rows)} completions: a run would stop at the first (exit code 4)"
        )
    if len(rows) < wanted:
        found.append(f"tried on {len(rows)} of {wanted} rows only: the last one took too long")
    if not values and not failed:
        found.append("None for every completion: nothing would ever be scored")
    elif len(values) > 1 and len(set(values)) == 1:
        found.append(
            f"constant: every one of these completions gets {values[0]:g}, and equal rewards teach nothing; try your own by --completions"
        )
    else:
        found += _order_warnings(rows, has_gold=has_gold)
    seconds = _typical_seconds(rows) or 0.0
    if seconds > SLOW_SECONDS:
        found.append(
            f"slow: {seconds:.2g} s a completion; {COMPLETIONS_A_STEP} of them are {seconds * COMPLETIONS_A_STEP:.0f} s of a worker"
        )
    return found


def _order_warnings(rows: Sequence[TriedRow], *, has_gold: bool) -> list[str]:
    found = []
    paid = [row for row in rows if (empty := row.values_of(EMPTY)) and _beats_all(max(empty), row)]
    if paid:
        amount = max(max(row.values_of(EMPTY)) for row in paid)
        found.append(
            f"rewards the empty answer: it gets as much as the best other one in {len(paid)} of {len(rows)} rows (up to {amount:g})"
        )
    if has_gold:
        judged = [row for row in rows if row.values_of(GOLD) and row.values_of(JUNK)]
        junk_wins = [row for row in judged if max(row.values_of(JUNK)) >= max(row.values_of(GOLD, BOXED, THOUGHT))]
        if junk_wins:
            found.append(
                f"junk gets as much as the gold answer in {len(junk_wins)} of {len(judged)} rows: does it read the right column, "
                "in the form that completions have?"
            )
        found += _form_warnings(rows)
    return found


def _form_warnings(rows: Sequence[TriedRow]) -> list[str]:
    """A line where gold answers as the data has them are never paid, and the same answers in a box are."""
    judged = [row for row in rows if not row.failures and any(probe.kind == GOLD for probe in row.probed.probes)]
    paid = [row for row in judged if max(row.values_of(BOXED), default=0.0) > max(0.0, *row.values_of(JUNK))]
    if not paid or any(value > 0 for row in judged for value in row.values_of(GOLD)):
        return []
    example = next(probe.text for probe in paid[0].probed.probes if probe.kind == BOXED)
    return [
        f"the bare gold answer is paid nothing, and the same in a box is ({len(paid)} of {len(judged)} rows): it wants {example}; "
        "see that the prompts ask for that form"
    ]


def _typical_seconds(rows: Sequence[TriedRow]) -> float | None:
    """Mean seconds a completion of the rows that were answered; without the first, which pays for imports and caches, where there are more."""
    answered = [row.seconds_an_item for row in rows if len(row.failures) < len(row.values)]
    steady = answered[1:] or answered
    return math.fsum(steady) / len(steady) if steady else None


def _kwargs_warnings(source: RewardSource, kwargs: Mapping[str, Any]) -> list[str]:
    """A line for each argument that only **kwargs takes: most of them are misspelt."""
    strange = [name for name in kwargs if name not in source.parameters] if source.takes_any_keyword else []
    close = {name: difflib.get_close_matches(name, source.parameters, n=1) for name in strange}
    return [
        f"kwargs: it has no parameter `{name}`, so that **kwargs takes it" + (f"; did you mean `{close[name][0]}`?" if close[name] else "")
        for name in strange
    ]


def _beats_all(value: float, row: TriedRow) -> bool:
    """Whether no other probe of the row gets more, and the value is one to strive for."""
    others = [other for probe, other in zip(row.probed.probes, row.values, strict=True) if probe.kind != EMPTY and other is not None]
    return bool(others) and value >= max(others) and value > min([0.0, *others])


def _try_row(runner: RewardRunner, row: ProbedRow, encode: Encode, metrics: dict[str, list[float]]) -> TriedRow:
    texts = [probe.text for probe in row.probes]
    group = made_up_group(row=row.row, content=row.content, columns=row.columns, texts=texts, ids=[tuple(encode(text)) for text in texts])
    runner.submit(row.row, group, TrainerState(step=1, max_steps=1))
    rewards: GroupRewards = runner.collect()[row.row]
    for key, value in rewards.metrics.items():
        metrics.setdefault(key, []).append(value)
    return TriedRow(
        probed=row,
        values=rewards.values[0],
        failures=failed_items(rewards.failures, runner.names[0], row.row),
        extras=rewards.extras,
        seconds_an_item=rewards.seconds / len(texts),
    )


def _check_rows(runner: RewardRunner, data: ProbeData) -> tuple[tuple[str, ...], str | None]:
    """The notices of the function's own check of the data, and why it refuses them."""
    try:
        return runner.check_rows(dict(data.columns)), None
    except (DataError, RewardError) as error:
        return (), error.message


def _arguments(
    source: RewardSource, kwargs: Mapping[str, Any], columns: Sequence[str]
) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    filled = [(name, _filled_by(name, source, kwargs, columns)) for name in source.parameters]
    rest = [name for name in columns if name not in source.parameters]
    if source.takes_any_keyword:
        strange = [f"{name} (kwargs)" for name in kwargs if name not in source.parameters]
        filled.append(("**kwargs", f"everything else; columns: {', '.join([*strange, *rest]) or 'none'}"))
        rest = []
    return tuple(filled), tuple(rest)


def _filled_by(name: str, source: RewardSource, kwargs: Mapping[str, Any], columns: Sequence[str]) -> str:
    offered = {
        "prompts": "the prompts, as the data has them",
        "completions": "the completions",
        "completion_ids": "their token ids",
        "trainer_state": "the step, and how many there are",
        "log_metric": "a function: puts a number into the metrics",
        "log_extra": "a function: puts a column into the rollouts",
    }
    if name in offered:
        return offered[name]
    if name in kwargs:
        return f"{kwargs[name]!r}, from kwargs"
    return f"column `{name}`" if name in columns else "its default"


def _output(folder: Path) -> str:
    """The last of what the function printed."""
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in sorted(folder.glob("reward-worker-*.log"))]
    return "".join(texts)[-MOST_OUTPUT:]


def legend(rows: Sequence[TriedRow]) -> list[Probe]:
    """One probe of each kind, from the first row that has it."""
    found: dict[str, Probe] = {}
    for row in rows:
        for probe in row.probed.probes:
            found.setdefault(probe.kind, probe)
    return list(found.values())
