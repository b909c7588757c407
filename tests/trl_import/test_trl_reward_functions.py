"""Reward functions written for TRL, called by TRL's own code and by ours: the same rewards, metrics and extra columns."""

import asyncio
import importlib.util
import threading
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rloo_cli.recipe.schema import RewardEntry
from rloo_cli.rewards.given import given
from rloo_cli.rewards.runner import RewardRunner
from rloo_cli.types import Completion, FinishReason, Group, Prompt, TrainerState

trl = pytest.importorskip("trl", reason="TRL is not installed; its calls of reward functions are compared with ours where it is")
EXAMPLES = Path(__file__).resolve().parent / "examples"
TEXTS = ["<reasoning>\na\n</reasoning>\n<answer>\n4\n</answer>\n", "<answer>4</answer>", "no!", ""]


def module_of(name):
    """The functions of an example that does not train when it is imported."""
    from rloo_cli.trl_import.write import import_script

    def load(folder):
        done = import_script(EXAMPLES / f"{name}.py", folder / f"{name}.yaml")
        spec = importlib.util.spec_from_file_location(f"copied_{name}", done.module)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


FUNCTIONS = {
    "strict format": (module_of("gsm8k_format"), "strict_format_reward_func"),
    "an integer": (module_of("gsm8k_format"), "int_reward_func"),
    "correctness": (module_of("gsm8k_format"), "correctness_reward_func"),
    "a coroutine that logs": (module_of("async_judge"), "judge_reward"),
    "None, and the trainer's state": (module_of("async_judge"), "only_some_rows"),
    "length": (module_of("length_penalty"), "length_reward"),
    "TRL's accuracy_reward": (None, "accuracy_reward"),
    "TRL's think_format_reward": (None, "think_format_reward"),
}


TAKES_STRINGS = ("a coroutine that logs", "None, and the trainer's state", "length")
"""The others take messages alone, as their authors wrote them."""
CASES = [(name, True) for name in FUNCTIONS] + [(name, False) for name in TAKES_STRINGS]


@pytest.fixture
def loop():
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever, daemon=True)
    thread.start()
    yield made
    made.call_soon_threadsafe(made.stop)
    thread.join()
    made.close()


def called_by_trl(function, name, loop, *, is_chat, step):
    """(rewards, metrics, extra columns) of TRL's `_calculate_rewards` on one prompt's completions."""
    trainer = trl.RLOOTrainer.__new__(trl.RLOOTrainer)
    trainer.accelerator = SimpleNamespace(device=torch.device("cpu"), is_main_process=True)
    trainer.args = SimpleNamespace(report_to=[])
    trainer.reward_funcs, trainer.reward_func_names, trainer.reward_processing_classes = [function], [name], [None]
    trainer.state = SimpleNamespace(global_step=step, max_steps=10)
    trainer.async_loop = loop
    trainer._pending_metrics, trainer._pending_extra_logs = defaultdict(list), defaultdict(list)
    prompt = [{"role": "user", "content": "2+2?"}] if is_chat else "2+2?"
    completions = [[{"role": "assistant", "content": text}] for text in TEXTS] if is_chat else TEXTS
    inputs = [{"prompt": prompt, "answer": "4", "solution": "$4$"} for _ in TEXTS]
    values = trainer._calculate_rewards(inputs, [prompt] * len(TEXTS), completions, [[1, 2]] * len(TEXTS))[:, 0].tolist()
    metrics = {key: sum(numbers) / len(numbers) for key, numbers in trainer._pending_metrics.items()}
    return [None if value != value else value for value in values], metrics, dict(trainer._pending_extra_logs)


def called_by_us(function, *, is_chat, step, tmp_path):
    """The same of ours."""
    content = ({"role": "user", "content": "2+2?"},) if is_chat else "2+2?"
    prompt = Prompt(row=0, content=content, text="2+2?", token_ids=(1,), columns={"answer": "4", "solution": "$4$"})
    one = Completion(token_ids=(1, 2), logprobs=(0.0, 0.0), finish_reason=FinishReason.STOPPED, weights_version=0)
    group = Group(prompt=prompt, completions=(one,) * len(TEXTS), texts=tuple(TEXTS))
    with given({"it": function}):
        entry = RewardEntry(function="rloo_cli.rewards.given.it", run_in="trainer")
        with RewardRunner([entry], code_dir=tmp_path, num_workers=1, log_dir=None) as runner:
            runner.start()
            runner.submit(0, group, TrainerState(step=step + 1, max_steps=10))
            rewards = runner.collect()[0]
    return list(rewards.values[0]), dict(rewards.metrics), rewards


@pytest.mark.parametrize(("case", "is_chat"), CASES)
def test_rewards_are_those_that_trls_own_code_gets(case, is_chat, loop, tmp_path):
    load, name = FUNCTIONS[case]
    function = getattr(load(tmp_path) if load else __import__("trl.rewards", fromlist=[name]), name)
    theirs, their_metrics, their_extras = called_by_trl(function, name, loop, is_chat=is_chat, step=3)
    ours, our_metrics, rewards = called_by_us(function, is_chat=is_chat, step=3, tmp_path=tmp_path)
    assert ours == pytest.approx(theirs)
    assert our_metrics == pytest.approx(their_metrics)
    assert {key: list(values) for key, values in rewards.extras.items()} == their_extras
