"""What a recipe is about in a sentence, and what it takes to run it, from its text and its fields alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rloo_cli.errors import RecipeError
from rloo_cli.recipe.load import load_recipe
from rloo_cli.recipe.schema import Recipe

MATH_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward")
COMMAND = re.compile(r"#\s+(?:rloo train|rloo plan) \S+(?: --\S+ \S+)*\s{2,}(?P<note>\S.*)")
HUB = "from the Hugging Face hub"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeCard:
    """A recipe on one line."""

    name: str
    """By which `rloo train` knows it."""
    path: Path
    about: str
    """The first sentence of its comment."""
    runs_on: str
    """What its comment says beside the command: `a GPU with 24 GB`."""
    needs: tuple[str, ...]
    """Beyond this machine and the base installation."""
    missing: tuple[str, ...]
    """Those of them that are packages and not installed here."""
    is_folder: bool = False
    """Whether it is a folder to begin from."""


def recipe_card(path: Path, *, name: str, is_folder: bool = False) -> RecipeCard:
    """The card of a recipe's file; what cannot be read says so in the sentence."""
    try:
        text, recipe = path.read_text(encoding="utf-8"), load_recipe(path).recipe
    except (OSError, ValueError, RecipeError) as error:
        return RecipeCard(
            name=name, path=path, about=f"cannot be read: {error}"[:200], runs_on="", needs=(), missing=(), is_folder=is_folder
        )
    packages = dict(_packages(recipe))
    return RecipeCard(
        name=name,
        path=path,
        about=_about(text),
        runs_on=_runs_on(text),
        needs=(*_from_hub(recipe), *packages),
        missing=tuple(label for label, module in packages.items() if find_spec(module) is None),
        is_folder=is_folder,
    )


def _comment(text: str) -> list[str]:
    """The lines of the comment at the top, without the editor's."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        if "yaml-language-server" not in line:
            lines.append(line)
    return lines


def _about(text: str) -> str:
    """The first paragraph of the comment, up to the end of its first sentence."""
    words: list[str] = []
    for line in _comment(text):
        line = line.lstrip("#").strip()
        if not line and words:
            break
        words.append(line)
    sentence = re.match(r".*?[.?!](?=\s|$)", " ".join(words).strip())
    return sentence[0] if sentence else " ".join(words).strip()


def _runs_on(text: str) -> str:
    notes = [match["note"] for line in _comment(text) if (match := COMMAND.fullmatch(line))]
    note = notes[-1] if len(notes) > 1 and "GPU" in notes[-1] else notes[0] if notes else ""
    return note.partition(";")[0].strip()


def _from_hub(recipe: Recipe) -> Iterator[str]:
    hub = [
        kind
        for kind, value in (
            ("model", recipe.model.model_name_or_path),
            ("data", recipe.data.dataset_name),
            *(("data", entry.path) for entry in recipe.data.datasets),
            *(("reward model", entry.model) for entry in recipe.rewards),
        )
        if value is not None and not Path(value).is_absolute()
    ]
    if hub:
        yield f"{' and '.join(dict.fromkeys(hub))} {HUB}"


def _packages(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """(what to call it, the module that it brings) of each extra."""
    if any((entry.function or "").rpartition(".")[2] in MATH_REWARDS for entry in recipe.rewards):
        yield "extra `math`", "math_verify"
    if recipe.generation.use_vllm and recipe.generation.vllm_mode == "colocate":
        yield "extra `vllm`", "vllm"
