"""Which model a server has, in a form that trainer and server come to independently."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

# fmt: off
STRUCTURE = frozenset({
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "tie_word_embeddings", "attention_bias", "mlp_bias", "rms_norm_eps",
    "sliding_window", "n_embd", "n_layer", "n_head", "n_inner", "n_positions", "activation_function", "num_experts",
    "num_local_experts", "num_experts_per_tok", "n_routed_experts", "n_shared_experts", "moe_intermediate_size", "kv_lora_rank",
    "q_lora_rank",
})
# fmt: on
"""Fields that decide which weights fit and what they compute. The rest differs between the two sides without meaning anything:
vLLM rewrites rotary parameters, dtype, context length and special tokens, and a folder's name is nobody's business."""


def config_hash(config: Mapping[str, Any]) -> str:
    """The sha256 of what a model's config (`config.to_dict()`) says about its structure, nested configs included."""
    text = json.dumps(_structure(config), sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _structure(config: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {name: value for name, value in config.items() if name in STRUCTURE and value is not None}
    nested = {name: _structure(value) for name, value in config.items() if name.endswith("_config") and isinstance(value, Mapping)}
    return kept | {name: value for name, value in nested.items() if value}
