"""Whatever decoder-only model comes along: its completions' log-probs are those of its own forward pass."""

from __future__ import annotations

import pytest
import tiny
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rloo_cli.rollout.engine import GenerationRequest, RandomKey, SamplingParams
from rloo_cli.rollout.transformers_engine import TransformersEngine

COMMON = {
    "vocab_size": tiny.VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
WINDOW = {"sliding_window": 8, "head_dim": 32, "layer_types": ["sliding_attention", "full_attention"]}
LATENT = {
    "n_routed_experts": 4,
    "num_key_value_heads": 4,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 32,
}

CASES = [
    ("qwen3", {"head_dim": 32}, "packed"),
    ("mistral", {"head_dim": 32, "sliding_window": 8}, "packed"),
    ("phi", {}, "packed"),
    ("olmo2", {}, "packed"),
    ("gpt_neox", {}, "packed"),
    ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}, "packed"),
    ("cohere2", WINDOW, "packed"),
    ("smollm3", {}, "packed"),
    ("mixtral", EXPERTS, "packed"),
    ("qwen3_moe", {**EXPERTS, "head_dim": 32}, "packed"),
    ("deepseek_v3", LATENT, "packed"),  # keys wider than values
    ("gemma2", {**WINDOW, "query_pre_attn_scalar": 32}, "plain"),  # soft-capped scores
    ("gpt_oss", {**EXPERTS, **WINDOW}, "plain"),  # attention sinks
    ("bloom", {"n_head": 4, "n_layer": 2}, "plain"),  # ALiBi
    ("gptj", {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 128}, "plain"),  # an attention of its own
    (
        "llama4_text",
        {**EXPERTS, "head_dim": 32, "attention_chunk_size": 8, "layer_types": ["chunked_attention", "full_attention"]},
        "plain",
    ),
    ("qwen3_next", {**EXPERTS, "head_dim": 32, "layer_types": ["linear_attention", "full_attention"]}, "plain"),
    ("mamba", {"state_size": 8}, "plain"),
]


def build(kind, changes):
    own = AutoConfig.for_model(kind)
    fields = {name: value for name, value in {**COMMON, **changes}.items() if hasattr(own, name)}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
    return model


@pytest.mark.parametrize(("kind", "changes", "layout"), CASES, ids=[case[0] for case in CASES])
def test_logprobs_are_those_of_the_models_own_forward_pass(kind, changes, layout):
    torch.set_num_threads(1)
    model, prompts = build(kind, changes), [tuple(range(40, 52)), tuple(range(60, 63))]
    engine = TransformersEngine(model, tokenizer=tiny.byte_tokenizer())
    requests = [GenerationRequest(token_ids=ids, num_generations=2, first_row=2 * i) for i, ids in enumerate(prompts)]
    groups = engine.generate(requests, SamplingParams(max_new_tokens=24), RandomKey(seed=0, step=0))
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            tokens = torch.tensor([prompt + completion.token_ids])
            with torch.no_grad():
                logits = model(tokens, use_cache=False).logits[0, len(prompt) - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, tokens[0, len(prompt) :, None])[:, 0]
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=2e-4, rtol=0)
    assert engine.layout == layout
