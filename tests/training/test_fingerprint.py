from __future__ import annotations

import pytest
import tiny
import torch

from rloo_cli.training.fingerprint import fingerprint


def test_the_same_model_from_elsewhere_is_the_same():
    model, other = tiny.qwen2(), tiny.qwen2()
    other.config._name_or_path = "elsewhere"
    other.config.transformers_version = "9.9.9"
    assert fingerprint(model) == fingerprint(other)


def test_every_value_counts():
    model = tiny.qwen2()
    prints = {fingerprint(model)}
    tensors = model.state_dict()
    for name in list(tensors)[:6]:
        flat = tensors[name].view(-1)
        flat[flat.numel() // 2 + 1] = torch.nextafter(flat[flat.numel() // 2 + 1], torch.tensor(9.0))
        prints.add(fingerprint(model))
    assert len(prints) == 7


@pytest.mark.parametrize(("name", "value"), [("rms_norm_eps", 1e-3), ("rope_theta", 77.0), ("hidden_act", "relu")])
def test_numbers_of_the_configuration_count(name, value):
    model = tiny.qwen2()
    before = fingerprint(model)
    setattr(model.config, name, value)
    assert fingerprint(model) != before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_any_type_of_tensor_has_one(dtype):
    assert fingerprint(tiny.qwen2().to(dtype)) != fingerprint(tiny.qwen2())
