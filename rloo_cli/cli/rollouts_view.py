"""Steps and groups as tables and text for a terminal."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rloo_cli.cli.page import ABSENT, fitting_tables, number, row_number, share, sign_style, signed, text_block
from rloo_cli.inspect.rollout_files import RolloutFile
from rloo_cli.inspect.series import sparkline
from rloo_cli.inspect.step_summary import StepSummary
from rloo_cli.inspect.stored import StoredCompletion, StoredGroup
from rloo_cli.inspect.token_text import TokenText
from rloo_cli.run.visible import on_one_line, visible

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

SPARKS = 40
"""Bars of a line."""
LEAST_SPARKS = 3


# --- ls and stats ----------------------------------------------------------------------------------------------------------------


def list_rows(summaries: Sequence[StepSummary]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of `rollouts ls`."""
    header = ["step", "prompts", "completions", "reward", "tokens", "ended"]
    rows = [
        [s.label, str(s.groups), str(s.completions), number(s.reward.mean), number(s.lengths.mean, ".1f"), _ended(s)] for s in summaries
    ]
    return header, rows


STATS_HEADER = ("step", "reward", "std", "in group", "tokens", "min", "max", "cut off", "no signal")


def stats_rows(summaries: Sequence[StepSummary]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of `rollouts stats`; a column a reward function at the end."""
    functions = list(dict.fromkeys(name for summary in summaries for name in summary.rewards))
    header = [*STATS_HEADER, *map(visible, functions)]
    rows = []
    for s in summaries:
        lengths = [number(s.lengths.mean, ".1f"), number(s.lengths.least, ".0f"), number(s.lengths.most, ".0f")]
        by_function = [number(s.rewards[name].mean) if name in s.rewards else ABSENT for name in functions]
        rows.append(
            [
                s.label,
                number(s.reward.mean),
                number(s.reward.std),
                number(s.reward_std),
                *lengths,
                share(_share_of(s, "truncated")),
                share(s.no_signal),
                *by_function,
            ]
        )
    return header, rows


def row_styles(summaries: Sequence[StepSummary]) -> list[str]:
    """What tells evaluations and failed batches from training steps."""
    return [{"eval": "cyan", "failed": "red"}.get(summary.kind, "") for summary in summaries]


def course(summaries: Sequence[StepSummary]) -> str | None:
    """The way of the training reward as one line; None for a few steps."""
    rewards = [s.reward.mean for s in summaries if s.kind == "train" and s.reward.mean is not None]
    if len(rewards) < LEAST_SPARKS:
        return None
    return f"reward  {number(rewards[0])} {sparkline(rewards, SPARKS)} {number(rewards[-1])}"


def without_repetition(header: list[str], rows: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """The table of `stats` without the column of a lone function that is the reward itself."""
    reward = header.index("reward")
    if len(header) == len(STATS_HEADER) + 1 and all(row[-1] == row[reward] for row in rows):
        return header[:-1], [row[:-1] for row in rows]
    return header, rows


def _share_of(summary: StepSummary, reason: str) -> float | None:
    known = sum(summary.finish_reasons.values())
    return summary.finish_reasons.get(reason, 0) / known if known else None


def _ended(summary: StepSummary) -> str:
    ranked = sorted(summary.finish_reasons.items(), key=lambda item: (-item[1], item[0]))
    parts = [f"{count / summary.completions:.0%} {visible(reason)}" for reason, count in ranked]
    unknown = summary.completions - sum(summary.finish_reasons.values())
    return ", ".join([*parts, *([f"{unknown} unknown"] if unknown else [])]) or ABSENT


# --- show ------------------------------------------------------------------------------------------------------------------------


def group_parts(
    console: Console, group: StoredGroup, file: RolloutFile, total: int, *, tokens: TokenText | None, full: bool, fault: int | None = None
) -> Iterator[RenderableType]:
    """A group: its prompt, a table of its completions, and their texts. `fault`: the row of the file at which the run stopped."""
    from rich.rule import Rule
    from rich.text import Text

    title = f"step {file.label} · prompt row {row_number(group.prompt_row)} · group {group.index + 1} of {total}"
    yield Rule(Text(title, style="bold"), align="left", style="dim")
    yield from _prompt_parts(console, group, with_special=tokens is not None, full=full)
    yield from _image_lines(group)
    yield Text()
    yield from _completion_tables(console, group)
    for position, completion in enumerate(group.completions):
        yield Text()
        yield _completion_head(position, completion, is_fault=fault == group.first_row + position)
        text = tokens.decode(completion.token_ids) if tokens is not None and completion.token_ids is not None else completion.text
        yield text_block(console, text, style=sign_style(completion.advantage), full=full, special=tokens is not None)
        if completion.extras:
            yield _extras(completion.extras)
    yield Text()


def _prompt_parts(console: Console, group: StoredGroup, *, with_special: bool, full: bool) -> Iterator[RenderableType]:
    from rich.text import Text

    if with_special or group.prompt is None or isinstance(group.prompt, str):
        text = group.prompt if isinstance(group.prompt, str) and not with_special else group.prompt_text
        yield Text("prompt", style="bold")
        yield text_block(console, text, full=full, special=with_special)
        return
    for message in group.prompt:
        yield Text(visible(str(message.get("role", "?"))), style="bold")
        content = message.get("content")
        yield text_block(console, _content_text(content), full=full)


def _content_text(content: Any) -> str | None:
    """A message's content; parts one behind the other, an image as the word."""
    if isinstance(content, str | None):
        return content
    parts = content if isinstance(content, list) and all(isinstance(part, Mapping) for part in content) else None
    return str(content) if parts is None else "".join(str(part["text"]) if "text" in part else f"[{part.get('type')}]" for part in parts)


def _image_lines(group: StoredGroup) -> Iterator[RenderableType]:
    """A line an image: where it came from, how large it is, and the hash by which it is the same in two files."""
    from rich.text import Text

    for number_of_image, image in enumerate(group.images, start=1):
        digest = hashlib.sha256(image.data).hexdigest()[:12]
        name = f"{visible(image.name)}, " if image.name else ""
        yield Text(f"image {number_of_image}  {name}{len(image.data):,} bytes, sha256 {digest}", style="cyan")


def _completion_tables(console: Console, group: StoredGroup) -> Iterator[RenderableType]:
    from rich.text import Text

    functions = list(dict.fromkeys(name for completion in group.completions for name in completion.rewards))
    with_kl = any(completion.kl is not None for completion in group.completions)
    header = ["#", "reward", "advantage", *(["KL"] if with_kl else []), "tokens", "ended"]
    rows: list[list[str | Text]] = []
    for position, completion in enumerate(group.completions):
        cells: list[str | Text] = [str(position + 1), number(completion.reward)]
        cells += [Text(signed(completion.advantage), style=sign_style(completion.advantage))]
        cells += [number(completion.kl)] if with_kl else []
        cells += [number(completion.tokens, "d"), visible(completion.finish_reason or ABSENT)]
        rows.append([*cells, *(number(completion.rewards.get(name)) for name in functions)])
    yield from fitting_tables(console, [*header, *map(visible, functions)], rows, left=["ended"], own=len(header))


def _completion_head(position: int, completion: StoredCompletion, *, is_fault: bool) -> Text:
    from rich.text import Text

    head = Text(f"#{position + 1}", style="bold").append(f"  reward {number(completion.reward)}", style="not bold")
    if completion.advantage is not None:
        head.append(f"  advantage {signed(completion.advantage)}", style=f"not bold {sign_style(completion.advantage)}")
    if completion.finish_reason not in (None, "stopped"):
        head.append(f"  {visible(completion.finish_reason or '')}", style="not bold yellow")
    if is_fault:
        head.append("  the run stopped at this one", style="not bold red")
    return head


def _extras(extras: Mapping[str, Any]) -> RenderableType:
    from rich.padding import Padding
    from rich.text import Text

    words = [f"{visible(name)}: {on_one_line(str(value), 100)}" for name, value in extras.items() if value is not None]
    return Padding(Text("   ".join(words), style="dim"), (0, 0, 0, 4))
