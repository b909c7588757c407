from __future__ import annotations

from pathlib import Path

import pytest

from rloo_cli.errors import DataError, RecipeError
from rloo_cli.plan import extras
from rloo_cli.plan import prepare as prepare_module
from rloo_cli.plan.prepare import UNLIMITED, check_recipe, check_vllm_length, errors_placed, max_prompt_tokens, prepare, reward_runner
from rloo_cli.plan.render_memory import disk_lines
from rloo_cli.plan.report import differences, notes, recipe_document
from rloo_cli.plan.shipped import find_recipe, shipped_folder
from rloo_cli.recipe.install import install_command

ROOT = Path(__file__).resolve().parent.parent.parent


def check(tmp_path, text=""):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "model:\n  model_name_or_path: some/model\ndata:\n  dataset_name: some/data\nrewards:\n  - function: exact_match_reward\n" + text
    )
    return check_recipe(recipe)


def test_a_shipped_recipe_is_found_by_name_unless_a_file_has_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_recipe("smoke") == shipped_folder() / "smoke.yaml"
    assert find_recipe("smoke.yaml") == shipped_folder() / "smoke.yaml"
    assert find_recipe("no-such") == Path("no-such")
    assert find_recipe("sub/smoke.yaml") == Path("sub/smoke.yaml")
    (tmp_path / "smoke.yaml").write_text("")
    assert find_recipe("smoke.yaml") == Path("smoke.yaml")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("template", "template is a folder to begin from: `rloo recipes cp template my-task`, change"),
        ("quickstar", "quickstar: no such file, and no shipped recipe of that name; there are code, deepmath, "),
        ("quickstar", "Did you mean `quickstart`?"),
        ("no-such.yaml", "no-such.yaml: no such file."),
        ("no/such", "no/such: no such file."),
    ],
)
def test_a_name_that_is_nothing_is_answered_with_what_there_is(tmp_path, monkeypatch, name, told):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError) as caught:
        check_recipe(name)
    assert told in caught.value.message


def test_only_differences_from_the_defaults_are_told(tmp_path):
    recipe = check(tmp_path, "algorithm:\n  beta: 0.1\n  epsilon: 0.2\n").loaded.recipe
    assert {entry["field"]: entry["value"] for entry in differences(recipe)} == {
        "model.model_name_or_path": "some/model",
        "data.dataset_name": "some/data",
        "algorithm.beta": 0.1,
    }


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("generation:\n  top_p: 0.9\n", "the sampler is not the policy"),
        ("generation:\n  repetition_penalty: 1.1\n", "the sampler is not the policy"),
        ("algorithm:\n  num_iterations: 2\n", "serves 2 optimizer steps"),
        ("algorithm:\n  normalize_advantages: true\n", "one more scoring pass"),
        ("algorithm:\n  epsilon: 0.1\n", "not read"),
    ],
)
def test_what_is_easily_overlooked_is_noted(tmp_path, text, note):
    found = recipe_document(check(tmp_path, text))["notes"]
    assert [line for line in found if note in line], found


def test_a_plain_recipe_has_nothing_to_note(tmp_path):
    checked = check(tmp_path)
    assert notes(checked.loaded.recipe, checked.loaded.batch) == []


@pytest.mark.parametrize(
    ("context", "asked", "completion", "expected"),
    [(128, None, 16, 112), (128, 50, 16, 50), (128, 500, 16, 112), (None, None, 16, UNLIMITED), (None, 9, 16, 9), (128, None, None, 127)],
)
def test_the_room_for_a_prompt(tmp_path, context, asked, completion, expected):
    values = {"max_prompt_length": asked, "max_completion_length": completion}
    text = "".join(f"{name}: {'null' if value is None else value}\n" for name, value in values.items())
    assert max_prompt_tokens(check(tmp_path, text).loaded.recipe, context) == expected


def test_completions_that_fill_the_context_are_a_recipe_error(tmp_path):
    with pytest.raises(RecipeError, match="leaves no room for a prompt"):
        max_prompt_tokens(check(tmp_path).loaded.recipe, 256)


def test_later_errors_get_the_fields_place(tmp_path):
    loaded = check(tmp_path).loaded
    with pytest.raises(RecipeError, match=r"r\.yaml:4:17: data\.dataset_name: no such split"), errors_placed(loaded):
        raise RecipeError("data.dataset_name: no such split")
    with pytest.raises(RecipeError, match=r"r\.yaml:6:15: `rloo_cli\.rewards\.exact_match_reward` is slow"), errors_placed(loaded):
        raise RecipeError("`rloo_cli.rewards.exact_match_reward` is slow")
    with pytest.raises(RecipeError, match="^two rewards"), errors_placed(loaded):
        raise RecipeError("two rewards are named `x`")
    with pytest.raises(DataError, match="^a.jsonl:3"), errors_placed(loaded):
        raise DataError("a.jsonl:3: wrong")


def test_missing_extras_come_with_the_install_command(tmp_path, monkeypatch):
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    monkeypatch.setattr("rloo_cli.run.trackers.find_spec", lambda name: None)
    recipe = check(tmp_path, "  - function: accuracy_reward\nrun:\n  report_to: [wandb]\n").loaded.recipe
    first, second = extras.missing_extras(recipe)
    assert install_command("math") in first
    assert "pip install wandb" in second


BEST = "dataset_test_split: test\neval_strategy: steps\neval_temperature: 1.0\nnum_generations_eval: 2\n"


@pytest.mark.parametrize(
    "name", ["reward", "eval_reward", "rewards/exact_match_reward/pass@2", "eval/completions/mean_length", "custom/mine"]
)
def test_the_metric_for_the_best_model_is_one_of_an_evaluation(tmp_path, name):
    assert check(tmp_path, BEST + f"metric_for_best_model: {name}\n").loaded.recipe.run.metric_for_best_model == name


@pytest.mark.parametrize("name", ["eval_loss", "rewards/other/mean", "reward_std", "groups/zero_std"])
def test_another_metric_for_the_best_model_is_refused_with_those_there_are(tmp_path, name):
    with pytest.raises(
        RecipeError, match=rf"r\.yaml:11:24: run\.metric_for_best_model: no evaluation reports `{name}`; there are reward, .*pass@2"
    ):
        check(tmp_path, BEST + f"metric_for_best_model: {name}\n")


@pytest.mark.parametrize(("count", "told"), [(1, "  1 checkpoint of "), (2, "  2 checkpoints of ")])
def test_checkpoints_are_counted_in_words(count, told):
    disk = {"count": count, "checkpoint": 1, "process": 1, "final": 1, "rollouts": 1, "free": 1, "folder": "runs"}
    assert told in "\n".join(disk_lines({"disk": disk}))


@pytest.mark.parametrize(("given", "completion", "is_refused"), [(39, 30, True), (40, 30, False), (10, None, True), (11, None, False)])
def test_vllm_has_room_for_the_longest_prompt_and_its_completion(tmp_path, given, completion, is_refused):
    completion_text = "null" if completion is None else completion
    text = f"generation:\n  use_vllm: true\n  max_completion_length: {completion_text}\n  vllm_max_model_length: {given}\n"
    loaded = check(tmp_path, text).loaded
    if not is_refused:
        check_vllm_length(loaded.recipe, 10)
        return
    with pytest.raises(RecipeError) as caught, errors_placed(loaded):
        check_vllm_length(loaded.recipe, 10)
    needed = 10 + (completion or 1)
    assert f"r.yaml:10:26: generation.vllm_max_model_length: {given} is too small: the longest prompt has 10 tokens" in caught.value.message
    assert f"{needed} are needed" in caught.value.message


def test_the_longest_prompt_of_the_data_counts(monkeypatch):
    monkeypatch.setattr(prepare_module, "check_vllm", lambda recipe: None)
    settings = ["generation.use_vllm=true", "training.bf16=false", "generation.vllm_max_model_length=9"]
    checked = check_recipe("smoke", overrides=settings)
    with pytest.raises(RecipeError, match=r"vllm_max_model_length: 9 is too small: the longest prompt has \d+ tokens"):
        with reward_runner(checked, log_dir=None) as rewards, errors_placed(checked.loaded):
            prepare(checked, rewards)
