"""The best checkpoint by an evaluation's metric: told, kept beside the newest, remembered over a resume."""

import pytest
from test_run import STEPS, gold, start

from rloo_cli.errors import RecipeError, StoppedError
from rloo_cli.recipe.schema import RunSection
from rloo_cli.run.checkpoint import find_checkpoint, list_steps
from rloo_cli.run.folder import RunFolder
from rloo_cli.run.metrics import evaluation_key, evaluation_keys, read_metrics
from rloo_cli.training.best import Best, better_of, choosing_value

CHOOSING = {
    "evaluation__eval_strategy": "steps",
    "evaluation__eval_steps": 1,
    "run__save_steps": 1,
    "run__save_total_limit": 2,
    "run__metric_for_best_model": "eval_rewards/even/mean",
}


def best_step(folder, greater=True):
    values = {row["step"]: row["eval/rewards/even/mean"] for row in read_metrics(folder.metrics) if "eval/rewards/even/mean" in row}
    assert set(values) == set(range(1, STEPS + 1))
    return (max if greater else min)(values, key=values.get)


@pytest.fixture(autouse=True)
def changing_evaluations(monkeypatch):
    """The fake engine's evaluations, which would all be the same, differ by the weights' version."""
    import fakes

    original = fakes.FakeEngine._completion

    def completion(self, key, row):
        stream = f"{key.stream} {self.weights_version}" if key.stream == "eval" else key.stream
        return original(self, type("Key", (), {"seed": key.seed, "stream": stream, "step": key.step}), row)

    monkeypatch.setattr(fakes.FakeEngine, "_completion", completion)


@pytest.mark.parametrize("greater", [True, False])
def test_the_best_and_the_newest_checkpoint_are_kept(tmp_path, monkeypatch, greater):
    folder = start(tmp_path / "run", monkeypatch, **CHOOSING, run__greater_is_better=greater)
    best = best_step(folder, greater)
    assert best != STEPS, "choose another seed: the best has to be an older one"
    assert list_steps(folder.checkpoints) == [best, STEPS]
    assert find_checkpoint(folder.checkpoints).load_document("position")["best"]["step"] == best


def test_a_resumed_run_still_knows_the_best(tmp_path, monkeypatch):
    whole = start(tmp_path / "whole", monkeypatch, **CHOOSING)
    path = tmp_path / "stopped"
    with pytest.raises(StoppedError):
        start(path, monkeypatch, stop_at=best_step(whole) + 1, **CHOOSING)
    start(path, monkeypatch, resume=find_checkpoint(path / "checkpoints"), **CHOOSING)
    assert gold(RunFolder(path)) == gold(whole)
    assert list_steps(path / "checkpoints") == list_steps(whole.checkpoints)


def test_the_keys_that_are_offered_are_those_of_an_evaluation(tmp_path, monkeypatch):
    folder = start(tmp_path / "run", monkeypatch, **CHOOSING, evaluation__num_generations_eval=2, evaluation__eval_temperature=1.0)
    found = {key for row in read_metrics(folder.metrics) for key in row if key.startswith("eval/")} - {"eval/prompts"}
    offered = set(evaluation_keys(["even"], 2))
    assert found <= offered
    assert offered - found == {"eval/rewards/even/unscored"}


def test_a_logged_metric_that_no_function_reports_is_an_error_that_saves_first(tmp_path, monkeypatch):
    with pytest.raises(RecipeError, match=r"no `custom/colour`; it has .*rewards/even/mean") as caught:
        start(tmp_path / "run", monkeypatch, **{**CHOOSING, "run__metric_for_best_model": "custom/colour"})
    assert caught.value.message.startswith("run.metric_for_best_model: ")
    assert list_steps(tmp_path / "run" / "checkpoints") == [1]


@pytest.mark.parametrize("name", ["reward", "eval_reward", "eval/reward"])
def test_the_spellings_of_a_metric(name):
    assert evaluation_key(name) == "eval/reward"


def test_the_better_of_two():
    run = RunSection(metric_for_best_model="reward")
    first = better_of(run, None, 0.5, 2)
    assert first == Best(metric="eval/reward", value=0.5, step=2)
    assert better_of(run, first, 0.5, 4) == first
    assert better_of(run, first, 0.6, 4).step == 4
    assert better_of(run, first, None, 4) == first
    assert better_of(run.model_copy(update={"greater_is_better": False}), first, 0.4, 4).step == 4
    assert better_of(RunSection(metric_for_best_model="rewards/a/mean"), first, 0.1, 4).value == 0.1
    assert better_of(RunSection(), first, 0.6, 4) is None


def test_a_metric_without_a_value_at_this_evaluation_chooses_nothing():
    assert choosing_value(RunSection(metric_for_best_model="completions/mean_terminated_length"), {"eval/reward": 1.0}) is None
    assert choosing_value(RunSection(), {"eval/reward": 1.0}) is None
