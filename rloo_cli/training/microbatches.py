"""Rows cut into micro-batches, and micro-batches turned into tensors.

A micro-batch holds whole groups as far as the token budget and the row cap allow. `L` counts the tokens that go through
the model (padding included in the plain layout), `N` the completion tokens whose log-probs come out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from rloo_cli.rollout.visual import Placed, visual_arguments
from rloo_cli.training.packed import build_layout
from rloo_cli.types import VisualInputs

Layout = Literal["packed", "plain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRows:
    """The rows of one group that go through the model together.

    Example: `GroupRows(group=2, prompt_ids=(5, 9), rows=(16, 17), completion_ids=((7, 2), (8, 8, 2)))`
    """

    group: int
    """Index of the group within the generation batch."""
    prompt_ids: tuple[int, ...]
    rows: tuple[int, ...]
    """Row numbers within the generation batch."""
    completion_ids: tuple[tuple[int, ...], ...]
    visual: VisualInputs | None = None
    """The prompt's images."""

    @property
    def tokens(self) -> int:
        """Tokens of the group in the packed layout."""
        return len(self.prompt_ids) + sum(len(ids) - 1 for ids in self.completion_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class VisualBatch:
    """The images of a micro-batch."""

    arguments: dict[str, torch.Tensor]
    """Of the model's forward pass, on the CPU."""
    literal_L: torch.Tensor
    """Flat positions in `input_ids` of the completions' tokens, none of which is an image's placeholder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringBatch:
    """One micro-batch as tensors."""

    input_ids: torch.Tensor
    """[1, L] packed, [B, S] plain (padded on the right)."""
    position_ids: torch.Tensor
    """Same shape."""
    model_kwargs: dict[str, Any]
    """`packed_layout`, or `attention_mask` [B, S]."""
    predict_N: torch.Tensor
    """Index into the flattened hidden states of the position that predicts each completion token."""
    target_N: torch.Tensor
    """The completion tokens."""
    row_N: torch.Tensor
    """Which of the micro-batch's rows each token belongs to, 0 … B−1."""
    rows: tuple[int, ...]
    """Row numbers within the generation batch, length B."""
    visual: VisualBatch | None = None
    """None where no row has images."""


def cut_into_micro_batches(groups: Sequence[GroupRows], *, max_tokens: int, max_rows: int | None) -> list[list[GroupRows]]:
    """Micro-batches of whole groups, similar lengths together; a group that alone is too large is cut by rows."""
    pieces = [piece for group in groups for piece in _cut_group(group, max_tokens, max_rows)]
    pieces.sort(key=lambda piece: (-max(len(ids) for ids in piece.completion_ids), piece.group))
    batches: list[list[GroupRows]] = []
    tokens = rows = 0
    for piece in pieces:
        fits = batches and tokens + piece.tokens <= max_tokens and (max_rows is None or rows + len(piece.rows) <= max_rows)
        if not fits:
            batches.append([])
            tokens = rows = 0
        batches[-1].append(piece)
        tokens, rows = tokens + piece.tokens, rows + len(piece.rows)
    return batches


def share_rows(groups: Sequence[GroupRows], shares: int) -> list[list[GroupRows]]:
    """The rows of an optimizer step dealt out: whole groups, the longest first to whoever has least; cut where there are fewer groups than shares."""
    if shares == 1:
        return [list(groups)]
    if len(groups) < shares:
        groups = [_select(group, part) for group in groups for part in _parts(len(group.rows), -(-shares // max(len(groups), 1)))]
    loads = [0] * shares
    dealt: list[list[GroupRows]] = [[] for _ in range(shares)]
    for group in sorted(groups, key=lambda group: (-group.tokens, group.rows)):
        least = loads.index(min(loads))
        loads[least] += group.tokens
        dealt[least].append(group)
    return [sorted(share, key=lambda group: group.rows) for share in dealt]


def _parts(count: int, parts: int) -> list[range]:
    """`count` things in order in at most `parts` parts of nearly the same size, none empty."""
    cuts = [range(count * i // parts, count * (i + 1) // parts) for i in range(parts)]
    return [cut for cut in cuts if len(cut)]


def cuts_a_group(micro_batches: Sequence[Sequence[GroupRows]]) -> bool:
    """Whether some group's rows lie in more than one micro-batch."""
    groups = [piece.group for batch in micro_batches for piece in batch]
    return len(groups) != len(set(groups))


def _cut_group(group: GroupRows, max_tokens: int, max_rows: int | None) -> list[GroupRows]:
    if group.tokens <= max_tokens and (max_rows is None or len(group.rows) <= max_rows):
        return [group]
    pieces: list[list[int]] = []
    tokens = 0
    for i, ids in enumerate(group.completion_ids):
        cost = len(ids) - 1
        if not pieces or tokens + cost > max_tokens or (max_rows is not None and len(pieces[-1]) >= max_rows):
            pieces.append([])
            tokens = len(group.prompt_ids)
        pieces[-1].append(i)
        tokens += cost
    return [_select(group, piece) for piece in pieces]


def _select(group: GroupRows, indices: Sequence[int]) -> GroupRows:
    return replace(group, rows=tuple(group.rows[i] for i in indices), completion_ids=tuple(group.completion_ids[i] for i in indices))


def build_scoring_batch(pieces: Sequence[GroupRows], layout: Layout, device: torch.device) -> ScoringBatch:
    """The tensors of one micro-batch. The last token of a completion predicts nothing and is left out of the input."""
    return _packed(pieces, device) if layout == "packed" else _plain(pieces, device)


def _packed(pieces: Sequence[GroupRows], device: torch.device) -> ScoringBatch:
    ids: list[int] = []
    positions: list[int] = []
    predict: list[int] = []
    placed: list[Placed] = []
    for piece in pieces:
        if piece.visual is not None:
            placed.append((piece.visual, 0, len(ids)))
        prompt_end = len(ids) + len(piece.prompt_ids) - 1
        ids.extend(piece.prompt_ids)
        positions.extend(range(len(piece.prompt_ids)))
        for completion in piece.completion_ids:
            predict.append(prompt_end)
            predict.extend(range(len(ids), len(ids) + len(completion) - 1))
            ids.extend(completion[:-1])
            positions.extend(range(len(piece.prompt_ids), len(piece.prompt_ids) + len(completion) - 1))
    layout = build_layout([len(p.prompt_ids) for p in pieces], [[len(c) - 1 for c in p.completion_ids] for p in pieces], device)
    return ScoringBatch(
        input_ids=torch.tensor([ids], device=device),
        position_ids=torch.tensor([positions], device=device),
        model_kwargs={"packed_layout": layout},
        predict_N=torch.tensor(predict, device=device),
        visual=_visual(placed, (1, len(ids)), _literal_packed(pieces), device) if placed else None,
        **_targets(pieces, device),
    )


def _plain(pieces: Sequence[GroupRows], device: torch.device) -> ScoringBatch:
    sequences = [(piece.prompt_ids, ids) for piece in pieces for ids in piece.completion_ids]
    visuals = [piece.visual for piece in pieces for _ in piece.completion_ids]
    placed = [(visual, b, 0) for b, visual in enumerate(visuals) if visual is not None]
    width = max(len(prompt) + len(ids) - 1 for prompt, ids in sequences)
    input_ids = torch.zeros(len(sequences), width, dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    predict: list[int] = []
    for b, (prompt, ids) in enumerate(sequences):
        length = len(prompt) + len(ids) - 1
        input_ids[b, :length] = torch.tensor(prompt + ids[:-1])
        attention_mask[b, :length] = 1
        predict.extend(range(b * width + len(prompt) - 1, b * width + length))
    return ScoringBatch(
        input_ids=input_ids.to(device),
        position_ids=torch.arange(width, device=device).expand_as(input_ids),
        model_kwargs={"attention_mask": attention_mask.to(device)},
        predict_N=torch.tensor(predict, device=device),
        visual=_visual(placed, (len(sequences), width), _literal_plain(sequences, width), device) if placed else None,
        **_targets(pieces, device),
    )


def _visual(placed: Sequence[Placed], shape: tuple[int, int], literal: Sequence[int], device: torch.device) -> VisualBatch:
    return VisualBatch(arguments=visual_arguments(placed, shape), literal_L=torch.tensor(literal, dtype=torch.long, device=device))


def _literal_packed(pieces: Sequence[GroupRows]) -> list[int]:
    """Where completions lie in the packed sequence."""
    found: list[int] = []
    start = 0
    for piece in pieces:
        end = start + piece.tokens
        found.extend(range(start + len(piece.prompt_ids), end))
        start = end
    return found


def _literal_plain(sequences: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], width: int) -> list[int]:
    """Where completions lie in the flattened rows."""
    return [
        position
        for b, (prompt, ids) in enumerate(sequences)
        for position in range(b * width + len(prompt), b * width + len(prompt) + len(ids) - 1)
    ]


def _targets(pieces: Sequence[GroupRows], device: torch.device) -> dict[str, Any]:
    completions = [ids for piece in pieces for ids in piece.completion_ids]
    lengths = torch.tensor([len(ids) for ids in completions], device=device)
    return {
        "target_N": torch.tensor([token for ids in completions for token in ids], device=device),
        "row_N": torch.arange(len(completions), device=device).repeat_interleave(lengths),
        "rows": tuple(row for piece in pieces for row in piece.rows),
    }
