from __future__ import annotations

import json
from pathlib import Path

import yaml

from rloo_cli.cli.app import exit_code_of
from rloo_cli.plan.shipped import shipped_folder
from rloo_cli.recipe.load import load_recipe


def output_of(capsys, *arguments: str, code: int = 0) -> str:
    found = exit_code_of(["show", *arguments])
    captured = capsys.readouterr()
    assert found == code, captured.err
    return captured.out if code == 0 else captured.err


def sources_of(capsys, *arguments: str) -> dict[str, dict]:
    return {each["field"]: each for each in json.loads(output_of(capsys, *arguments, "--sources", "--json"))}


def test_what_is_shown_is_the_recipe(tmp_path, capsys):
    shown = tmp_path / "shown.yaml"
    shown.write_text(output_of(capsys, "quickstart", "--set", "beta=0.25"))
    loaded = load_recipe(shown).recipe
    assert loaded == load_recipe(shipped_folder() / "quickstart.yaml", overrides=["beta=0.25"]).recipe
    assert loaded.algorithm.beta == 0.25
    assert json.loads(output_of(capsys, "quickstart", "--json"))["algorithm"]["beta"] == 0.0


def test_every_value_has_its_source(tmp_path, capsys):
    base, recipe = tmp_path / "base.yaml", tmp_path / "mine.yaml"
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "x"}\n')
    base.write_text(
        "model: {model_name_or_path: a/b}\ndata:\n  dataset_name: prompts.jsonl\nreward_funcs: [accuracy_reward]\nkl_coef: 0.1\n"
    )
    recipe.write_text(
        "extends: base.yaml\nreward_weights: [2]\ntraining:\n  learning_rate: 1e-5\nevaluation:\n  eval_strategy: steps\n"
        "data: {dataset_test_split: test}\n"
    )
    found = sources_of(capsys, str(recipe), "--set", "generation.num_generations=4", "--set", "rewards[0].kwargs={column: gold}")
    assert found["training.learning_rate"]["place"] == f"{recipe}:4:18"
    assert (found["data.dataset_name"]["place"], found["data.dataset_name"]["kind"]) == (f"{base}:3:17", "file")
    assert found["algorithm.beta"]["place"] == f"{base}:5:10"
    assert found["algorithm.beta"]["note"] == "there called kl_coef"
    assert (found["rewards[0].function"]["place"], found["rewards[0].weight"]["place"]) == (f"{base}:4:16", f"{recipe}:2:18")
    assert (found["generation.num_generations"]["kind"], found["generation.num_generations"]["place"]) == (
        "set",
        "--set generation.num_generations=4",
    )
    assert found["rewards[0].kwargs"]["kind"] == "set"
    assert (found["algorithm.epsilon"]["kind"], found["algorithm.epsilon"]["place"]) == ("default", "")
    assert (found["evaluation.eval_steps"]["kind"], found["evaluation.eval_steps"]["note"]) == ("rule", "10, as logging_steps")
    assert found["training.per_device_train_batch_size"]["note"] == "8, since prompts_per_step is not given either"
    assert found["training.prompts_per_step"]["note"] == "2, of the completions of a step"


def test_sources_cover_the_recipe_and_a_relative_path_is_told(capsys):
    lines = [line.split("\t") for line in output_of(capsys, "quickstart", "--sources").splitlines()]
    assert lines[0] == ["field", "value", "from"]
    recipe = load_recipe(shipped_folder() / "quickstart.yaml").recipe.model_dump()
    leaves = {f"{section}.{name}" for section, values in recipe.items() if section != "rewards" for name in values}
    assert leaves <= {line[0] for line in lines}
    (model,) = [line for line in lines if line[0] == "model.model_name_or_path"]
    assert model[2].endswith("quickstart.yaml:11:23, found beside it")


def test_a_run_against_its_recipe(finished, capsys):
    document = json.loads(output_of(capsys, str(finished), "--diff", "smoke", "--json"))
    assert (document["left"], document["right"]) == (str(finished), "smoke")
    fields = {each["field"]: (each["left"], each["right"]) for each in document["differences"]}
    assert fields["training.threads"] == (1, "auto")
    assert fields["run.num_processes"] == (1, "auto")
    assert "training.max_steps" not in fields


def test_differences_stand_in_two_columns(tmp_path, capsys):
    other = tmp_path / "other.yaml"
    other.write_text(yaml.safe_dump({"extends": str(shipped_folder() / "smoke.yaml"), "rewards": [{"function": "think_format_reward"}]}))
    lines = [line.split("\t") for line in output_of(capsys, "smoke", "--diff", str(other), "--set", "seed=7").splitlines()]
    assert lines[0] == ["field", "smoke", str(other)]
    assert ["training.seed", "7", "1"] in lines
    assert ["rewards[0].function", "smoke.reward.share_of_letters", "rloo_cli.rewards.think_format_reward"] in lines
    assert ["rewards[1].weight", "0.1", "—"] in lines
    assert output_of(capsys, "smoke", "--diff", "smoke") == ""


def test_what_is_no_recipe_is_refused(tmp_path, capsys):
    assert "a folder without a recipe.yaml" in output_of(capsys, str(tmp_path), code=2)
    assert "Did you mean `smoke`?" in output_of(capsys, "smok", code=2)
    assert "no such file" in output_of(capsys, "smoke", "--diff", "no/such.yaml", code=2)
    bad = tmp_path / "bad.yaml"
    bad.write_text("model: {}\n")
    assert f"{bad}:1:1: model.model_name_or_path: required" in output_of(capsys, str(bad), code=2)
    assert "one of them at a time" in output_of(capsys, "smoke", "--sources", "--diff", "smoke", code=2)
    assert Path(bad).read_text() == "model: {}\n"
