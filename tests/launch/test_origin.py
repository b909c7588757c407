"""A resume goes on with what the run began with, whatever else of its folder is gone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rloo_cli.cli.app import exit_code_of
from rloo_cli.run.checkpoint import find_checkpoint

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
SETTINGS = ["--set", "lr_scheduler_type=constant", "--set", "save_steps=1"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A copy of the smoke recipe with two runs of it, `one` and `two`, that ended after two steps."""
    place = tmp_path_factory.mktemp("place")
    shutil.copytree(RECIPES / "smoke", place / "smoke")
    shutil.copy(RECIPES / "smoke.yaml", place)
    for name in ("one", "two"):
        assert exit_code_of(["train", str(place / "smoke.yaml"), "--output-dir", str(place / name), *SETTINGS]) == 0
    return place


@pytest.fixture
def run(place, tmp_path):
    """A copy of `one`, to be changed."""
    return Path(shutil.copytree(place / "one", tmp_path / "one"))


def resume(place, run, *more):
    return exit_code_of(["train", str(place / "smoke.yaml"), "--output-dir", str(run), *SETTINGS, "--set", "max_steps=4", *more])


def test_every_checkpoint_says_what_its_run_began_with(place):
    run_id = json.loads((place / "one" / "run.json").read_text())["id"]
    origins = [find_checkpoint(place / "one" / "checkpoints", step).origin() for step in (1, 2)]
    assert [origin["run"] for origin in origins] == [run_id] * 2
    environment = json.loads((place / "one" / "environment.json").read_text())
    assert origins[0]["data"] == environment["data_fingerprint"]
    assert origins[0]["completions_per_step"] == environment["completions_per_step"]
    assert json.loads((place / "two" / "run.json").read_text())["id"] != run_id


def test_changed_prompts_are_refused_without_environment_json(place, run, capsys):
    (run / "environment.json").unlink()
    data = place / "smoke" / "prompts.jsonl"
    text = data.read_text()
    lines = text.splitlines()
    data.write_text("\n".join(lines[1:] + lines[:1]) + "\n")
    assert resume(place, run, "--resume") == 2
    data.write_text(text)
    assert "has changed since" in capsys.readouterr().err
    assert [path.name for path in (run / "logs").iterdir()] == ["attempt-1"]  # what was refused is no attempt that failed


@pytest.mark.parametrize("is_known", [True, False])
def test_a_checkpoint_of_another_run_is_refused_naming_both(place, run, capsys, is_known):
    if not is_known:
        (run / "run.json").unlink()
    before, other = (run / "metrics.jsonl").read_text(), place / "two" / "checkpoints" / "000001"
    assert resume(place, run, f"--resume={other}") == 2
    message = capsys.readouterr().err
    assert f"{other} is of another run" in message
    assert str(run) in message
    assert (run / "metrics.jsonl").read_text() == before


def damage_final(run):
    weights = run / "final" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)
    return bytes(data)


def test_a_damaged_final_model_is_not_evaluated(run, capsys):
    damage_final(run)
    assert exit_code_of(["eval", str(run), "--set", "max_eval_samples=1"]) == 6
    assert "model.safetensors: damaged" in capsys.readouterr().err
    assert exit_code_of(["eval", str(run), "--set", "max_eval_samples=1", "--checkpoint", "latest"]) == 0


def test_auto_says_that_a_final_model_is_damaged_and_writes_it_anew(place, run, capsys):
    whole = (run / "final" / "model.safetensors").read_bytes()
    assert damage_final(run) != whole
    again = ["train", str(place / "smoke.yaml"), "--output-dir", str(run), *SETTINGS, "--resume=auto"]
    assert exit_code_of(again) == 0
    assert "the final model is damaged" in " ".join(capsys.readouterr().out.split())
    assert (run / "final" / "model.safetensors").read_bytes() == whole
    assert exit_code_of(again) == 0
    assert "finished already" in capsys.readouterr().out


def test_a_damaged_final_model_without_a_checkpoint_is_an_error(place, run, capsys):
    changed = damage_final(run)
    shutil.rmtree(run / "checkpoints")
    assert resume(place, run, "--resume=auto") == 6
    assert "no checkpoint to write it from" in capsys.readouterr().err
    assert (run / "final" / "model.safetensors").read_bytes() == changed


def test_an_end_before_the_step_reached_is_refused(place, run, capsys):
    shutil.rmtree(run / "final")
    assert resume(place, run, "--resume", "--set", "max_steps=1") == 2
    message = capsys.readouterr().err
    assert "would end at step 1" in message
    assert "is of step 2" in message
