"""Attention for packed groups: `[prompt | c1 | c2 | … | prompt' | …]`, each completion seeing its own prompt and itself.

The linear layers run over the packed sequence, so that every distinct token is computed once and nothing is padded. Only
here, inside attention, is the sequence unpacked into rows. Registered with transformers' AttentionInterface under
`PACKED`; the layout travels through the model's keyword arguments as `packed_layout`. The name has no mask function of
its own, so transformers builds no mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from rloo_cli.errors import EngineError

PACKED = "rloo_packed"

# What an attention function may be handed without its changing the result of plain softmax attention.
HARMLESS = {
    "position_ids",
    "use_cache",
    "cache_position",
    "output_attentions",
    "output_hidden_states",
    "layer_idx",
    "attention_mask",
    "output_router_logits",
}


class PackedUnsupportedError(EngineError):
    """The model's attention takes something that packed attention does not know; the plain layout is used instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Rows of queries against rows of keys, both gathered from the packed sequence. `R` rows, `Q` queries, `K` keys.

    Padding repeats index 0; `position_*` is −1 there.
    """

    query_index_RQ: torch.Tensor
    key_index_RK: torch.Tensor
    query_position_RQ: torch.Tensor
    key_position_RK: torch.Tensor
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)
    """Cache of `mask_R1QK` by sliding window; the same for every layer."""

    def mask_R1QK(self, window: int | None) -> torch.Tensor:
        """True where a query may see a key: causal, not padding, and within the sliding window."""
        if window not in self.masks:
            distance = self.query_position_RQ[:, :, None] - self.key_position_RK[:, None, :]
            allowed = (distance >= 0) & (self.key_position_RK >= 0)[:, None, :]
            if window is not None:
                allowed &= distance < window
            # A padded query sees key 0, so that its softmax is finite; its output is never read.
            allowed[:, :, 0] |= self.query_position_RQ < 0
            self.masks[window] = allowed[:, None]
        return self.masks[window]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLayout:
    """Where everything lies in a packed sequence of length L."""

    blocks: tuple[Block, ...]
    """Prompts (each against itself), then completions (each against its prompt and itself)."""
    gather_L: torch.Tensor
    """For packed token l, its place in the blocks' concatenated outputs."""


def build_layout(prompt_lengths: Sequence[int], rows: Sequence[Sequence[int]], device: torch.device) -> PackedLayout:
    """The layout of `[prompt_0 | its completions | prompt_1 | …]`.

    Args:
        prompt_lengths: tokens of each prompt, length P.
        rows: for each prompt, the lengths of its completions as packed (0 allowed).
        device: where the index tensors go.
    """
    prompts, completions, start = [], [], 0
    for length, own_lengths in zip(prompt_lengths, rows, strict=True):
        prompt_start, start = start, start + length
        prompts.append((prompt_start, 0, prompt_start, length))
        for own in own_lengths:
            if own:
                completions.append((prompt_start, length, start, own))
            start += own
    blocks = [_block(spans, device) for spans in (prompts, completions) if spans]
    gather_L = torch.empty(start, dtype=torch.long, device=device)
    offset = 0
    for block in blocks:
        is_query_RQ = block.query_position_RQ >= 0
        gather_L[block.query_index_RQ[is_query_RQ]] = is_query_RQ.flatten().nonzero()[:, 0] + offset
        offset += is_query_RQ.numel()
    return PackedLayout(blocks=tuple(blocks), gather_L=gather_L)


def _block(spans: Sequence[tuple[int, int, int, int]], device: torch.device) -> Block:
    """Rows from (context start, context length, own start, own length): queries are the own tokens, keys context and own."""
    context_start, context, own_start, own = (column[:, None] for column in torch.tensor(spans, device=device).unbind(1))
    query_Q = torch.arange(int(own.max()), device=device)
    key_K = torch.arange(int((context + own).max()), device=device)
    is_query, is_key = query_Q < own, key_K < context + own
    key_index = torch.where(key_K < context, context_start + key_K, own_start + key_K - context)
    return Block(
        query_index_RQ=torch.where(is_query, own_start + query_Q, 0),
        key_index_RK=torch.where(is_key, key_index, 0),
        query_position_RQ=torch.where(is_query, context + query_Q, -1),
        key_position_RK=torch.where(is_key, key_K, -1),
    )


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed_layout: PackedLayout | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """The attention output [1, L, H, D] of a packed sequence, from query [1, H, L, D] and key, value [1, KV, L, D].

    Raises:
        PackedUnsupportedError: the model does not pass the layout through, or wants something beyond softmax(QK)V.
    """
    unknown = [name for name, given in kwargs.items() if given is not None and name not in HARMLESS]
    if packed_layout is None or attention_mask is not None or unknown:
        raise PackedUnsupportedError(f"{type(module).__name__} cannot use packed attention ({unknown or 'no layout or a mask'})")
    query_LHD, key_LKD, value_LKD = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    outputs = []
    for block in packed_layout.blocks:
        query_RHQD = _gather(query_LHD, block.query_index_RQ)
        key_RKKD, value_RKKD = _gather(key_LKD, block.key_index_RK), _gather(value_LKD, block.key_index_RK)
        out_RHQD = F.scaled_dot_product_attention(
            query_RHQD,
            key_RKKD,
            value_RKKD,
            attn_mask=block.mask_R1QK(sliding_window),
            dropout_p=dropout,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        outputs.append(out_RHQD.transpose(1, 2).flatten(0, 1))
    out_LHD = torch.cat(outputs).index_select(0, packed_layout.gather_L)
    return out_LHD[None], None


def _gather(token_LHD: torch.Tensor, index_RQ: torch.Tensor) -> torch.Tensor:
    """Rows of tokens, [R, H, Q, D]."""
    return token_LHD.index_select(0, index_RQ.flatten()).unflatten(0, index_RQ.shape).transpose(1, 2)


AttentionInterface.register(PACKED, packed_attention)
