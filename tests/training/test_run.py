"""Whole runs over a fake engine: what is written, when, and that a stopped run goes on to the same bits."""

import json
import threading
import time

import fakes
import pytest
import tiny
import torch
from rich.console import Console

from rloo_cli.errors import EngineError, NonFiniteError, RefusedError, StoppedError, StorageError
from rloo_cli.recipe.batch import plan_batches
from rloo_cli.recipe.distribution import Distribution
from rloo_cli.recipe.schema import Recipe
from rloo_cli.run.checkpoint import find_checkpoint, list_steps
from rloo_cli.run.folder import RunFolder
from rloo_cli.run.metrics import read_metrics
from rloo_cli.run.progress import Progress
from rloo_cli.run.signals import StopSignal
from rloo_cli.training import auto, setup
from rloo_cli.training.inputs import TrainingInputs
from rloo_cli.training.skeleton import without_weights
from rloo_cli.training.train import train
from rloo_cli.training.update import Updater

STEPS = 6


def make_recipe(**changes):
    document = {
        "model": {"model_name_or_path": "tiny"},
        "data": {"dataset_name": "fake", "dataset_test_split": "test"},
        "rewards": [{"function": "even"}],
        "generation": {"num_generations": 3, "max_completion_length": 12},
        "algorithm": {"beta": 0.1},
        "training": {"prompts_per_step": 2, "max_steps": STEPS, "learning_rate": 1e-3, "bf16": False, "threads": 1},
        "run": {"save_steps": 100},
        "evaluation": {},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        document[section][name] = value
    return Recipe.model_validate(document)


def start(path, monkeypatch, *, stop_at=None, resume=None, model=tiny.qwen2, on_generate=lambda step: None, strategy="ddp", **changes):
    """Run to the end, or until a stop asked for as soon as step `stop_at` is recorded (0: while the first batch is generated)."""
    recipe, folder, signal = make_recipe(**changes), RunFolder(path), StopSignal()
    folder.prepare()
    engine = fakes.FakeEngine(on_generate=lambda step: signal.request("SIGTERM") if stop_at == 0 else on_generate(step))
    monkeypatch.setattr(setup, "load_model", lambda *a, **k: model())
    monkeypatch.setattr(setup, "empty_model", lambda *a, **k: without_weights(model()))
    monkeypatch.setattr(setup, "prepare_engine", lambda *a, **k: fakes.FakeMaker(engine))
    console = Console(quiet=True)
    with Progress(STEPS, console=console) as progress:
        monkeypatch.setattr(progress, "step", lambda row, sample=None: signal.request("SIGTERM") if row["step"] == stop_at else None)
        train(
            TrainingInputs(
                recipe=recipe,
                batch=plan_batches(recipe, 1),
                total_steps=STEPS,
                tokenizer=tiny.byte_tokenizer(),
                prompts=fakes.make_prompts(),
                eval_prompts=fakes.make_prompts(3, seed=1)
                if recipe.evaluation.eval_strategy != "no" or recipe.evaluation.eval_on_start
                else None,
                rewards=fakes.FakeRewards(),
                folder=folder,
                resume_from=resume,
                trust_remote_code=False,
                progress=progress,
                distribution=Distribution(strategy=strategy),
                stop=signal,
            )
        )
    return folder


def gold(folder):
    """(metrics without perf/, bytes of the final weights)."""
    rows = [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in read_metrics(folder.metrics)]
    return rows, (folder.final / "model.safetensors").read_bytes()


VARIANTS = {
    "on-policy": {},
    "two iterations": {"algorithm__num_iterations": 2},
    "a batch for two steps": {"training__steps_per_generation": 2},
    "both": {"training__steps_per_generation": 2, "algorithm__num_iterations": 2},
    "without reference": {"algorithm__beta": 0.0},
    "normalized": {"algorithm__normalize_advantages": True, "training__steps_per_generation": 2},
    "evaluated": {"evaluation__eval_strategy": "steps", "evaluation__eval_steps": 2, "evaluation__eval_on_start": True},
    "adafactor": {"training__optim": "adafactor"},
    "with dropout": {"training__disable_dropout": False},
}


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_a_run_stopped_at_any_step_and_resumed_ends_as_one_never_stopped(variant, tmp_path, monkeypatch):
    model = tiny.gpt2 if variant == "with dropout" else tiny.qwen2
    expected = gold(start(tmp_path / "whole", monkeypatch, model=model, **VARIANTS[variant]))
    for k in range(1, STEPS):
        path = tmp_path / f"stopped-{k}"
        with pytest.raises(StoppedError, match=f"SIGTERM: step {k} is saved"):
            start(path, monkeypatch, stop_at=k, model=model, **VARIANTS[variant])
        assert not (path / "final").exists()
        start(path, monkeypatch, resume=find_checkpoint(path / "checkpoints"), model=model, **VARIANTS[variant])
        assert gold(RunFolder(path)) == expected


def test_a_run_killed_between_saves_repeats_the_steps_since(tmp_path, monkeypatch):
    expected = gold(start(tmp_path / "whole", monkeypatch, run__save_steps=2, algorithm__num_iterations=2))
    path = tmp_path / "killed"

    def die(step):
        if step == 5:
            raise KeyboardInterrupt

    fakes_engine = fakes.FakeEngine
    monkeypatch.setattr(fakes, "FakeEngine", lambda on_generate: fakes_engine(on_generate=die))
    with pytest.raises(KeyboardInterrupt):
        start(path, monkeypatch, run__save_steps=2, algorithm__num_iterations=2)
    monkeypatch.setattr(fakes, "FakeEngine", fakes_engine)
    checkpoint = find_checkpoint(path / "checkpoints")
    assert checkpoint.step == 4
    start(path, monkeypatch, resume=checkpoint, run__save_steps=2, algorithm__num_iterations=2)
    assert gold(RunFolder(path)) == expected


def test_the_same_run_twice_is_the_same_and_another_seed_is_not(tmp_path, monkeypatch):
    first, second = (gold(start(tmp_path / name, monkeypatch)) for name in ("a", "b"))
    assert first == second
    assert gold(start(tmp_path / "c", monkeypatch, training__seed=7)) != first


def test_evaluation_changes_no_training_number(tmp_path, monkeypatch):
    rows, weights = gold(start(tmp_path / "without", monkeypatch))
    evaluated = {"evaluation__eval_strategy": "steps", "evaluation__eval_steps": 1, "evaluation__eval_on_start": True}
    other_rows, other_weights = gold(start(tmp_path / "with", monkeypatch, **evaluated))
    assert [row for row in other_rows if not any(k.startswith("eval/") for k in row)] == rows
    assert other_weights == weights
    assert [row["step"] for row in other_rows if any(k.startswith("eval/") for k in row)] == [0, 1, 2, 3, 4, 5, 6]


def test_what_a_run_leaves(tmp_path, monkeypatch):
    folder = start(tmp_path / "run", monkeypatch, run__save_steps=2, run__save_total_limit=2)
    rows = read_metrics(folder.metrics)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert {"reward", "reward_std", "rewards/even/mean", "kl", "kl/sequence", "entropy", "loss", "grad_norm", "learning_rate"} <= set(
        rows[0]
    )
    assert rows[0]["kl"] == 0
    assert rows[0]["epoch"] == pytest.approx(2 / 5)
    assert rows[0]["learning_rate"] > rows[5]["learning_rate"] > 0
    assert list_steps(folder.checkpoints) == [4, 6]
    resolved = folder.recipe.read_text()
    assert "auto" not in [
        line.split()[-1] for line in resolved.splitlines() if "threads" in line or "layout" in line or "head_chunk" in line
    ]
    from datasets import Dataset
    from transformers import AutoModelForCausalLM

    table = Dataset.from_parquet(str(folder.rollout_file(1)), cache_dir=str(tmp_path / "cache"))
    assert len(table) == 6
    assert {"rewards/even", "advantage", "kl", "completion_ids"} <= set(table.column_names)
    loaded = AutoModelForCausalLM.from_pretrained(folder.final)
    assert loaded.config._attn_implementation == "sdpa"
    manifest = json.loads((folder.final / "manifest.json").read_text())
    assert manifest["info"]["step"] == 6


def test_reuse_steps_repeat_no_generation_metrics(tmp_path, monkeypatch):
    rows = read_metrics(start(tmp_path / "run", monkeypatch, algorithm__num_iterations=2).metrics)
    assert ["reward" in row for row in rows] == [True, False] * 3
    assert ["kl" in row for row in rows] == [True, False] * 3
    assert all("clip_ratio/region_mean" in row for row in rows)
    assert rows[0]["num_tokens"] == rows[1]["num_tokens"]


def test_epochs_run_on_and_epoch_strategies_fall_where_an_epoch_ends(tmp_path, monkeypatch):
    folder = start(tmp_path / "run", monkeypatch, run__save_strategy="epoch")
    # 5 prompts, 2 a step: the first epoch ends within step 3, the second with step 5.
    assert list_steps(folder.checkpoints) == [3, 5, 6]


def test_a_stop_before_the_first_step_saves_nothing_and_says_so(tmp_path, monkeypatch):
    with pytest.raises(StoppedError, match="SIGTERM: no step was done"):
        start(tmp_path / "run", monkeypatch, stop_at=0)
    assert list_steps(tmp_path / "run" / "checkpoints") == []


def test_loading_weights_back_gives_the_same_bits(tmp_path, monkeypatch):
    folder = start(tmp_path / "run", monkeypatch, run__save_steps=3)
    saved = find_checkpoint(folder.checkpoints, 6).load_tensors("model")
    from safetensors.torch import load_file

    final = load_file(folder.final / "model.safetensors")
    assert saved.keys() == final.keys()
    assert all(torch.equal(saved[name], final[name]) for name in saved)


def test_weights_held_in_bfloat16_train_and_resume(tmp_path, monkeypatch):
    options = {"model": lambda: tiny.qwen2(dtype=torch.bfloat16), "training__bf16": True, "run__save_steps": 3}
    monkeypatch.setattr(auto, "decide_bf16", lambda training, device: True)
    expected = gold(start(tmp_path / "whole", monkeypatch, **options))
    with pytest.raises(StoppedError):
        start(tmp_path / "stopped", monkeypatch, stop_at=4, **options)
    monkeypatch.setattr(auto, "decide_bf16", lambda training, device: False)  # decided once, not again on resume
    start(tmp_path / "stopped", monkeypatch, resume=find_checkpoint(tmp_path / "stopped" / "checkpoints"), **options)
    assert gold(RunFolder(tmp_path / "stopped")) == expected


def test_kl_is_zero_at_the_first_step_in_bf16_over_float32_masters(tmp_path, monkeypatch):
    def bf16_checkpoint():
        model = tiny.qwen2()
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16().float()
        return model

    monkeypatch.setattr(auto, "decide_bf16", lambda training, device: True)
    rows = read_metrics(start(tmp_path / "run", monkeypatch, model=bf16_checkpoint, training__bf16=True).metrics)
    assert rows[0]["kl"] == 0
    assert rows[1]["kl"] != 0


def test_prompts_come_in_their_own_order_where_shuffling_is_off(tmp_path, monkeypatch):
    import pyarrow.parquet as pq

    folder = start(tmp_path / "run", monkeypatch, data__shuffle_dataset=False)
    rows = [pq.read_table(folder.rollout_file(step))["prompt_row"].to_pylist()[::3] for step in (1, 2, 3)]
    assert rows == [[0, 1], [2, 3], [4, 0]]


def test_rewards_that_never_differ_are_warned_of_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(
        fakes.FakeRewards, "submit", lambda self, key, group, state: self.waiting.update({key: fakes.GroupRewards(values=((1.0,) * 3,))})
    )
    with caplog.at_level("WARNING"):
        folder = start(tmp_path / "run", monkeypatch, algorithm__beta=0.0)
    assert [record.message.split(":")[0] for record in caplog.records if "same reward" in record.message] == ["step 3"]
    rows = read_metrics(folder.metrics)
    assert all(row["groups/zero_std"] == 1 and row["grad_norm"] == 0 and row["rows/skipped"] == 6 for row in rows)


def test_a_split_alone_asks_for_no_evaluation(tmp_path, monkeypatch):
    rows = read_metrics(start(tmp_path / "run", monkeypatch, evaluation__eval_on_start=True).metrics)
    assert [row["step"] for row in rows if any(key.startswith("eval/") for key in row)] == [0]


@pytest.mark.parametrize("uses", [1, 2])
def test_with_overlap_each_batch_but_the_first_is_sampled_a_step_before_while_the_policy_is_updated(uses, tmp_path, monkeypatch):
    calls, updating = [], threading.Event()
    update = Updater.update

    def updated(*arguments):
        updating.set()
        return update(*arguments)

    def generate(step):
        is_ahead = threading.current_thread() is not threading.main_thread()
        calls.append((step, is_ahead))
        if is_ahead:
            assert updating.wait(20), "nothing is updated while the batch is sampled"
        updating.clear()

    monkeypatch.setattr(Updater, "update", updated)
    options = {"training__async_steps": 1, "algorithm__num_iterations": uses}
    rows = read_metrics(start(tmp_path / "run", monkeypatch, on_generate=generate, **options).metrics)
    assert calls == [(step, step > 1) for step in range(1, STEPS + 1, uses)]
    firsts = [row for row in rows if "reward" in row]
    assert [row["sampling/staleness"] for row in firsts] == [0, *[1] * (len(firsts) - 1)]
    assert all(row["clip_ratio/region_mean"] == 0 for row in rows)
    prompts = read_metrics(start(tmp_path / "plain", monkeypatch, algorithm__num_iterations=uses).metrics)
    assert [row["epoch"] for row in rows] == [row["epoch"] for row in prompts]
    assert [row.get("reward") for row in rows] == [row.get("reward") for row in prompts]  # the fake samples whatever the weights


def test_with_overlap_a_stopped_run_goes_on_with_the_prompts_that_are_next(tmp_path, monkeypatch):
    overlap = {"training__async_steps": 1}
    whole = read_metrics(start(tmp_path / "whole", monkeypatch, **overlap).metrics)
    with pytest.raises(StoppedError, match="SIGTERM: step 3 is saved"):
        start(tmp_path / "run", monkeypatch, stop_at=3, **overlap)
    start(tmp_path / "run", monkeypatch, resume=find_checkpoint(tmp_path / "run" / "checkpoints"), **overlap)
    rows = read_metrics(RunFolder(tmp_path / "run").metrics)
    assert [(row["step"], row["reward"], row["epoch"]) for row in rows] == [(row["step"], row["reward"], row["epoch"]) for row in whole]


def test_with_overlap_a_failure_of_the_engine_ahead_ends_the_run(tmp_path, monkeypatch):
    def fail(step):
        if step == 3:
            raise EngineError("gone")

    with pytest.raises(EngineError, match="gone"):
        start(tmp_path / "run", monkeypatch, on_generate=fail, training__async_steps=1)
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2]
    assert all(not thread.name.startswith("generate-ahead") for thread in threading.enumerate())


def test_with_overlap_a_failure_of_the_update_ends_what_is_sampled_ahead(tmp_path, monkeypatch):
    started = threading.Event()

    def slow(step):
        if step == 3:
            started.set()
            for _ in range(2000):  # as an engine does between tokens
                time.sleep(0.01)
                checks[-1]()

    def update(self, experience, use, step):
        if step == 2:
            assert started.wait(20)
            raise StorageError("gone")
        return real(self, experience, use, step)

    checks, real = [], Updater.update
    generate = fakes.FakeEngine.generate
    monkeypatch.setattr(
        fakes.FakeEngine, "generate", lambda self, *a, check_stop=None, **k: (checks.append(check_stop), generate(self, *a, **k))[1]
    )
    monkeypatch.setattr(Updater, "update", update)
    with pytest.raises(StorageError):
        start(tmp_path / "run", monkeypatch, on_generate=slow, training__async_steps=1)
    assert all(not thread.name.startswith("generate-ahead") for thread in threading.enumerate())


@pytest.mark.parametrize("save_steps", [1, 100])
def test_weights_that_an_update_made_infinite_are_never_saved(save_steps, tmp_path, monkeypatch):
    step = Updater._step_optimizer

    def overflowing(updater, number):
        metrics = step(updater, number)
        if number == STEPS:
            next(updater.policy.parameters()).data.fill_(float("inf"))
        return metrics

    monkeypatch.setattr(Updater, "_step_optimizer", overflowing)
    with pytest.raises(NonFiniteError, match=f"step {STEPS}: the weights hold NaN or infinity after the update, first in .*embed"):
        start(tmp_path / "run", monkeypatch, run__save_steps=save_steps)
    assert list_steps(tmp_path / "run" / "checkpoints") == list(range(1, STEPS)) * (save_steps == 1)
    assert not (tmp_path / "run" / "final").exists()


def retuned():
    model = tiny.qwen2()
    model.config.rms_norm_eps = 1e-3
    return model


def one_value_changed():
    model = tiny.qwen2()
    with torch.no_grad():
        model.model.embed_tokens.weight[17, 5] += 1e-3
    return model


@pytest.mark.parametrize("other", [retuned, one_value_changed])
def test_another_base_model_is_refused_on_resume(tmp_path, monkeypatch, other):
    with pytest.raises(StoppedError):
        start(tmp_path / "run", monkeypatch, stop_at=2)
    found = find_checkpoint(tmp_path / "run" / "checkpoints")
    with pytest.raises(RefusedError, match="is not the model that"):
        start(tmp_path / "run", monkeypatch, resume=found, model=other)
    start(tmp_path / "run", monkeypatch, resume=found)
