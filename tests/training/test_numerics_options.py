"""Options of how training computes: the attention of plain passes, and the LM head in float32."""

import copy

import pytest
import rig
import tiny
import torch
from test_run import start
from transformers import AutoModelForCausalLM, Gemma2Config

from rloo_cli.run.metrics import read_metrics
from rloo_cli.training import auto
from rloo_cli.training.logprobs import find_head, head_logprobs
from rloo_cli.training.policy import Policy, make_reference


def gemma2():
    """A soft cap on attention scores, which eager attention applies and sdpa does not."""
    torch.manual_seed(0)
    config = Gemma2Config(
        **{**tiny._common(tiny.VOCAB), "head_dim": 32, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 0.5, "sliding_window": 512}
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8.0)
    return model.eval()


# --- attn_implementation ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["eager", "sdpa", None])
def test_a_run_computes_with_the_attention_that_was_asked_for(attention, tmp_path, monkeypatch):
    models = []

    def model():
        models.append(gemma2())
        return models[-1]

    options = {"algorithm__beta": 0.0, "training__max_steps": 1, "training__learning_rate": 0.0}
    folder = start(tmp_path / "run", monkeypatch, model=model, model__attn_implementation=attention, **options)
    assert models[0].config._attn_implementation == (attention or "eager")  # the one that applies this model's soft cap
    assert f"attn_implementation: {attention or 'null'}" in folder.recipe.read_text()


def test_packed_passes_are_taken_only_where_they_agree_with_it(tmp_path, monkeypatch):
    found = {}
    for model in (tiny.qwen2, gemma2):
        folder = start(tmp_path / model.__name__, monkeypatch, model=model, model__attn_implementation="eager", algorithm__beta=0.0)
        found[model.__name__] = "packed" if "layout: packed" in folder.recipe.read_text() else "plain"
    assert found == {"qwen2": "packed", "gemma2": "plain"}


def test_a_soft_cap_on_attention_scores_is_eager_attentions_alone():
    group, found = rig.make_groups(prompts=1)[0], {}
    for attention in ("eager", "sdpa"):
        model = gemma2()
        model.set_attn_implementation(attention)
        ids = torch.tensor([group.prompt.token_ids + group.completions[0].token_ids])
        with torch.no_grad():
            found[attention] = model(input_ids=ids).logits.log_softmax(-1)
    assert (found["eager"] - found["sdpa"]).abs().max() > 0.01


# --- cast_lm_head_to_fp32 --------------------------------------------------------------------------------------------------------


def inputs(seed=0, n=40, d=64, v=500):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, d, generator=generator)
    model = tiny.qwen2(vocab=v)
    return hidden.bfloat16().float(), model, torch.randint(v, (n,), generator=generator)


@pytest.mark.parametrize("chunk", [None, 7])
def test_a_wide_head_is_the_plain_computation_in_float32_whatever_autocast_says(chunk):
    hidden, model, target = inputs()
    weight = model.get_output_embeddings().weight
    plain_hidden, plain_weight = hidden.clone().requires_grad_(), weight.detach().clone().requires_grad_()
    logits = plain_hidden @ plain_weight.T / 0.8
    expected = logits.log_softmax(-1).gather(1, target[:, None])[:, 0]
    expected.sum().backward()
    hidden.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logp, entropy = head_logprobs(hidden, find_head(model), target, temperature=0.8, chunk=chunk, wide=True)
        logp.sum().backward()
    assert torch.allclose(logp, expected, atol=1e-5)
    assert torch.allclose(entropy, torch.distributions.Categorical(logits=logits).entropy(), atol=1e-4)
    assert rig.relative(hidden.grad, plain_hidden.grad) < 1e-5
    assert rig.relative(weight.grad, plain_weight.grad) < 1e-5


def test_without_it_autocast_rounds_the_products():
    hidden, model, target = inputs()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        narrow, _ = head_logprobs(hidden, find_head(model), target, temperature=0.8, chunk=None)
        wide, _ = head_logprobs(hidden, find_head(model), target, temperature=0.8, chunk=None, wide=True)
    assert (narrow - wide).abs().max() > 1e-3


def test_weights_held_in_bfloat16_are_multiplied_in_float32():
    hidden, model, target = inputs()
    model = copy.deepcopy(model).to(torch.bfloat16)
    logp, _ = head_logprobs(hidden.bfloat16(), find_head(model), target, temperature=1.0, chunk=None, wide=True)
    logits = hidden.bfloat16().float() @ model.get_output_embeddings().weight.float().T
    assert torch.allclose(logp, logits.log_softmax(-1).gather(1, target[:, None])[:, 0], atol=1e-5)


def test_policy_and_reference_have_it_alike(tmp_path, monkeypatch):
    policy = Policy(tiny.qwen2(), layout="plain", temperature=1.0, head_chunk=None, wide_head=True)
    assert make_reference(policy, low_precision=torch.bfloat16).wide_head
    monkeypatch.setattr(auto, "decide_bf16", lambda training, device: True)
    options = {"training__bf16": True, "training__cast_lm_head_to_fp32": True}
    rows = read_metrics(start(tmp_path / "wide", monkeypatch, model=lambda: rounded(tiny.qwen2()), **options).metrics)
    narrow = read_metrics(start(tmp_path / "narrow", monkeypatch, model=lambda: rounded(tiny.qwen2()), training__bf16=True).metrics)
    assert rows[0]["kl"] == 0  # bit for bit
    assert rows[0]["entropy"] != narrow[0]["entropy"]


def rounded(model):
    """The model with weights as a bfloat16 checkpoint has them."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model
