from __future__ import annotations

import json
import subprocess
from datetime import datetime
from importlib import metadata

from rloo_cli.run import environment


def test_it_is_json_with_versions_command_and_hardware(tmp_path):
    now = datetime(2026, 1, 31, 17, 45, 1)
    described = environment.describe_environment(command=["rloo", "train", "r.yaml"], recipe_folder=tmp_path, now=now)
    again = json.loads(json.dumps(described))
    assert again["command"] == ["rloo", "train", "r.yaml"]
    assert again["time"] == "2026-01-31T17:45:01"
    assert again["packages"]["torch"] == metadata.version("torch")
    assert again["cores"] >= 1
    assert again["memory_bytes"] > 2**28
    assert again["cpu"]
    assert again["git"] is None


def test_no_environment_variable_gets_in(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    described = environment.describe_environment(command=[], recipe_folder=tmp_path, now=datetime(2026, 1, 1))
    assert "hf_very_secret" not in json.dumps(described)


def git(folder, *arguments):
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


def test_the_commit_of_the_recipes_folder_and_whether_it_was_changed(tmp_path):
    git(tmp_path, "init")
    (tmp_path / "r.yaml").write_text("a: 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "x")
    (tmp_path / "untracked").write_text("")
    state = environment.git_state(tmp_path)
    assert len(state["commit"]) == 40
    assert state["changed"] is False
    (tmp_path / "r.yaml").write_text("a: 2\n")
    assert environment.git_state(tmp_path)["changed"] is True


def test_without_git_or_nvidia_smi_the_answer_is_absent(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment.git_state(tmp_path) is None
    assert environment.gpu_names() == []
