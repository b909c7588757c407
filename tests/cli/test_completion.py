from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rloo_cli.cli.completion import complete_recipe, complete_recipe_or_run, complete_run, complete_shipped

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def tree(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("runs/one/metrics.jsonl", "runs/two/recipe.yaml", "runs/notes/readme.txt", "sub/mine.yaml", "quick.yml", ".hidden/x.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    return tmp_path


def test_recipes_are_shipped_ones_and_files(tree):
    assert complete_recipe("qui") == ["quickstart-vllm", "quickstart", "quick.yml"]
    assert complete_recipe("sub/") == ["sub/mine.yaml"]
    assert complete_recipe("no-such") == []
    assert "template" in complete_shipped("")
    assert ".hidden/" not in complete_recipe("")


def test_runs_are_found_below_runs_at_once(tree):
    assert complete_run("") == ["runs/notes/", "runs/one", "runs/two"]
    assert complete_run("runs/o") == ["runs/one"]
    assert complete_run("r") == ["runs/", "runs/notes/", "runs/one", "runs/two"]
    assert complete_run(str(tree / "runs" / "t")) == [str(tree / "runs" / "two")]
    assert complete_recipe_or_run("runs/two") == ["runs/two"]


def test_the_shell_gets_them(tree):
    environment = {**os.environ, "_RLOO_COMPLETE": "complete_bash", "COMP_WORDS": "rloo train smo", "COMP_CWORD": "2"}
    script = "import sys; sys.argv = ['rloo']; from rloo_cli.__main__ import main; main()"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, cwd=ROOT, timeout=60)
    assert result.stdout.split() == ["smoke"], result.stderr
