from __future__ import annotations

from synthetic import write_run

from rloo_cli.inspect.run_state import distinct_names
from rloo_cli.report.run_view import view_runs
from rloo_cli.report.settings import Setting, environment_settings, recipe_settings
from rloo_cli.run.folder import RunFolder


def test_a_recipe_is_told_by_what_it_changes(tmp_path):
    settings = {setting.name: setting for setting in recipe_settings(view_runs([write_run(tmp_path / "run")]))}
    assert settings["algorithm.beta"] == Setting(name="algorithm.beta", values=("0.02",), default="0.05")
    assert settings["model.model_name_or_path"] == Setting(name="model.model_name_or_path", values=("some/model",), default="—")
    assert settings["rewards[style].weight"].values == ("0.25",)
    assert "rewards[correct].weight" not in settings
    assert "algorithm.epsilon" not in settings


def test_runs_are_held_against_each_other(tmp_path):
    first, second, third = (write_run(tmp_path / name, steps=steps) for name, steps in (("a", 20), ("b", 30), ("c", 30)))
    RunFolder(third).recipe.unlink()
    settings = recipe_settings(view_runs([first, second, third]))
    steps = next(setting for setting in settings if setting.name == "training.max_steps")
    assert steps.values == ("20", "30", "—")
    assert steps.differs


def test_the_environment_is_told_in_words(tmp_path):
    settings = {setting.name: setting.values for setting in environment_settings(view_runs([write_run(tmp_path / "run")]))}
    assert settings["processor"] == ("A Processor, 16 cores usable",)
    assert settings["memory"] == ("128 GiB",)
    assert settings["GPUs"] == ("none",)
    assert settings["torch"] == ("2.13.0",)


def test_names_of_runs_tell_them_apart(tmp_path):
    paths = [tmp_path / "x" / "run", tmp_path / "y" / "run", tmp_path / "other"]
    assert distinct_names(paths)[:2] == ["x/run", "y/run"]
    assert distinct_names([paths[0], paths[2]]) == ["run", "other"]
