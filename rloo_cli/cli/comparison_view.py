"""Two steps, or two rewards, held against each other: tables and text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rloo_cli.cli.page import ABSENT, columns, duration, number, row_number, share, sign_style, signed, text_block
from rloo_cli.inspect.comparing import GroupPair, best_completion, mean_length
from rloo_cli.inspect.rescoring import Agreement, Example
from rloo_cli.inspect.stored import StoredCompletion, StoredGroup
from rloo_cli.inspect.words import plural
from rloo_cli.run.visible import on_one_line, visible

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

SIDE_BY_SIDE = 110
"""Columns from which two texts stand beside each other."""
MOST_STEPS = 16
"""Lines of the table of steps after rescoring."""


def diff_parts(
    console: Console, pairs: Sequence[GroupPair], shown: Sequence[GroupPair], names: tuple[str, str], *, full: bool
) -> Iterator[Any]:
    """Two steps: what changed over all, a table of the prompts shown, their texts."""
    from rich.text import Text

    yield Text(f"{names[0]} → {names[1]}: {plural(len(pairs), 'prompt')} in common", style="bold")
    yield Text(f"  reward {_means(pairs)}   {_directions(pairs)}")
    yield Text()
    table = columns(["prompt row", "", "reward", "change", "tokens"], left=[""])
    for pair in shown:
        lengths = f"{number(mean_length(pair.before), '.0f')} → {number(mean_length(pair.after), '.0f')}"
        rewards = f"{number(pair.before.mean_reward)} → {number(pair.after.mean_reward)}"
        words = on_one_line(_prompt_words(pair.before), max(12, console.width - 52))
        table.add_row(row_number(pair.before.prompt_row), words, rewards, Text(signed(pair.change), style=sign_style(pair.change)), lengths)
    yield table
    for pair in shown:
        yield from _pair_parts(console, pair, names, full=full)


def _pair_parts(console: Console, pair: GroupPair, names: tuple[str, str], *, full: bool) -> Iterator[Any]:
    from rich.rule import Rule
    from rich.table import Table
    from rich.text import Text

    yield Text()
    yield Rule(Text(f"prompt row {row_number(pair.before.prompt_row)}", style="bold"), align="left", style="dim")
    yield text_block(console, _prompt_words(pair.before), indent=0, full=full)
    sides = [(name, best_completion(group), len(group.completions)) for name, group in zip(names, (pair.before, pair.after), strict=True)]
    if console.width < SIDE_BY_SIDE:
        for name, completion, count in sides:
            yield _side_head(name, completion, count)
            yield text_block(console, completion.text, style=sign_style(completion.reward), full=full)
        return
    half = new_width(console, (console.width - 2) // 2)
    grid = Table.grid(expand=True, padding=(0, 2, 0, 0))
    grid.add_column(ratio=1)
    grid.add_column(ratio=1)
    grid.add_row(*(_side_head(*side) for side in sides))
    grid.add_row(*(text_block(half, completion.text, style=sign_style(completion.reward), full=full) for _, completion, _ in sides))
    yield grid


def new_width(console: Console, width: int) -> Console:
    """A console like this one, of another width, to break text for."""
    from rich.console import Console

    return Console(width=width, file=console.file, highlight=False)


def _side_head(name: str, completion: StoredCompletion, count: int) -> Text:
    from rich.text import Text

    which = f", best of {count}" if count > 1 else ""
    ended = visible(completion.finish_reason or ABSENT)
    return Text(f"{name}{which}", style="bold").append(
        f"  reward {number(completion.reward)}  {number(completion.tokens, 'd')} tokens  {ended}", style="not bold"
    )


def _prompt_words(group: StoredGroup) -> str:
    """The last message of the prompt, or the prompt itself."""
    if isinstance(group.prompt, str) or group.prompt is None:
        return group.prompt or group.prompt_text or ABSENT
    return str(group.prompt[-1].get("content")) if group.prompt else ABSENT


def _means(pairs: Sequence[GroupPair]) -> str:
    known = [(pair.before.mean_reward, pair.after.mean_reward) for pair in pairs if pair.change is not None]
    if not known:
        return ABSENT
    before, after = (sum(value or 0.0 for value in side) / len(known) for side in zip(*known, strict=True))
    return f"{number(before)} → {number(after)}"


def _directions(pairs: Sequence[GroupPair]) -> str:
    changes = [pair.change for pair in pairs if pair.change is not None]
    better, worse = sum(change > 0 for change in changes), sum(change < 0 for change in changes)
    return f"better {better:,} · same {len(changes) - better - worse:,} · worse {worse:,}"


# --- rescore ---------------------------------------------------------------------------------------------------------------------


def rescore_parts(
    console: Console, total: Agreement, steps: Mapping[str, Agreement], found: Sequence[Example], *, new: str, old: str, full: bool
) -> Iterator[Any]:
    """Old rewards against new ones: in sum, by step, in examples."""
    from rich.text import Text

    yield Text(f"{new} over {plural(total.groups, 'group')}, {plural(total.completions, 'completion')}", style="bold").append(
        f"   {duration(total.seconds_an_item)} a completion", style="not bold dim"
    )
    yield Text()
    table = columns(["", f"old: {old}", f"new: {new}"], left=[""])
    table.add_row("mean reward", number(total.old_mean), number(total.new_mean))
    table.add_row("groups without signal", str(total.old_no_signal), str(total.new_no_signal))
    yield table
    yield Text()
    yield Text(f"correlation          {number(total.correlation)}" + ("  (one side is constant)" if total.correlation is None else ""))
    yield Text(f"pairs ordered alike  {share(total.ordered_alike)}  of those in a group with unequal old rewards")
    yield Text("advantages           " + " · ".join(f"{count:,} {change}" for change, count in total.signs.items()))
    if total.unscored or total.failed:
        yield Text(f"without a reward     {total.unscored} do not apply · {total.failed} failed", style="yellow")
    if len(steps) > 1:
        yield Text()
        yield from _rescore_table(steps)
    for example in found:
        yield Text()
        yield _example_head(example)
        yield text_block(console, example.text, style=sign_style(example.new_advantage), full=full)


def _rescore_table(steps: Mapping[str, Agreement]) -> Iterator[RenderableType]:
    from rich.text import Text

    every = -(-len(steps) // MOST_STEPS)
    table = columns(["step", "old", "new", "correlation", "ordered alike", "flipped", "lost"], left=["step"])
    for label, one in list(steps.items())[::every]:
        signs = (str(one.signs[change]) for change in ("flipped", "lost"))
        table.add_row(label, number(one.old_mean), number(one.new_mean), number(one.correlation), share(one.ordered_alike), *signs)
    yield table
    if every > 1:
        yield Text(f"one step in {every} is shown (--json has all {len(steps)})", style="dim")


def _example_head(example: Example) -> Text:
    from rich.text import Text

    place = f"step {example.label} · prompt row {row_number(example.prompt_row)} · #{example.position + 1}"
    return (
        Text(place, style="bold")
        .append(f"  reward {number(example.old)} → {number(example.new)}  advantage {signed(example.old_advantage)} → ", style="not bold")
        .append(signed(example.new_advantage), style=f"not bold {sign_style(example.new_advantage)}")
    )
