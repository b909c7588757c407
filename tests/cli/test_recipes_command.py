from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from rloo_cli.cli.app import exit_code_of
from rloo_cli.inspect.recipe_values import differences
from rloo_cli.plan.prepare import check_recipe
from rloo_cli.plan.shipped import shipped_folder, shipped_recipes
from rloo_cli.recipe.load import load_recipe

ROOT = Path(__file__).resolve().parent.parent.parent


def output_of(capsys, *arguments: str, code: int = 0) -> str:
    found = exit_code_of(["recipes", *arguments])
    captured = capsys.readouterr()
    assert found == code, captured.err
    return captured.out if code == 0 else captured.err


def test_ls_has_a_line_a_recipe_with_what_it_needs(capsys):
    lines = [line.split("\t") for line in output_of(capsys, "ls").splitlines()]
    by_name = {line[0]: line for line in lines[1:]}
    assert lines[0] == ["name", "runs on", "needs", "about"]
    assert set(by_name) == {*shipped_recipes(), "template"}
    assert by_name["gsm8k"][1:3] == ["a GPU with 24 GB", "model and data from the Hugging Face hub; extra `math`"]
    assert by_name["smoke"][1:3] == ["seconds, no network", ""]
    assert by_name["quickstart-vllm"][2] == "extra `vllm`"
    assert by_name["quickstart"][3] == 'A model of 0.44 million parameters learns to think before it answers "What is 47+38+85?".'


def test_ls_for_machines_says_what_is_missing(capsys, monkeypatch):
    from rloo_cli.inspect import recipe_needs

    monkeypatch.setattr(recipe_needs, "find_spec", lambda module: None)
    cards = {card["name"]: card for card in json.loads(output_of(capsys, "ls", "--json"))}
    assert cards["gsm8k"]["missing"] == ["extra `math`"]
    assert cards["smoke"]["missing"] == []
    assert Path(cards["code"]["path"]).is_file()


def test_show_prints_the_very_text(capsys):
    assert output_of(capsys, "show", "quickstart") == (shipped_folder() / "quickstart.yaml").read_text()
    assert "Did you mean `quickstart`?" in output_of(capsys, "show", "quickstar", code=2)


@pytest.mark.parametrize("name", [*shipped_recipes(), "template"])
def test_a_copy_means_the_same_and_finds_its_rewards(name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written = output_of(capsys, "cp", name, "mine" if name == "template" else "deep/mine.yaml").splitlines()
    assert all(Path(path).is_file() for path in written)
    copy = next(path for path in written if path.endswith(".yaml"))
    source = shipped_folder() / ("template/recipe.yaml" if name == "template" else f"{name}.yaml")
    changed = differences([check_recipe(copy).loaded.recipe, load_recipe(source).recipe])
    assert {each.field for each in changed} <= ({"data.dataset_name"} if name == "template" else set())
    assert len(Path(copy).read_text().splitlines()) == len(source.read_text().splitlines())
    schema = Path(copy).read_text().splitlines()[0].partition("$schema=")[2]
    assert Path(schema).is_absolute()
    assert Path(schema).is_file()


def test_the_rewards_of_a_copy_are_its_own(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert output_of(capsys, "cp", "quickstart-vllm").splitlines() == ["quickstart-vllm.yaml", "quickstart/reward.py"]
    assert check_recipe("./quickstart-vllm.yaml").sources[0].file == str(tmp_path / "quickstart" / "reward.py")


def test_nothing_is_overwritten_and_then_nothing_is_written(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gsm8k.yaml").write_text("mine")
    assert "gsm8k.yaml exists already" in output_of(capsys, "cp", "gsm8k", code=2)
    (tmp_path / "smoke").mkdir()
    (tmp_path / "smoke" / "reward.py").write_text("mine")
    assert "smoke/reward.py exists already" in output_of(capsys, "cp", "smoke", "new.yaml", code=2)
    assert not (tmp_path / "new.yaml").exists()
    assert "smoke exists already" in output_of(capsys, "cp", "template", "smoke", code=2)
    assert (tmp_path / "smoke" / "reward.py").read_text() == (tmp_path / "gsm8k.yaml").read_text() == "mine"
    (tmp_path / "dangling.yaml").symlink_to(tmp_path / "elsewhere.yaml")
    assert "exists already" in output_of(capsys, "cp", "gsm8k", "dangling.yaml", code=2)
    assert not (tmp_path / "elsewhere.yaml").exists()


def test_a_folder_as_target_gets_the_recipe_into_it(tmp_path, capsys):
    assert output_of(capsys, "cp", "gsm8k", str(tmp_path)) == f"{tmp_path / 'gsm8k.yaml'}\n"


def test_an_installed_wheel_has_them(tmp_path):
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    built = subprocess.run(build, capture_output=True, text=True, cwd=ROOT, timeout=100)
    assert built.returncode == 0, built.stderr
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path / "site")
    command = [sys.executable, "-P", "-m", "rloo_cli", "recipes", "ls", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    listed = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=60)
    cards = json.loads(listed.stdout)
    assert {card["name"] for card in cards} == {*shipped_recipes(), "template"}
    assert all(card["path"].startswith(str(tmp_path / "site" / "rloo_cli" / "_recipes")) for card in cards)
    assert not any(card["about"].startswith("cannot be read") for card in cards)
