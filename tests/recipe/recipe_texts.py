"""A valid recipe and a way to load changed ones; every test runs in a folder of its own, so that places read `r.yaml:LINE:COLUMN`."""

import re
from pathlib import Path
from typing import Any

from rloo_cli.errors import RecipeError
from rloo_cli.recipe.load import LoadedRecipe, load_recipe

VALID = """\
model:
  model_name_or_path: Qwen/Qwen2-0.5B-Instruct
data:
  dataset_name: trl-lib/DeepMath-103K
rewards:
  - function: accuracy_reward
"""


def load(text: str | bytes, *overrides: str, processes: int = 1, environ: dict[str, str] | None = None) -> LoadedRecipe:
    """The recipe with this text, written to r.yaml of the working directory."""
    Path("r.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_recipe("r.yaml", overrides=overrides, num_processes=processes, environ=environ or {})


def lines_of(text: str | bytes, *overrides: str, processes: int = 1, environ: dict[str, str] | None = None) -> list[str]:
    """The lines of the error that this text gives; without the file's name where they have a line number."""
    try:
        loaded = load(text, *overrides, processes=processes, environ=environ)
    except RecipeError as error:
        return [re.sub(r"^r\.yaml:(?=\d)", "", line) for line in error.message.split("\n")]
    raise AssertionError(f"no error; notices: {loaded.notices}")


def faults_of(text: str | bytes, *overrides: str, **options: Any) -> list[str]:
    """The lines that name a fault, without the one that counts them where there are several."""
    return [line for line in lines_of(text, *overrides, **options) if not re.match(r"\d+ errors\. ", line)]
