"""`RLOOConfig`: what it takes, what it refuses, and that it is light."""

import enum
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rloo_cli import RLOOConfig
from rloo_cli.errors import RecipeError


class Strategy(enum.Enum):
    STEPS = "steps"


def test_fields_are_read_by_their_names():
    config = RLOOConfig("runs/mine", num_generations=8, learning_rate=2e-6, use_vllm=True, vllm_mode="server")
    assert (config.output_dir, config.num_generations, config.learning_rate, config.vllm_mode) == ("runs/mine", 8, 2e-6, "server")
    assert config.beta == 0.05  # a default
    assert config.model_name_or_path is None
    assert "num_generations=8" in repr(config)


def test_values_of_python_are_those_of_a_recipe():
    config = RLOOConfig(dtype=torch.bfloat16, learning_rate=1e-4, eval_strategy=Strategy.STEPS, output_dir=Path("runs/x"), report_to="none")
    assert (config.dtype, config.eval_strategy, config.output_dir, config.report_to) == ("bfloat16", "steps", "runs/x", [])


def test_keys_of_trl_mean_what_they_mean_in_a_file():
    config = RLOOConfig(warmup_ratio=0.1, log_completions=True, model_init_kwargs={"torch_dtype": "bfloat16", "revision": "v2"})
    assert (config.warmup_steps, config.dtype, config.model_revision) == (0.1, "bfloat16", "v2")
    assert RLOOConfig(trust_remote_code=True).trust_remote_code


def test_a_config_goes_through_a_pickle():
    config = RLOOConfig(learning_rate=1e-3, trust_remote_code=True)
    again = pickle.loads(pickle.dumps(config))
    assert again.given == config.given
    assert (again.learning_rate, again.trust_remote_code) == (1e-3, True)


FAULTS = {
    "a typo": ({"num_generatoins": 8}, "RLOOConfig: num_generatoins: unknown field. Did you mean `num_generations`?"),
    "a word": ({"learning_rate": "fast"}, "RLOOConfig: training.learning_rate: expected a number, got 'fast'."),
    "a bound": ({"num_generations": 1}, "RLOOConfig: generation.num_generations: must be at least 2, got 1: a lone completion"),
    "an object": ({"optim": object()}, "RLOOConfig: optim: builtins.object is an object that no recipe can hold."),
    "of GRPO": ({"loss_type": "dapo"}, "RLOOConfig: loss_type: `dapo` is refused: it is an option of GRPO"),
    "a batch": ({"num_generations": 3, "per_device_train_batch_size": 8}, "RLOOConfig: training.per_device_train_batch_size:"),
    "a permission": ({"trust_remote_code": "no"}, "RLOOConfig: trust_remote_code: expected true or false, got 'no'."),
    "in kwargs": ({"model_init_kwargs": {"device": "cuda"}}, "RLOOConfig: model_init_kwargs: `device` is no field of a recipe"),
    "twice": (
        {"dtype": "float32", "model_init_kwargs": {"dtype": "bfloat16"}},
        "RLOOConfig: dtype: given twice, in model_init_kwargs too.",
    ),
}


@pytest.mark.parametrize(("fields", "message"), FAULTS.values(), ids=FAULTS)
def test_a_wrong_field_is_an_error_when_the_config_is_made(fields, message):
    with pytest.raises(RecipeError) as caught:
        RLOOConfig(**fields)
    assert str(caught.value).splitlines()[0].startswith(message)


def test_an_attribute_that_is_no_field_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no field `learnin_rate`"):
        RLOOConfig().learnin_rate


def test_importing_the_classes_and_making_a_config_leaves_torch_out():
    code = "import sys; from rloo_cli import RLOOConfig, RLOOTrainer; RLOOConfig(beta=0.1); print({'torch', 'datasets'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ), timeout=120)
    assert done.stdout == "set()\n", done.stderr
