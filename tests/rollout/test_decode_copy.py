from __future__ import annotations

import pytest
import tiny
import torch

from rloo_cli.errors import EngineError
from rloo_cli.rollout.decode_copy import DecodeCopy, PackedLinear

TOKENS = torch.arange(40, 60).view(2, 10)
BF16 = torch.bfloat16

needs_bf16 = pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no bf16 kernels")


def logits_of(model):
    with torch.no_grad():
        return model(TOKENS, use_cache=False).logits


def cast(model, dtype):
    """The parameters in `dtype`, the buffers as they are."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    return model


@pytest.mark.parametrize("name", tiny.MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_a_copy_computes_what_the_cast_model_does_before_and_after_an_update(name, dtype):
    copy = DecodeCopy(tiny.MODELS[name](0), dtype)
    assert torch.equal(logits_of(copy.model), logits_of(cast(tiny.MODELS[name](0), dtype)))
    copy.load(tiny.MODELS[name](1).named_parameters())
    assert torch.equal(logits_of(copy.model), logits_of(cast(tiny.MODELS[name](1), dtype)))
    copy.load(tiny.MODELS[name](2).state_dict().items())
    assert torch.equal(logits_of(copy.model), logits_of(cast(tiny.MODELS[name](2), dtype)))


def test_the_trainers_model_is_left_alone():
    model = tiny.qwen2().train()
    before = logits_of(model)
    copy = DecodeCopy(model, BF16)
    copy.load(tiny.qwen2(1).named_parameters())
    assert torch.equal(logits_of(model), before)
    assert model.training
    assert not copy.model.training
    assert all(p.requires_grad and p.dtype == torch.float32 for p in model.parameters())
    assert not any(p.requires_grad for p in copy.model.parameters())
    assert model.config.dtype == torch.float32


def test_rotary_frequencies_stay_float32():
    assert DecodeCopy(tiny.qwen2(), BF16).model.model.rotary_emb.inv_freq.dtype == torch.float32


@needs_bf16
def test_packed_layers_hold_no_second_weight():
    copy = DecodeCopy(tiny.qwen2(), BF16)
    left = {name for name, parameter in copy.model.named_parameters() if parameter.ndim == 2}
    assert left == {"model.embed_tokens.weight"}
    assert isinstance(copy.model.lm_head, PackedLinear)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_weights_that_do_not_fit_are_errors(dtype):
    model = tiny.qwen2()
    copy = DecodeCopy(model, dtype)
    with pytest.raises(EngineError, match="`nonsense` were sent"):
        copy.load([("nonsense", torch.zeros(1))])
    with pytest.raises(EngineError, match=r"weights of \d+ parameters were not sent, `model.layers"):
        copy.load([("model.embed_tokens.weight", model.model.embed_tokens.weight)])
