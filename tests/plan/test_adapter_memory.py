"""What an adapter costs, held to the tensors that training has."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from test_memory import SHAPE, WORK

from rloo_cli.cli.app import exit_code_of
from rloo_cli.plan.comparison import advice, compare
from rloo_cli.plan.devices import DeviceMemory
from rloo_cli.plan.memory import estimate_disk, estimate_memory
from rloo_cli.plan.shape import model_shape
from rloo_cli.plan.spread import Spread
from rloo_cli.recipe.schema import ModelSection
from rloo_cli.training.adapter import adapter_size, add_adapter

ROOT = Path(__file__).resolve().parents[2]
ADAPTER = replace(WORK, adapter_parameters=1_000_000)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_gradients_and_optimizer_are_those_that_training_has(dtype):
    section = ModelSection(model_name_or_path="base", use_peft=True, lora_target_modules=["all-linear"])
    model = add_adapter(tiny.qwen2(dtype=dtype), section, seed=1)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    model(torch.tensor([[1, 2, 3]])).logits.sum().backward()
    optimizer.step()
    work = replace(WORK, weight_bytes=dtype.itemsize, adapter_parameters=adapter_size(model.config, section))
    terms = estimate_memory(model_shape(model.config), work)
    assert terms["weights"] == sum(p.nbytes for p in model.parameters())
    assert terms["gradients"] == sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    assert terms["optimizer"] == sum(v.nbytes for state in optimizer.state.values() for v in state.values() if v.ndim)


def test_there_is_no_copy_for_the_reference_and_no_gradient_of_the_head():
    terms, whole = estimate_memory(SHAPE, ADAPTER), estimate_memory(SHAPE, WORK)
    assert terms["reference"] == 0 < whole["reference"]
    assert whole["logits"] - terms["logits"] == SHAPE.vocab * SHAPE.hidden * 6
    assert terms["peak"] < whole["peak"] - whole["optimizer"]


def test_a_checkpoint_is_the_adapter_with_its_optimizer():
    disk = estimate_disk(SHAPE, replace(ADAPTER, weight_bytes=2), checkpoints=2, rows=0, files=0)
    assert (disk["checkpoint"], disk["checkpoints"], disk["final"]) == (12e6, 24e6, 4e6)


def test_gradients_of_the_adapter_alone_are_summed_over_processes():
    assert estimate_memory(SHAPE, ADAPTER, Spread(processes=2))["summed"] == 4e6


def test_no_strategy_is_advised_that_an_adapter_is_not_trained_under():
    small = DeviceMemory(name="small", kind="cpu", total=1 << 28, free=1 << 28, is_named=True)
    verdicts = compare(SHAPE, ADAPTER, Spread(processes=2), small)
    assert [verdict.strategy for verdict in verdicts] == ["ddp"]
    assert "accelerate_config" not in (advice(verdicts, Spread(processes=2)) or "")


def test_plan_counts_the_adapter(capsys):
    def plan(*settings):
        assert exit_code_of(["plan", str(ROOT / "recipes/lora.yaml"), "--json", *settings]) == 0
        return json.loads(capsys.readouterr().out)

    lora, full = plan(), plan("--set", "use_peft=false")
    assert lora["memory"]["bytes"]["gradients"] < full["memory"]["bytes"]["gradients"] / 4
    assert lora["memory"]["bytes"]["reference"] == 0 < full["memory"]["bytes"]["reference"]
    assert lora["disk"]["checkpoint"] < full["disk"]["checkpoint"] / 4
