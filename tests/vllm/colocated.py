"""Small models whose head size vLLM's CPU attention takes, and engines for them."""

from __future__ import annotations

import tiny
import torch

from rloo_cli.rollout.engine import GenerationRequest, RandomKey
from rloo_cli.rollout.vllm_colocate import VllmColocateEngine

KEY = RandomKey(seed=1, step=2)
CONTEXT = 160
PROMPTS = [tuple(range(40, 110)), tuple(range(40, 105)), tuple(range(80, 100)), (7,)]
"""The first two begin alike, over more than one block of the prompt cache."""

SHAPES = {"qwen2": {"num_attention_heads": 2, "num_key_value_heads": 1}, "llama": {}}
"""Qwen2-like has a tied head, Llama-like an untied one."""


def build(name, seed=0, **changes):
    return tiny.MODELS[name](seed, **{**SHAPES[name], **changes})


def engine_for(folder, model, **changes):
    """An engine without weights for models of this shape; `folder` gets the configuration alone."""
    model.config.architectures = [type(model).__name__]  # as save_pretrained of the model itself has it
    model.config.save_pretrained(folder)
    settings = {
        "model_path": str(folder),
        "revision": None,
        "tokenizer": tiny.byte_tokenizer(),
        "eos_ids": {tiny.EOS},
        "dtype": "float32",
        "max_model_length": CONTEXT,
        "gpu_memory_utilization": 0.05,
        "enable_sleep_mode": False,
        "model_impl": "auto",
        "trust_remote_code": False,
        "seed": 1,
    }
    return VllmColocateEngine(**{**settings, **changes})


def requests(prompts=PROMPTS, generations=3, first_row=0):
    return [
        GenerationRequest(token_ids=ids, num_generations=generations, first_row=first_row + i * generations)
        for i, ids in enumerate(prompts)
    ]


def tokens_of(groups):
    return [[c.token_ids for c in group] for group in groups]


def forward_logits(model, prompt, completion):
    """The model's own logits [T, V] before each token of a completion, by a plain forward pass."""
    with torch.no_grad():
        return model(torch.tensor([prompt + completion.token_ids]), use_cache=False).logits[0, len(prompt) - 1 : -1]
