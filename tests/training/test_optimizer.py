import copy
import json
from typing import get_args

import pytest
import tiny
import torch
from accelerate import Accelerator
from transformers import get_scheduler

from rloo_cli.errors import RecipeError
from rloo_cli.recipe.schema import OPTIMIZERS, SCHEDULES, TrainingSection
from rloo_cli.training.optimizer import build_optimizer


def build(model, total_steps=10, **fields):
    return build_optimizer(
        model, TrainingSection(**{"learning_rate": 1e-3, **fields}), total_steps=total_steps, accelerator=Accelerator(cpu=True)
    )


def take_steps(model, optimizer, count, seed):
    generator = torch.Generator().manual_seed(seed)
    rates = []
    for _ in range(count):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        rates.append(optimizer.step())
    return rates


@pytest.mark.parametrize("name", get_args(OPTIMIZERS))
def test_state_goes_through_json_and_tensors_to_the_same_bits(name):
    model = tiny.qwen2()
    optimizer = build(model, optim=name, lr_scheduler_type="cosine", warmup_steps=2, weight_decay=0.1)
    take_steps(model, optimizer, 3, seed=0)
    other = copy.deepcopy(model)
    resumed = build(other, optim=name, lr_scheduler_type="cosine", warmup_steps=2, weight_decay=0.1)
    tensors, document = optimizer.state()
    resumed.load_state({k: v.clone() for k, v in tensors.items()}, json.loads(json.dumps(document)))
    assert take_steps(model, optimizer, 3, seed=1) == take_steps(other, resumed, 3, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


SCHEDULE_ARGUMENTS = {"cosine_with_min_lr": {"min_lr_rate": 0.1}, "warmup_stable_decay": {"num_decay_steps": 3}}


@pytest.mark.parametrize("name", get_args(SCHEDULES))
def test_schedules_are_those_of_transformers(name):
    model, arguments = torch.nn.Linear(2, 2), SCHEDULE_ARGUMENTS.get(name, {})
    optimizer = build(model, lr_scheduler_type=name, lr_scheduler_kwargs=arguments, warmup_steps=0.2)
    sgd = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=1e-3)
    theirs = get_scheduler(name, sgd, num_warmup_steps=2, num_training_steps=10, scheduler_specific_kwargs=arguments or None)
    expected = []
    for _ in range(10):
        expected.append(theirs.get_last_lr()[0])
        sgd.step()
        theirs.step()
    assert take_steps(model, optimizer, 10, seed=0) == expected


def test_schedule_arguments_that_do_not_exist_are_a_recipe_error():
    with pytest.raises(RecipeError, match="lr_scheduler_kwargs: cosine does not take them"):
        build(torch.nn.Linear(2, 2), lr_scheduler_type="cosine", lr_scheduler_kwargs={"nonsense": 1})


def test_biases_and_norms_do_not_decay():
    model = tiny.qwen2()
    groups = build(model, weight_decay=0.1).optimizer.param_groups
    by_decay = {group["weight_decay"]: group["params"] for group in groups}
    assert all(p.ndim >= 2 for p in by_decay[0.1])
    assert all(p.ndim == 1 for p in by_decay[0.0])
    assert sum(len(params) for params in by_decay.values()) == len(list(model.parameters()))


def test_adam_takes_its_constants():
    group = build(tiny.qwen2(), adam_beta1=0.8, adam_beta2=0.95, adam_epsilon=1e-6).optimizer.param_groups[0]
    assert group["betas"] == (0.8, 0.95)
    assert group["eps"] == 1e-6
