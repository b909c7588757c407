"""`RLOOTrainer` trains what `rloo train` trains, from a program, a notebook's loop, and beside other trainings."""

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest
import tiny
import torch
import yaml
from datasets import Dataset, DatasetDict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rloo_cli import RLOOConfig, RLOOTrainer
from rloo_cli.cli.app import exit_code_of
from rloo_cli.errors import DataError, RecipeError, RefusedError, RewardError, StoppedError

SMOKE = Path(__file__).resolve().parents[2] / "recipes" / "smoke"
MODEL = str(SMOKE / "model")
FIELDS = {
    "random_weights": True,
    "num_generations": 2,
    "max_completion_length": 6,
    "prompts_per_step": 2,
    "max_steps": 2,
    "learning_rate": 1e-3,
    "beta": 0.0,
    "bf16": False,
    "gradient_checkpointing": False,
    "save_steps": 1,
    "threads": 1,
}
MODULE = """\
def letters(completions, **kwargs):
    return [sum(map(str.isalpha, text)) / max(len(text), 1) for text in completions]
"""


def prompts(count=4, word="Write"):
    return Dataset.from_dict({"prompt": [f"{word} {i}." for i in range(count)], "answer": list(range(count))})


def in_this_process():
    """A reward that a worker could not import (it would import this file, and torch with it)."""

    def letters(completions, **kwargs):
        return [sum(map(str.isalpha, text)) / max(len(text), 1) for text in completions]

    return letters


letters = in_this_process()


def trainer(folder, reward_funcs=letters, *, model=MODEL, data=None, fields=(), **others):
    config = RLOOConfig(output_dir=folder, **{**FIELDS, **dict(fields)})
    return RLOOTrainer(model=model, reward_funcs=reward_funcs, args=config, train_dataset=data or prompts(), **others)


def numbers(folder):
    rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith("perf/")} for row in rows]


def weights(folder):
    return load_file(Path(folder) / "final" / "model.safetensors")


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module `letter_rewards` that the program could import."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "letter_rewards.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path / "code")
    import letter_rewards

    yield letter_rewards
    import sys

    del sys.modules["letter_rewards"]


def test_a_training_gives_back_its_folder_and_its_last_numbers(tmp_path, capsys, module):
    run = tmp_path / "run"
    seen = []

    def constant(completions, answer, trainer_state, log_metric, **kwargs):
        seen.append((answer, trainer_state.global_step if hasattr(trainer_state, "global_step") else trainer_state.step))
        log_metric("rows", len(completions))
        return [0.5] * len(completions)

    made = trainer(run, [module.letters, constant, lambda completions, **kwargs: None or [0.0] * len(completions)])
    environment = dict(os.environ)
    output = made.train()
    assert (output.run_folder, output.global_step) == (run, 2)
    assert output.metrics["custom/rows"] == 2
    assert [row["step"] for row in made.state.log_history] == [1, 2]
    assert made.state.log_history[-1] == output.metrics
    assert output.training_loss == output.metrics["loss"]
    assert len(seen) == 4
    entries = yaml.safe_load((run / "recipe.yaml").read_text())["rewards"]
    assert [(entry["function"], entry["run_in"]) for entry in entries] == [
        ("letter_rewards.letters", "worker"),
        ("rloo_cli.rewards.given.constant", "trainer"),
        ("rloo_cli.rewards.given.reward", "trainer"),
    ]
    told = capsys.readouterr().err
    assert told.count("`constant`, `reward`: given as objects that no other process can import") == 1
    assert dict(os.environ) == environment
    copy = made.save_model(tmp_path / "copy")
    AutoModelForCausalLM.from_pretrained(copy)
    assert made.save_model() == run / "final"
    with pytest.raises(RefusedError, match="copy exists already"):
        made.save_model(copy)


def test_a_program_and_the_command_line_train_to_the_same_numbers(tmp_path, module):
    data = prompts()
    data.to_json(tmp_path / "code" / "data.jsonl")
    recipe = {"model_name_or_path": MODEL, "dataset_name": "data.jsonl", "reward_funcs": ["letter_rewards.letters"], **FIELDS}
    (tmp_path / "code" / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert exit_code_of(["train", str(tmp_path / "code" / "recipe.yaml"), "-o", str(tmp_path / "cli"), "-q"]) == 0
    trainer(tmp_path / "python", module.letters, data=data).train(quiet=True)
    trainer(tmp_path / "here", letters, data=data).train(quiet=True)
    assert numbers(tmp_path / "python") == numbers(tmp_path / "cli") == numbers(tmp_path / "here")
    for name, tensor in weights(tmp_path / "cli").items():
        assert torch.equal(tensor, weights(tmp_path / "python")[name]), name


def test_a_notebooks_loop_runs_and_async_rewards_are_awaited(tmp_path):
    async def slow(completions, **kwargs):
        await asyncio.sleep(0.01)
        return [1.0 * len(text) for text in completions]

    async def cell():
        return trainer(tmp_path / "run", [slow, letters]).train(quiet=True)

    output = asyncio.run(cell())
    assert output.metrics["rewards/slow/mean"] > 0


def test_trainings_of_one_process_have_each_their_own_precision(tmp_path, monkeypatch):
    monkeypatch.setattr("rloo_cli.training.auto.decide_bf16", lambda asked, device: asked.bf16)  # a CPU is never fast at it
    for name, is_low in (("a", False), ("b", True), ("c", False)):
        trainer(tmp_path / name, fields={"bf16": is_low}).train(quiet=True)
    assert numbers(tmp_path / "a") == numbers(tmp_path / "c") != numbers(tmp_path / "b")


def test_ctrl_c_saves_and_the_run_goes_on_as_if_it_had_not_come(tmp_path):
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    calls = []

    def interrupting(completions, trainer_state, **kwargs):
        calls.append(len(completions))
        if len(calls) == 3:  # in the second step of two groups each
            os.kill(os.getpid(), signal.SIGINT)
        return letters(completions)

    length = {"fields": {"max_steps": 3}}
    trainer(tmp_path / "whole", interrupting_never(), **length).train(quiet=True)
    made = trainer(tmp_path / "run", interrupting, **length)
    with pytest.raises(StoppedError, match="resume_from_checkpoint=True"):
        made.train(quiet=True)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert made.state.global_step == 1
    with pytest.raises(RefusedError, match=r"go on with it by train\(resume_from_checkpoint=True\), or choose another output_dir"):
        made.train(quiet=True)
    output = made.train(resume_from_checkpoint=True, quiet=True)
    assert output.global_step == 3
    assert numbers(tmp_path / "run") == numbers(tmp_path / "whole")
    again = made.train(resume_from_checkpoint=True, quiet=True)  # finished: nothing to do
    assert again == output


def interrupting_never():
    def interrupting(completions, **kwargs):
        return letters(completions)

    return interrupting


def test_a_run_that_is_gone_on_with_has_the_rows_that_it_began_with(tmp_path):
    made = trainer(tmp_path / "run")
    made.train(quiet=True)
    longer = {"max_steps": 3, "lr_scheduler_type": "linear"}
    with pytest.raises(RefusedError, match="the rows of train_dataset are not those"):
        trainer(tmp_path / "run", data=prompts(word="Say"), fields=longer).train(resume_from_checkpoint=True, quiet=True)
    shuffled = prompts().shuffle(seed=1).sort("answer")  # the same rows, by a table of indices
    assert trainer(tmp_path / "run", data=shuffled).train(resume_from_checkpoint=True, quiet=True).global_step == 2


def test_model_and_tokenizer_may_be_objects_and_stay_as_they_are(tmp_path):
    model, tokenizer = tiny.qwen2(), tiny.byte_tokenizer()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    made = trainer(tmp_path / "run", model=model, processing_class=tokenizer, fields={"random_weights": False, "learning_rate": 0.1})
    made.train(quiet=True)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in before.items())
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final").state_dict()
    assert any(not torch.equal(trained[name].float(), tensor) for name, tensor in before.items())
    assert (tmp_path / "run" / "inputs" / "model" / "tokenizer.json").is_file()


def test_of_a_named_models_tokenizer_the_chat_template_may_be_another(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    assert trainer(tmp_path / "same", processing_class=tokenizer)._inputs.tokenizer is None
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}!{% endfor %}"
    rows = [{"prompt": [{"role": "user", "content": "Write."}]}] * 2
    trainer(
        tmp_path / "run",
        lambda completions, **kwargs: [float(len(c[0]["content"])) for c in completions],
        data=rows,
        processing_class=tokenizer,
    ).train(quiet=True)
    import pyarrow.parquet as pq

    assert "Write.!" in str(pq.read_table(tmp_path / "run" / "rollouts" / "000001.parquet").to_pylist()[0])
    with pytest.raises(RecipeError, match="its tokens are not those of"):
        trainer(tmp_path / "other", processing_class=tiny.byte_tokenizer())


def test_evaluation_rows_are_kept_beside_those_of_training(tmp_path):
    made = trainer(tmp_path / "run", eval_dataset=prompts(3, "Test"), fields={"eval_strategy": "steps", "eval_steps": 2})
    made.train(quiet=True)
    assert [row["eval/prompts"] for row in made.state.log_history if "eval/reward" in row] == [3]


def test_a_start_that_goes_wrong_leaves_nothing_and_the_folder_can_be_used(tmp_path):
    def needs(completions, solution):
        return [0.0] * len(completions)

    with pytest.raises(RecipeError, match="needs `solution`, which is no column"):
        trainer(tmp_path / "run", needs).train(quiet=True)
    assert not (tmp_path / "run").exists()
    trainer(tmp_path / "run").train(quiet=True)


def test_a_failing_reward_is_named_with_its_error(tmp_path):
    def broken(completions, **kwargs):
        raise ValueError("boom")

    with pytest.raises(RewardError, match=r"reward `broken`.*ValueError: boom"):
        trainer(tmp_path / "run", broken).train(quiet=True)


REFUSALS = {
    "no model": ({"model": None}, RecipeError, "model: required"),
    "no reward": ({"reward_funcs": None}, RecipeError, "at least one reward function is needed"),
    "no data": ({"train_dataset": None}, RecipeError, "train_dataset: required"),
    "callbacks": ({"callbacks": [print]}, RefusedError, "callbacks: not offered: metrics.jsonl"),
    "optimizers": ({"optimizers": (print, None)}, RefusedError, "optimizers: not offered"),
    "splits": ({"train_dataset": DatasetDict(train=prompts())}, RecipeError, r"several splits were given \(train\)"),
    "a number": ({"reward_funcs": [3]}, RecipeError, "int is neither a function nor the name of one"),
    "weights": ({"args": {"reward_weights": [1.0, 2.0]}}, RecipeError, r"2 weight\(s\) for 1 reward function\(s\)"),
    "twice": ({"args": {"model_name_or_path": "a/b"}}, RecipeError, "model_name_or_path: given twice"),
    "a class of TRL": ({"args": print}, RecipeError, "is not rloo_cli.RLOOConfig"),
    "a dictionary of adapters": ({"peft_config": {}}, RefusedError, "LoraConfig of peft is"),
}


@pytest.mark.parametrize(("changes", "kind", "message"), REFUSALS.values(), ids=REFUSALS)
def test_arguments_that_cannot_be_used_are_refused_at_once(changes, kind, message):
    args = changes.get("args")
    given = {"model": MODEL, "reward_funcs": letters, "train_dataset": prompts(), **changes}
    with pytest.raises(kind, match=message):
        RLOOTrainer(**given | ({"args": RLOOConfig(**args)} if isinstance(args, dict) else {}))


ENDLESS: list[object] = []
ENDLESS.append(ENDLESS)
NO_TABLE = {
    "two types": [{"prompt": "a", "n": 1}, {"prompt": "b", "n": "x"}],
    "an object": [{"prompt": "a", "n": object()}],
    "no name": [{"prompt": "a", 3: 1}],
    "half a character": [{"prompt": "\ud800"}],
    "itself": [{"prompt": "a", "n": ENDLESS}],
}


@pytest.mark.parametrize("rows", NO_TABLE.values(), ids=NO_TABLE)
def test_rows_that_make_no_table_are_told_in_a_line(rows):
    with pytest.raises(DataError, match=r"\ARLOOConfig: train_dataset: [^\n]*\Z"):
        RLOOTrainer(model=MODEL, reward_funcs=letters, train_dataset=rows)


@pytest.mark.parametrize("resume", [1.5, b"x", object()])
def test_what_no_checkpoint_is_named_by_is_refused(tmp_path, resume):
    with pytest.raises(RecipeError, match="resume_from_checkpoint: expected true, a step or a checkpoint's folder"):
        trainer(tmp_path / "run").train(resume_from_checkpoint=resume)


def test_two_trainings_of_one_process_are_not_under_way_at_once(tmp_path):
    refused = []

    def nested(completions, **kwargs):
        with pytest.raises(RefusedError, match="another training is under way in this process") as caught:
            trainer(tmp_path / "inner").train(quiet=True)
        refused.append(caught)
        return [float(len(text)) for text in completions]

    trainer(tmp_path / "run", nested).train(quiet=True)
    assert refused
    assert not (tmp_path / "inner").exists()
    trainer(tmp_path / "inner").train(quiet=True)


def test_a_recipe_of_a_program_says_so_where_it_is_run_without_it(tmp_path, capsys):
    trainer(tmp_path / "run", lambda completions, **kwargs: [0.0] * len(completions)).train(quiet=True)
    assert exit_code_of(["train", str(tmp_path / "run" / "recipe.yaml"), "-o", str(tmp_path / "again")]) == 2
    assert "`rloo_cli.rewards.given.reward` is a function that a Python program gave as an object" in capsys.readouterr().err


def test_functions_of_this_process_alone_are_not_given_to_others(tmp_path):
    with pytest.raises(RefusedError, match="2 processes cannot be started with the reward function `reward`"):
        trainer(tmp_path / "run", lambda completions, **kwargs: [0.0] * len(completions), fields={"num_processes": 2}).train(quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_lora_config_of_peft_is_the_fields_that_it_says(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    base = str(SMOKE.parent / "quickstart" / "model")
    rows = [{"prompt": [{"role": "user", "content": "Write."}]}] * 4
    lengths = lambda completions, **kwargs: [float(len(c[0]["content"])) for c in completions]  # noqa: E731
    made = trainer(tmp_path / "run", lengths, model=base, data=rows, peft_config=config, fields={"random_weights": False})
    assert made.train(quiet=True).global_step == 2
    model = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())["model"]
    assert model.items() >= {"use_peft": True, "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.0}.items()
    assert sorted(model["lora_target_modules"]) == ["q_proj", "v_proj"]
    with pytest.raises(RecipeError, match="`init_lora_weights` of LoraConfig is no field"):
        trainer(tmp_path / "other", peft_config=peft.LoraConfig(init_lora_weights="pissa"))


def test_rewards_are_named_in_every_way_that_a_recipe_knows():
    named = ["accuracy_reward", "my_rewards.score", "some/reward-model", {"function": letters, "weight": 2, "on_error": "unscored"}]
    entries = RLOOTrainer(MODEL, named, RLOOConfig(reward_weights=[1, 2, 3, 4]), "some/data")._rewards.entries
    assert [entry.get("function") or entry.get("model") for entry in entries] == [
        "accuracy_reward",
        "my_rewards.score",
        "some/reward-model",
        "rloo_cli.rewards.given.letters",
    ]
    assert [entry["weight"] for entry in entries] == [1, 2, 3, 4]
    assert entries[3]["on_error"] == "unscored"


def test_rewards_of_the_config_are_those_of_the_trainer():
    made = RLOOTrainer(MODEL, None, RLOOConfig(reward_funcs=["think_format_reward"], reward_weights=[0.5]), "some/data")
    assert made._rewards.entries == [{"function": "think_format_reward", "weight": 0.5}]
