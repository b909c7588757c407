"""Keys and values of a batch of rows that share prompts. Shapes: see shared_attention.py.

Two forms of the same attention, chosen by the bytes that a step would read:

- joint: a row's keys are [its prompt | its completion] in one buffer, and attention is one fused call;
- shared: the queries of a whole group meet the ONE copy of the prompt, each row then meets its own completion, and the
  two are joined by their log-sum-exps (Juravsky et al. 2024, "Hydragen", arXiv 2402.05099).

Prompts are right-aligned in S, so that a sliding window is the same slice for every row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from rloo_cli.rollout.shared_attention import DecodeUnsupportedError, attend_with_lse, causal_attention, join

HIDDEN = -1e30
"""Added to the score of padding: as good as −inf, without NaN where a slice holds nothing else."""
SHARE_ABOVE_BYTES = 2 << 20
"""Bytes that a layer's step must read less for sharing to pay: the join costs about as much as reading these."""
TOKENS_AHEAD = 64
"""Completion buffers start with so many tokens and double: the longest completion may be far off."""


@dataclass(frozen=True, slots=True)
class Run:
    """Prompts of equal length that stand side by side in a packed prefill."""

    first: int
    """Index of the first of these prompts."""
    count: int
    start: int
    """Packed token where they start."""
    length: int


@dataclass(slots=True)
class LayerKV:
    """One layer's keys and values."""

    prompt_k_PKSD: torch.Tensor
    prompt_v_PKSD: torch.Tensor
    k_nKTD: torch.Tensor
    """The rows' own; in the joint form preceded by their prompt. Longer along T than what is filled."""
    v_nKTD: torch.Tensor


class KVCache:
    """Written and read by the attention function, layer by layer: first prompts (`runs` says which), then rows."""

    def __init__(self, prompt_lengths: Sequence[int], prompt_of_row: Sequence[int], *, longest: int) -> None:
        """`longest`: most completion tokens that a row may be given."""
        self.prompt_lengths, self.prompt_of_row = list(prompt_lengths), np.asarray(prompt_of_row)
        self.longest, self.width = longest, max(prompt_lengths)
        self.layers: dict[int, LayerKV] = {}
        self.runs: list[Run] = []
        self.prefilling = True
        self.shared = False
        self.start = self.width  # column of a row's first completion token
        self.filled = -1  # completion tokens in the buffers before the current step
        self.capacity = 0
        self.hidden_mask: torch.Tensor | None = None  # additive, [P or n, 1, 1, ·]; None where no prompt is padded
        self.slots = 0
        self.row_of_slot: torch.Tensor | None = None  # None: rows stand in slot order
        self.slot_of_row: torch.Tensor | None = None

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None, scaling: float | None
    ) -> torch.Tensor:
        """Store the layer's keys and values, return the output [·, ·, H, D]; packed prompts or one token a row."""
        if self.prefilling:
            return self._attend_prefill(layer, query, key, value, window, scaling)
        return self._attend_rows(self.layers[layer], query, key, value, window, scaling)

    def start_rows(self) -> None:
        """Turn prompts into rows: choose the form, give every row its buffer.

        Raises:
            DecodeUnsupportedError: no layer used the cache.
        """
        if not self.layers:
            raise DecodeUnsupportedError("its attention does not go through transformers' AttentionInterface")
        self.prefilling = False
        rows, prompts = len(self.prompt_of_row), len(self.prompt_lengths)
        some = next(iter(self.layers.values())).prompt_k_PKSD
        saved = max((rows - prompts) * (kv.prompt_k_PKSD[0].nbytes + kv.prompt_v_PKSD[0].nbytes) for kv in self.layers.values())
        self.shared = saved > SHARE_ABOVE_BYTES
        self.hidden_mask = self._padding(some)
        if self.shared:
            self.start = 0
            self._assign_slots(some.device)
        else:
            index = torch.from_numpy(self.prompt_of_row).to(some.device)
            self.hidden_mask = None if self.hidden_mask is None else self.hidden_mask[index]
            for kv in self.layers.values():
                kv.k_nKTD, kv.v_nKTD = kv.prompt_k_PKSD[index], kv.prompt_v_PKSD[index]
                kv.prompt_k_PKSD = kv.prompt_v_PKSD = some.new_empty(0)

    def next_token(self) -> None:
        """Make room for one more token a row; call before each decode step."""
        self.filled += 1
        if self.filled < self.capacity:
            return
        self.capacity = min(self.longest, max(TOKENS_AHEAD, 2 * self.capacity))
        for kv in self.layers.values():
            kv.k_nKTD, kv.v_nKTD = self._grown(kv.k_nKTD), self._grown(kv.v_nKTD)
        if self.hidden_mask is not None and not self.shared:
            self.hidden_mask = F.pad(self.hidden_mask, (0, self.start + self.capacity - self.hidden_mask.shape[-1]))

    def reorder(self, order_n: np.ndarray) -> None:
        """Keep the rows at `order_n`, in that order; only rows that change place are copied."""
        device = next(iter(self.layers.values())).k_nKTD.device
        holes = np.flatnonzero(order_n != np.arange(len(order_n)))
        to, source = torch.from_numpy(holes).to(device), torch.from_numpy(order_n[holes]).to(device)
        used = self.start + self.filled + 1
        for kv in self.layers.values():
            for buffer_nKTD in (kv.k_nKTD, kv.v_nKTD):
                if len(holes):
                    filled_nKTD = buffer_nKTD[:, :, :used]
                    filled_nKTD[to] = filled_nKTD[source]
            kv.k_nKTD, kv.v_nKTD = kv.k_nKTD[: len(order_n)], kv.v_nKTD[: len(order_n)]
        self.prompt_of_row = self.prompt_of_row[order_n]
        if self.shared:
            self._forget_prompts(device)
            self._assign_slots(device)
        elif self.hidden_mask is not None:
            self.hidden_mask = self.hidden_mask[torch.from_numpy(order_n).to(device)]

    # ---- attention

    def _attend_prefill(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None, scaling: float | None
    ) -> torch.Tensor:
        """Output [1, N, H, D] of the packed prompts in `runs`, each against itself."""
        kv = self.layers.get(layer) or self._new_layer(layer, key, value)
        outputs = []
        for run in self.runs:
            q, k, v = (_unpack(tensor, run) for tensor in (query, key, value))
            rows, columns = slice(run.first, run.first + run.count), slice(self.width - run.length, self.width)
            kv.prompt_k_PKSD[rows, :, columns], kv.prompt_v_PKSD[rows, :, columns] = k, v
            outputs.append(causal_attention(q, k, v, window, scaling).transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs)[None]

    def _attend_rows(
        self, kv: LayerKV, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None, scaling: float | None
    ) -> torch.Tensor:
        """Output [n, 1, H, D] of one new token a row."""
        rows, heads, _, size = query.shape
        kv_heads, stop = key.shape[1], self.start + self.filled + 1
        kv.k_nKTD.select(2, stop - 1).copy_(key.squeeze(2))
        kv.v_nKTD.select(2, stop - 1).copy_(value.squeeze(2))
        query_nKRD = query.reshape(rows, kv_heads, heads // kv_heads, size)
        low = 0 if window is None else max(0, stop - window)
        k_nKTD, v_nKTD = kv.k_nKTD.narrow(2, low, stop - low), kv.v_nKTD.narrow(2, low, stop - low)
        if not self.shared:
            mask = None if self.hidden_mask is None else self.hidden_mask.narrow(3, low, stop - low)
            out_nKRD = F.scaled_dot_product_attention(query_nKRD, k_nKTD, v_nKTD, attn_mask=mask, scale=scaling)
            return out_nKRD.reshape(rows, 1, heads, -1)
        out_nKRD, lse_nKR = attend_with_lse(query_nKRD, k_nKTD, v_nKTD, None, scaling)
        prompt_low = 0 if window is None else max(0, self.width + stop - window)
        if prompt_low < self.width:
            out_nKRD = join(out_nKRD, lse_nKR, *self._attend_prompts(kv, query_nKRD, prompt_low, scaling))
        return out_nKRD.reshape(rows, 1, heads, -1)

    def _attend_prompts(self, kv: LayerKV, query_nKRD: torch.Tensor, low: int, scaling: float | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [n, K, R, D] and log-sum-exp [n, K, R] of the rows' queries against their prompts from column `low` on."""
        prompts, (_, kv_heads, folded, size) = kv.prompt_k_PKSD.shape[0], query_nKRD.shape
        if self.row_of_slot is not None:
            query_nKRD = query_nKRD.index_select(0, self.row_of_slot)
        query_PKQD = query_nKRD.view(prompts, self.slots, kv_heads, folded, size).transpose(1, 2).flatten(2, 3)
        mask = None if self.hidden_mask is None else self.hidden_mask[..., low:]
        out, lse = attend_with_lse(query_PKQD, kv.prompt_k_PKSD[:, :, low:], kv.prompt_v_PKSD[:, :, low:], mask, scaling)
        out = out.unflatten(2, (self.slots, folded)).transpose(1, 2).flatten(0, 1)
        lse = lse.unflatten(2, (self.slots, folded)).transpose(1, 2).flatten(0, 1)
        if self.slot_of_row is not None:
            out, lse = out.index_select(0, self.slot_of_row), lse.index_select(0, self.slot_of_row)
        return out, lse

    # ---- storage

    def _new_layer(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> LayerKV:
        shape = (len(self.prompt_lengths), key.shape[1], self.width)
        rows = (len(self.prompt_of_row), key.shape[1], 0)
        kv = LayerKV(
            key.new_zeros(*shape, key.shape[3]),
            value.new_zeros(*shape, value.shape[3]),
            key.new_empty(*rows, key.shape[3]),
            value.new_empty(*rows, value.shape[3]),
        )
        self.layers[layer] = kv
        return kv

    def _padding(self, like: torch.Tensor) -> torch.Tensor | None:
        lengths_P1 = torch.tensor(self.prompt_lengths, device=like.device).unsqueeze(1)
        if min(self.prompt_lengths) == self.width:
            return None
        hidden_PS = torch.arange(self.width, device=like.device) < self.width - lengths_P1
        return torch.zeros(hidden_PS.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden_PS, HIDDEN)[:, None, None]

    def _grown(self, old_nKTD: torch.Tensor) -> torch.Tensor:
        rows, heads, _, size = old_nKTD.shape
        new_nKTD = old_nKTD.new_empty(rows, heads, self.start + self.capacity, size)
        used = self.start + self.filled
        new_nKTD[:, :, :used] = old_nKTD[:, :, :used]
        return new_nKTD

    def _forget_prompts(self, device: torch.device) -> None:
        """Drop prompts without rows once they are half of all, so that dropping copies each prompt a few times at most."""
        alive = np.unique(self.prompt_of_row)
        if 2 * len(alive) > len(next(iter(self.layers.values())).prompt_k_PKSD):
            return
        index = torch.from_numpy(alive).to(device)
        for kv in self.layers.values():
            kv.prompt_k_PKSD, kv.prompt_v_PKSD = kv.prompt_k_PKSD[index], kv.prompt_v_PKSD[index]
        self.hidden_mask = None if self.hidden_mask is None else self.hidden_mask[index]
        self.prompt_of_row = np.searchsorted(alive, self.prompt_of_row)

    def _assign_slots(self, device: torch.device) -> None:
        """Give every row a slot of its prompt; as many slots a prompt as the largest group has rows."""
        rows, prompts = len(self.prompt_of_row), len(next(iter(self.layers.values())).prompt_k_PKSD)
        counts = np.bincount(self.prompt_of_row, minlength=prompts)
        self.slots = int(counts.max())
        by_prompt = np.argsort(self.prompt_of_row, kind="stable")
        rank = np.arange(rows) - np.repeat(np.cumsum(counts) - counts, counts)
        slot_of_row = np.empty(rows, dtype=np.int64)
        slot_of_row[by_prompt] = self.prompt_of_row[by_prompt] * self.slots + rank
        if rows == prompts * self.slots and (slot_of_row == np.arange(rows)).all():
            self.row_of_slot = self.slot_of_row = None
            return
        row_of_slot = np.zeros(prompts * self.slots, dtype=np.int64)  # an empty slot computes row 0's query; nobody reads it
        row_of_slot[slot_of_row] = np.arange(rows)
        self.slot_of_row, self.row_of_slot = torch.from_numpy(slot_of_row).to(device), torch.from_numpy(row_of_slot).to(device)


def _unpack(packed_1HND: torch.Tensor, run: Run) -> torch.Tensor:
    """The run's prompts as [count, H, length, D]."""
    stretch_HND = packed_1HND[0].narrow(1, run.start, run.count * run.length)
    return stretch_HND.unflatten(1, (run.count, run.length)).transpose(0, 1)
