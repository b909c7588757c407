from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
import yaml

from rloo_cli.cli.app import app, exit_code_of
from rloo_cli.cli.arguments import expand_resume
from rloo_cli.cli.fields import SECTIONS, section_fields
from rloo_cli.recipe.load import load_recipe
from rloo_cli.run.metrics import METRICS

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "recipes").rglob("README.md")])
BLOCK = re.compile(r"^```(\w*)[ ]?([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
BASE = {"model": {"model_name_or_path": "some/model"}, "data": {"dataset_name": "some/data"}, "rewards": [{"function": "my.reward"}]}
COMMANDS = typer.main.get_command(app).commands


def blocks(*languages: str) -> list[tuple[Path, str, str]]:
    """(page, file name or "", text) of every fenced block in these languages."""
    return [
        (page, name, text)
        for page in PAGES
        for language, name, text in BLOCK.findall(page.read_text(encoding="utf-8"))
        if language in languages
    ]


def recipe_snippets() -> list[tuple[Path, str]]:
    found = []
    for page, _, text in blocks("yaml"):
        document = yaml.safe_load(text)
        if isinstance(document, dict):
            found.append((page, text))
    return found


def command_lines() -> list[tuple[Path, str]]:
    inline = re.compile(r"`(rloo [^`]+)`")
    found = [(page, match) for page in PAGES for match in inline.findall(BLOCK.sub("", page.read_text(encoding="utf-8")))]
    found += [
        (page, line.strip().removeprefix("$ "))
        for page, _, text in blocks("sh", "bash", "console")
        for line in text.splitlines()
        if re.match(r"\s*(\$ )?rloo ", line)
    ]
    return [(page, line) for page, line in found if "COMMAND" not in line]


def label(case: tuple[Path, str]) -> str:
    page, text = case
    return f"{page.name}:{text.splitlines()[0][:50]}"


def completed(text: str, snippet: dict) -> str:
    """The snippet with what every recipe needs and it leaves out."""
    flat = {"model_name_or_path": "model", "dataset_name": "data", "reward_funcs": "rewards"}
    given = {flat.get(key, key) for key in snippet}
    extra = {key: value for key, value in BASE.items() if key not in given}
    if "model_name_or_path" not in snippet.get("model", {"model_name_or_path": ""}):
        snippet["model"] |= BASE["model"]
        text = yaml.safe_dump(snippet)
    return text + "\n" + (yaml.safe_dump(extra) if extra else "")


@pytest.mark.parametrize("case", recipe_snippets(), ids=label)
def test_every_recipe_snippet_loads(case, tmp_path):
    _, text = case
    snippet = yaml.safe_load(text)
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(BASE))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "x"}\n')
    for folder in ("quickstart", "mixture"):
        (tmp_path / folder).symlink_to(ROOT / "recipes" / folder)
    recipe = tmp_path / "snippet.yaml"
    recipe.write_text(text if "extends" in snippet else completed(text, snippet))
    load_recipe(recipe)


@pytest.mark.parametrize("case", command_lines(), ids=label)
def test_every_command_line_names_what_exists(case):
    _, line = case
    words = expand_resume(shlex.split(line.split("#")[0].split("|")[0].split(">")[0]))[1:]
    if words and words[0].startswith("-"):
        assert words[0] in ("--help", "--version", "--install-completion", "--show-completion")
        return
    assert words[0] in COMMANDS, f"no command {words[0]}"
    command = COMMANDS[words.pop(0)]
    if hasattr(command, "commands") and words:  # rloo rollouts show
        assert words[0] in command.commands, f"no command {command.name} {words[0]}"
        command = command.commands[words.pop(0)]
    options = {option for parameter in command.params for option in getattr(parameter, "opts", [])} | {"--help"}
    for word in words:
        if word.startswith("-"):
            assert word.split("=")[0] in options, f"rloo {command.name} has no {word}"
    for name in re.findall(r"--set (?:[a-z]+\.)?([a-z_]+)=", line):
        assert any(name == field.name for section in SECTIONS for field in section_fields(section)), f"no field {name}"


def test_shipped_recipes_that_pages_name_exist():
    for page in PAGES:
        for name in re.findall(r"(?<![\w/])recipes/[\w./-]+\w", page.read_text(encoding="utf-8")):
            assert (ROOT / name).exists(), f"{page.name} names {name}"


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_generated_parts_are_up_to_date():
    result = subprocess.run([sys.executable, ROOT / "scripts" / "generate_docs.py", "--check"], capture_output=True, text=True)
    assert result.returncode == 0, f"run scripts/generate_docs.py: {result.stdout}{result.stderr}"


def test_every_field_and_metric_is_in_the_pages():
    recipes, metrics = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("recipes.md", "metrics.md"))
    assert [f.name for s in SECTIONS for f in section_fields(s) if f"| `{f.name}` |" not in recipes] == []
    assert [key for key in METRICS if f"| `{key}` |" not in metrics] == []


def test_the_readmes_own_task_trains_as_written(tmp_path, capsys):
    files = {name: text for page, name, text in blocks("json", "python", "yaml") if page.name == "README.md" and name}
    assert sorted(files) == ["my-task/prompts.jsonl", "my-task/recipe.yaml", "my-task/reward.py"]
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    model = ["--set", f"model_name_or_path={ROOT / 'recipes' / 'quickstart' / 'model'}"]
    small = ["--set", "max_steps=1", "--set", "bf16=false", "--set", "max_completion_length=4"]
    recipe = str(tmp_path / "my-task" / "recipe.yaml")
    assert exit_code_of(["rewards", "check", recipe]) == 0
    assert "nothing looks wrong" in capsys.readouterr().out
    assert exit_code_of(["plan", recipe, *model, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["columns"] == ["answer"]
    assert exit_code_of(["train", recipe, *model, *small, "--output-dir", str(tmp_path / "run")]) == 0, capsys.readouterr().err
    assert (tmp_path / "run" / "final" / "model.safetensors").is_file()
