"""`RLOOConfig`: the fields of a recipe by their names, checked when it is made."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rloo_cli.api.plain import CONFIG, plain
from rloo_cli.errors import RecipeError
from rloo_cli.launch.given import place_of
from rloo_cli.recipe.dump import dump_document
from rloo_cli.recipe.fields import LEAVES
from rloo_cli.recipe.load import LoadedRecipe, load_recipe
from rloo_cli.trl_import.objects import init_fields

STAND_INS = {"model_name_or_path": "stand/in", "dataset_name": "stand/in", "dataset_test_split": "test"}
"""For what the trainer is given, while a config is checked alone."""


class RLOOConfig:
    """How to train: fields of a recipe, and keys of TRL's RLOOConfig, as keyword arguments.

    Every name and value is checked at once; so are the rules between them, as far as they do not hang on model, data and rewards. What is
    left out has the recipe's default. `trust_remote_code=True` is the command line's `--trust-remote-code`.

    Example: `RLOOConfig(output_dir="runs/mine", num_generations=8, learning_rate=1e-6, use_vllm=True, vllm_mode="server")`
    """

    def __init__(self, output_dir: str | os.PathLike[str] | None = None, **fields: Any) -> None:
        """`output_dir`: the run folder; None = runs/PROGRAM-DATE-TIME.

        Raises:
            RecipeError: a name that is unknown (with the nearest that is), a value that does not fit, or a contradiction.
        """
        given = fields if output_dir is None else {"output_dir": output_dir, **fields}
        given = {name: plain(name, value) for name, value in _expanded(given).items()}
        self.trust_remote_code = _flag("trust_remote_code", given.pop("trust_remote_code", False))
        self._given: Mapping[str, Any] = given
        self._loaded = self._checked()

    @property
    def given(self) -> dict[str, Any]:
        """What was given, as plain data."""
        return dict(self._given)

    def is_given(self, name: str) -> bool:
        """Whether a field was given, in a section or not."""
        return name in self._given or name in self._given.get(LEAVES[name].section, {})

    def __getattr__(self, name: str) -> Any:
        if name in LEAVES and "_loaded" in self.__dict__:
            return (
                None if name in STAND_INS and not self.is_given(name) else getattr(getattr(self._loaded.recipe, LEAVES[name].section), name)
            )
        raise AttributeError(f"{CONFIG} has no field `{name}`")

    def __reduce__(self) -> tuple[Any, ...]:
        return _remade, ({**self._given, "trust_remote_code": self.trust_remote_code},)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *LEAVES]

    def __repr__(self) -> str:
        return f"{CONFIG}({', '.join(f'{name}={value!r}' for name, value in self._given.items())})"

    def _checked(self) -> LoadedRecipe:
        others = {name: value for name, value in self._given.items() if name not in ("rewards", "reward_funcs", "reward_weights")}
        stand_ins = {name: value for name, value in STAND_INS.items() if not self.is_given(name)}
        if self._given.get("datasets"):
            del stand_ins["dataset_name"]
        place = place_of(os.environ)
        return read_text(
            dump_document({**others, **stand_ins, "reward_funcs": ["accuracy_reward"]}),
            num_processes=1 if place is None else place.world_size,
        )


def read_text(text: str, *, num_processes: int) -> LoadedRecipe:
    """The recipe of this text, its errors placed at `RLOOConfig`; relative paths begin in the working folder."""
    return load_recipe(Path.cwd() / CONFIG, text=text, num_processes=num_processes)


def _remade(fields: Mapping[str, Any]) -> RLOOConfig:
    """A config out of a pickle or a copy, checked anew."""
    return RLOOConfig(**fields)


def _flag(name: str, value: Any) -> bool:
    """A field that allows something, hence takes no text: `"no"` would be true."""
    if not isinstance(value, bool):
        raise RecipeError(f"{CONFIG}: {name}: expected true or false, got {value!r}.")
    return value


def _expanded(given: Mapping[str, Any]) -> dict[str, Any]:
    """What was given, with `model_init_kwargs` as the fields that it says."""
    kwargs = given.get("model_init_kwargs")
    if not isinstance(kwargs, Mapping):
        return dict(given)
    fields, faults = init_fields(kwargs)
    faults += [f"{name}: given twice, in model_init_kwargs too." for name in fields if name in given]
    if faults:
        raise RecipeError("\n".join(f"{CONFIG}: {fault}" for fault in faults))
    return {name: value for name, value in given.items() if name != "model_init_kwargs"} | fields
