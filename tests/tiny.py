"""Tiny random causal language models and a byte-level tokenizer, built on the spot: no downloads, milliseconds each."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2MoeConfig,
)

SPECIAL = ["<|pad|>", "<|eos|>", "<|im_start|>", "<|im_end|>"]
PAD, EOS, IM_START, IM_END = range(256, 260)
VOCAB = 260
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SLIDING_WINDOW = 8


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose ids 0–255 are bytes and 256–259 pad, eos, im_start, im_end; ChatML template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=_byte_of)
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=SPECIAL[0], eos_token=SPECIAL[1])
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _byte_of(character: str) -> int:
    """The byte that GPT-2's printable alphabet writes as this character."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    if ord(character) in printable:
        return ord(character)
    others = [b for b in range(256) if b not in printable]
    return others[ord(character) - 256]


def _build(config: PreTrainedConfig, seed: int, dtype: torch.dtype, spread: float) -> PreTrainedModel:
    """The model in eval mode. `spread` widens the random weights, so that attention matters and logits are peaked."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(spread)
    return model.to(dtype).eval()


def _common(vocab: int) -> dict:
    return {
        "vocab_size": vocab,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "pad_token_id": PAD if vocab == VOCAB else None,
        "bos_token_id": None,
        "eos_token_id": EOS if vocab == VOCAB else None,
    }


def qwen2(seed: int = 0, *, dtype: torch.dtype = torch.float32, vocab: int = VOCAB, spread: float = 8.0, **changes) -> PreTrainedModel:
    """Grouped-query attention (4 heads, 2 KV), biases, tied embeddings."""
    return _build(Qwen2Config(**{**_common(vocab), "head_dim": 32, "tie_word_embeddings": True, **changes}), seed, dtype, spread)


def llama(seed: int = 0, *, dtype: torch.dtype = torch.float32, vocab: int = VOCAB, spread: float = 8.0, **changes) -> PreTrainedModel:
    """Grouped-query attention, untied embeddings."""
    return _build(LlamaConfig(**{**_common(vocab), "head_dim": 32, "tie_word_embeddings": False, **changes}), seed, dtype, spread)


def gpt2(seed: int = 0, *, dtype: torch.dtype = torch.float32, vocab: int = VOCAB, spread: float = 8.0, **changes) -> PreTrainedModel:
    """Learned positions (512 of them: a hard limit), LayerNorm, tied embeddings."""
    eos = EOS if vocab == VOCAB else None
    config = GPT2Config(
        **{
            "vocab_size": vocab,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 2,
            "n_positions": 512,
            "bos_token_id": eos,
            "eos_token_id": eos,
            **changes,
        }
    )
    return _build(config, seed, dtype, spread)


def gemma(seed: int = 0, *, dtype: torch.dtype = torch.float32, vocab: int = VOCAB, spread: float = 8.0, **changes) -> PreTrainedModel:
    """Gemma 3: every other layer attends to the last 8 tokens only, which prompt + completion outgrow."""
    common = {**_common(vocab), "head_dim": 32, "sliding_window": SLIDING_WINDOW, "query_pre_attn_scalar": 32}
    config = Gemma3TextConfig(**{**common, "layer_types": ["sliding_attention", "full_attention"], **changes})
    return _build(config, seed, dtype, spread)


def falcon_h1(seed: int = 0, *, dtype: torch.dtype = torch.float32, vocab: int = VOCAB, spread: float = 6.0, **changes) -> PreTrainedModel:
    """Mamba beside attention in every layer: its cache is not plain keys and values."""
    mamba = {"mamba_d_ssm": 64, "mamba_n_heads": 2, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 16}
    return _build(FalconH1Config(**{**_common(vocab), "head_dim": 32, **mamba, **changes}), seed, dtype, spread)


def mixtral(seed: int = 0, *, dtype: torch.dtype = torch.float32, vocab: int = VOCAB, spread: float = 8.0, **changes) -> PreTrainedModel:
    """A mixture of 4 experts, 2 for each token, in both layers."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32, "tie_word_embeddings": False}
    return _build(MixtralConfig(**{**_common(vocab), **experts, **changes}), seed, dtype, spread)


def qwen2_moe(seed: int = 0, *, dtype: torch.dtype = torch.float32, vocab: int = VOCAB, spread: float = 8.0, **changes) -> PreTrainedModel:
    """A mixture of 5 experts beside a shared one, 2 for each token, in the second layer alone."""
    experts = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48}
    layers = {"mlp_only_layers": [0], "decoder_sparse_step": 1, "tie_word_embeddings": False}
    return _build(Qwen2MoeConfig(**{**_common(vocab), **experts, **layers, **changes}), seed, dtype, spread)


MODELS: dict[str, Callable[..., PreTrainedModel]] = {
    "qwen2": qwen2,
    "llama": llama,
    "gpt2": gpt2,
    "gemma": gemma,
    "falcon_h1": falcon_h1,
}
"""Every builder by name, for parametrized tests. Each takes (seed, dtype=, vocab=, spread=, **config changes)."""
