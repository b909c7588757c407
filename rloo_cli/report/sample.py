"""A sample of a run's rollouts for the page: some steps, some groups of each, long texts cut. The parquet files stay the record."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rloo_cli.errors import RefusedError, StorageError
from rloo_cli.inspect.rollout_files import RolloutFile, RolloutKind
from rloo_cli.inspect.stored import REWARDS, group_bounds, read_table
from rloo_cli.inspect.thumbnails import Thumbnail, make_thumbnail
from rloo_cli.inspect.token_text import TokenText, tokenizer_of_run
from rloo_cli.report.run_view import RunView
from rloo_cli.run.visible import visible

MOST_FILES = {RolloutKind.TRAIN: 24, RolloutKind.EVAL: 8, RolloutKind.FAILED: 1}
"""Steps that are sampled, spread evenly, the first and the last among them."""
MOST_GROUPS = 12
"""Of a step, spread evenly from the worst to the best mean reward."""
MOST_COMPLETIONS = 32
"""Of a group."""
MOST_CHARACTERS, FEWEST_CHARACTERS = 12_000, 400
"""Of a text, as far as the budget goes; of longer ones beginning and end are kept."""
BUDGET = 6_000_000
"""Characters of all texts of all runs together."""
IMAGE_BUDGET = 2_000_000
"""Characters of all images of all runs together."""
MOST_IMAGES = 4
"""Of a prompt."""
COLUMNS = ("prompt_row", "prompt_text", "images", "completion", "finish_reason", "reward", "advantage", REWARDS)
"""The start of the names of what is read; `completion` brings the token ids."""

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What the page shows of a run's rollouts."""

    steps: tuple[Json, ...]
    """`{"label": "12", "kind": "train", "groups": […], "of": 16}`; keys of groups and completions: `_group`, `_completion`."""
    special_tokens: tuple[str, ...]
    """As they stand in the texts; empty where no tokenizer is at hand."""
    gaps: tuple[str, ...]
    """Sentences about files that cannot be read."""


class Album:
    """Small copies of the images of rollouts, each made once, whatever budget it is asked for under."""

    def __init__(self) -> None:
        self._made: dict[bytes, Thumbnail | None] = {}

    def copy_of(self, data: bytes) -> Thumbnail | None:
        """None where the bytes are no image."""
        name = hashlib.sha256(data).digest()
        if name not in self._made:
            self._made[name] = make_thumbnail(data)
        return self._made[name]


def sample_rollouts(view: RunView, *, budget: int = BUDGET, image_budget: int = IMAGE_BUDGET, album: Album | None = None) -> Sample:
    """Groups of a run's rollout files; where the budget of characters would be passed, fewer of each step, or fewer with their images."""
    tokens, album = _tokens(view), album or Album()
    steps, gaps = [], []
    files = _chosen_files(view.files)
    for file in files:
        try:
            step, images = _step(file, tokens, budget // len(files))
            _add_images(images, album, image_budget // len(files))
            steps.append(step)
        except (StorageError, RefusedError) as error:
            gaps.append(visible(error.message))
    return Sample(steps=tuple(steps), special_tokens=_special(tokens), gaps=tuple(gaps))


def _special(tokens: TokenText | None) -> tuple[str, ...]:
    """Longest first, as a search for any of them needs it."""
    return tuple(sorted(map(visible, tokens.special_tokens()), key=len, reverse=True)) if tokens is not None else ()


def spread_evenly(count: int, most: int) -> list[int]:
    """At most `most` of the numbers below `count`, the first and the last among them.

    >>> spread_evenly(10, 4), spread_evenly(3, 4), spread_evenly(5, 1)
    ([0, 3, 6, 9], [0, 1, 2], [4])
    """
    if most == 1 and count:
        return [count - 1]
    return list(range(count)) if count <= most else [round(i * (count - 1) / (most - 1)) for i in range(most)]


def _chosen_files(files: Sequence[RolloutFile]) -> list[RolloutFile]:
    chosen = set()
    for kind, most in MOST_FILES.items():
        of_kind = [file for file in files if file.kind is kind]
        chosen |= {of_kind[i].path for i in spread_evenly(len(of_kind), most)}
    return [file for file in files if file.path in chosen]


def _tokens(view: RunView) -> TokenText | None:
    try:
        return tokenizer_of_run(view.folder)
    except RefusedError:
        return None


def _step(file: RolloutFile, tokens: TokenText | None, budget: int) -> tuple[Json, list[tuple[Json, list[bytes]]]]:
    """The step, and its groups that have images with the bytes of those, the ends of the ranking first."""
    table = read_table(file, COLUMNS)
    bounds = group_bounds(table.column("prompt_row").to_pylist(), file)
    rewards = table.column("reward").to_pylist() if "reward" in table.column_names else [None] * table.num_rows
    ranked = sorted(bounds, key=lambda bound: _mean(rewards[bound[0] : bound[1]]))
    wanted = [ranked[i] for i in spread_evenly(len(ranked), MOST_GROUPS)]
    groups: list[Json] = []
    images: list[tuple[Json, list[bytes]]] = []
    limit = max(FEWEST_CHARACTERS, min(MOST_CHARACTERS, budget // (MOST_COMPLETIONS + 1)))
    for start, end in _worst_best_first(wanted):
        rows = table.slice(start, min(end - start, MOST_COMPLETIONS)).to_pylist()
        group = _group(rows, bounds.index((start, end)), end - start, tokens, limit)
        budget -= _size(group)
        if budget < 0 and groups:
            break
        groups.append(group)
        if cells := rows[0].get("images"):
            images.append((group, [(cell or {}).get("bytes") or b"" for cell in cells]))
    step = {"label": file.label, "kind": str(file.kind), "of": len(bounds), "groups": sorted(groups, key=lambda group: group["i"])}
    return step, images


def _add_images(images: Sequence[tuple[Json, list[bytes]]], album: Album, budget: int) -> None:
    """Give groups their images: `im`, address, width and height of each that is shown; `ni`: how many there are."""
    for group, files in images:
        group |= {"im": [], "ni": len(files)}
        for data in files[:MOST_IMAGES]:
            copy = album.copy_of(data) if budget > 0 else None
            if copy is not None and len(copy.uri) <= budget:
                budget -= len(copy.uri)
                group["im"].append([copy.uri, copy.width, copy.height])


def _worst_best_first(ranked: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The ends of the ranking before its middle, so that a small budget leaves those."""
    order = sorted(range(len(ranked)), key=lambda i: min(i, len(ranked) - 1 - i))
    return [ranked[i] for i in order]


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return sum(known) / len(known) if known else 0.0


def _group(rows: Sequence[Mapping[str, Any]], index: int, size: int, tokens: TokenText | None, limit: int) -> Json:
    """`i`: place in the step; `row`: of the prompt; `p`: prompt; `c`: completions; `size`: how many there are, shown or not."""
    first = rows[0]
    return {
        "i": index,
        "row": first["prompt_row"],
        "p": shown_text(first.get("prompt_text"), limit),
        "c": [_completion(row, tokens, limit) for row in rows],
        "size": size,
    }


def _completion(row: Mapping[str, Any], tokens: TokenText | None, limit: int) -> Json:
    """`t`: text with special tokens; `n`: tokens; `r`: reward; `a`: advantage; `f`: how it ended; `rs`: reward by function."""
    ids = row.get("completion_ids")
    text = tokens.decode(ids) if tokens is not None and ids is not None else row["completion"]
    return {
        "t": shown_text(text, limit),
        "n": None if ids is None else len(ids),
        "r": rounded(row.get("reward")),
        "a": rounded(row.get("advantage")),
        "f": row.get("finish_reason"),
        "rs": {visible(name.removeprefix(REWARDS)): rounded(value) for name, value in row.items() if name.startswith(REWARDS)},
    }


def shown_text(text: str | None, limit: int) -> str | None:
    """The text made harmless, and cut where it is longer than the limit."""
    if text is None:
        return None
    if len(text) > limit:
        half = limit // 2
        text = f"{text[:half]}\n[… {len(text) - 2 * half:,} characters left out …]\n{text[-half:]}"
    return visible(text)


def rounded(value: float | None) -> float | None:
    """Six significant digits, which is more than the page shows; None where there is no finite number, which JSON could not hold."""
    return float(f"{value:.6g}") if value is not None and abs(value) < float("inf") else None


def _size(group: Json) -> int:
    return len(group["p"] or "") + sum(len(completion["t"] or "") for completion in group["c"])
