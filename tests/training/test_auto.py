import pytest
import tiny
import torch

from rloo_cli.recipe.schema import TrainingSection
from rloo_cli.training import auto
from rloo_cli.training.policy import Policy

CPU = torch.device("cpu")
PROMPT = tuple(range(20, 32))


def plain_policy(model):
    return Policy(model, layout="plain", temperature=1.0, head_chunk=None)


@pytest.mark.parametrize(
    ("name", "expected"), [("qwen2", "packed"), ("llama", "packed"), ("gpt2", "packed"), ("gemma", "packed"), ("falcon_h1", "plain")]
)
def test_layout_is_packed_only_where_it_agrees(name, expected):
    policy = plain_policy(tiny.MODELS[name]())
    assert auto.decide_layout(TrainingSection(), policy, prompt_ids=PROMPT, completion_length=30) == expected


def test_a_model_whose_attention_wants_more_is_plain(caplog):
    """Gemma 2's attention caps its scores, which packed attention does not know."""
    from transformers import AutoModelForCausalLM, Gemma2Config

    config = Gemma2Config(
        vocab_size=260, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32
    )
    policy = plain_policy(AutoModelForCausalLM.from_config(config).eval())
    with caplog.at_level("INFO"):
        assert auto.decide_layout(TrainingSection(), policy, prompt_ids=PROMPT, completion_length=30) == "plain"
    assert "layout: plain" in caplog.text


@pytest.mark.parametrize("layout", ["packed", "plain"])
def test_a_given_layout_is_taken(layout):
    policy = plain_policy(tiny.falcon_h1())
    assert auto.decide_layout(TrainingSection(layout=layout), policy, prompt_ids=PROMPT, completion_length=5) == layout


def test_threads_are_torchs_own_or_as_given():
    assert auto.decide_threads(TrainingSection()) == torch.get_num_threads()
    assert auto.decide_threads(TrainingSection(threads=3)) == 3


def test_bf16_only_when_asked_for_and_faster(monkeypatch):
    assert auto.decide_bf16(TrainingSection(bf16=False), CPU) is False
    monkeypatch.setattr(auto, "_product_seconds", lambda: (1.0, 0.9))
    assert auto.decide_bf16(TrainingSection(), CPU) is False
    monkeypatch.setattr(auto, "_product_seconds", lambda: (1.0, 0.3))
    assert auto.decide_bf16(TrainingSection(), CPU) is True


def test_the_token_budget_keeps_groups_whole_and_shrinks_with_the_free_memory(monkeypatch):
    class Memory:
        available = 10**9

    model = tiny.qwen2()
    decide = lambda group_tokens, **fields: auto.decide_max_tokens(TrainingSection(**fields), model, CPU, group_tokens=group_tokens)  # noqa: E731
    assert decide(100) == auto.CPU_TOKENS
    monkeypatch.setattr(auto, "CPU_ACTIVATIONS", 2 * 10**7)
    assert auto.LEAST_TOKENS < decide(100) < auto.CPU_TOKENS
    assert decide(9000) == 9000
    monkeypatch.setattr(auto.psutil, "virtual_memory", lambda: Memory)
    Memory.available = 3 * 10**7
    assert auto.LEAST_TOKENS < decide(9000) < 9000
    assert decide(100, max_tokens_per_micro_batch=77) == 77


def test_the_head_is_chunked_where_its_logits_are_large():
    assert auto.decide_head_chunk(TrainingSection(), 50_000, 2048) is None
    assert auto.decide_head_chunk(TrainingSection(), 256_000, 16384) == auto.HEAD_CHUNK_BYTES // (256_000 * 4)
    assert auto.decide_head_chunk(TrainingSection(head_chunk=9), 10, 10) == 9
    assert auto.decide_head_chunk(TrainingSection(head_chunk=None), 256_000, 16384) is None
