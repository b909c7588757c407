"""How a model lies over the processes that train it: one of our configurations by name, a file of `accelerate config`, or a launcher's word."""

from __future__ import annotations

import os.path
from dataclasses import replace
from pathlib import Path

from rloo_cli.errors import RecipeError
from rloo_cli.recipe.accelerate_file import read_file
from rloo_cli.recipe.accelerate_keys import STRATEGIES
from rloo_cli.recipe.distribution import Distribution
from rloo_cli.recipe.fields import closest
from rloo_cli.recipe.nodes import printable

CONFIGS = Path(__file__).resolve().parent.parent / "launch" / "configs"
"""Our configurations, `fsdp2.yaml`; `accelerate launch --config_file` takes them too."""


def read_distribution(name_or_path: str, folder: Path) -> Distribution:
    """The distribution of that name, or in that file (relative to `folder`).

    Raises:
        RecipeError: `file:line:column: key: …` where the file is wrong, asks for what is not offered, or does not exist.
    """
    if name_or_path in STRATEGIES:
        return replace(read_file(CONFIGS / f"{name_or_path}.yaml"), num_machines=None, machine_rank=None)
    path = folder / name_or_path
    if not os.path.isfile(path) and not name_or_path.endswith((".yaml", ".yml", ".json")):  # noqa: PTH113 - Path.is_file raises for a name too long
        near = closest(name_or_path, STRATEGIES)
        raise RecipeError(
            f"`{printable(name_or_path, 200)}` is none of {', '.join(STRATEGIES)}, and no file of `accelerate config` either"
            f"{f'; did you mean `{near}`?' if near else '.'}"
        )
    return read_file(path)


def agreed_distribution(name_or_path: str, launched: Distribution | None, *, is_written: bool) -> Distribution:
    """What the recipe says and a launcher of the user's own does not contradict; the launcher's, where the recipe does not say it.

    Args:
        name_or_path: the recipe's `accelerate_config`.
        launched: as `distribution_of_environment` has it.
        is_written: whether the recipe's author or the command line has written it.

    Raises:
        RecipeError: as `read_distribution`; or both say something else.
    """
    if launched is not None and not is_written:
        return launched
    asked = read_distribution(name_or_path, Path())
    if launched is not None and not launched.is_same_layout(asked):
        raise RecipeError(
            f"`{name_or_path}` is asked for, and the launcher that started this process says {_words(launched)}: write the same in both, or "
            "leave it out of the recipe."
        )
    return asked


def refuse_other_precision(distribution: Distribution, *, is_low: bool) -> None:
    """Raise RecipeError where a file says another precision than the recipe's `bf16`."""
    said = distribution.mixed_precision
    if said is not None and (said == "bf16") != is_low:
        raise RecipeError(
            f"its mixed_precision is {said}, and the recipe's bf16 is {str(is_low).lower()}: write `bf16: {str(not is_low).lower()}` in the "
            "recipe, or leave mixed_precision out of the file."
        )


def _words(distribution: Distribution) -> str:
    """`fsdp2 (fsdp_reshard_after_forward false)`."""
    said = [
        *(["fsdp_reshard_after_forward false"] if not distribution.reshard_after_forward else []),
        *(["fsdp_offload_params true"] if distribution.cpu_offload else []),
        *distribution.zero,
    ]
    return f"{distribution.strategy} ({', '.join(said)})" if said else distribution.strategy
