"""Attention of a decode step in which each prompt's keys and values are computed once.

Registered with transformers' AttentionInterface under `DECODE`; the cache travels through the model's keyword arguments
as `rollout_cache`. The name has no mask function of its own, so transformers builds no mask.

Shapes here and in kv_cache.py: `P` distinct prompts, `n` active rows, `G` slots a prompt, `S` longest prompt, `T`
completion tokens, `N` tokens of a packed prefill, `K` KV heads, `R` query heads a KV head, `H = K·R`, `D` head size.
The query heads that share a KV head are folded into rows, so that no key is repeated.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from rloo_cli.errors import EngineError

DECODE = "rloo_decode"

# What an attention function may be handed without its changing the result of plain softmax attention.
HARMLESS = {
    "position_ids",
    "use_cache",
    "cache_position",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "layer_idx",
    "dropout",
    "is_causal",
}


class DecodeUnsupportedError(EngineError):
    """The model's attention is not the plain kind that shared prompts need; the plain layout is used instead."""


class DecodeCache(Protocol):
    """What the attention function needs of a cache."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None, scaling: float | None
    ) -> torch.Tensor:
        """Store the layer's keys and values [·, K, ·, D]; the output [·, ·, H, D] of queries [·, H, ·, D]."""
        ...


def decode_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    rollout_cache: DecodeCache | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """The attention output, by the cache that came with the call.

    Raises:
        DecodeUnsupportedError: the model does not pass the cache through, or wants something beyond softmax(QK)V.
    """
    layer = getattr(module, "layer_idx", None)
    unknown = [name for name, given in kwargs.items() if given is not None and name not in HARMLESS]
    if rollout_cache is None or layer is None or attention_mask is not None or unknown:
        raise DecodeUnsupportedError(f"{type(module).__name__} cannot share prompts ({unknown or 'no cache passed through, or a mask'})")
    return rollout_cache.attend(layer, query, key, value, sliding_window, scaling), None


AttentionInterface.register(DECODE, decode_attention)


def causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None, scaling: float | None
) -> torch.Tensor:
    """Output [·, H, S, D] of a prompt against itself."""
    length, mask = query.shape[2], None
    if window is not None and window < length:
        steps = torch.arange(length, device=query.device)
        distance = steps[:, None] - steps[None, :]
        mask = (distance >= 0) & (distance < window)
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped)


def attend_with_lse(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [·, K, Q, D] and the log-sum-exp [·, K, Q] of its scores. The mask is additive."""
    if query.device.type == "cpu" and query.shape[-1] == value.shape[-1]:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, attn_mask=mask, scale=scaling)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = (query * scale) @ key.transpose(-1, -2)
    scores = scores if scores.dtype == torch.float64 else scores.float()
    if mask is not None:
        scores = scores + mask
    lse = scores.logsumexp(-1)
    return (scores - lse.unsqueeze(-1)).exp().to(value.dtype) @ value, lse


def join(out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor) -> torch.Tensor:
    """Attention over the union of two sets of keys, from the attention over each."""
    weight = (lse_a - lse_b).sigmoid().unsqueeze(-1).to(out_a.dtype)
    return torch.lerp(out_b, out_a, weight)
