"""All looks, in the order in which they are told. The slow one, torch, runs beside the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rloo_cli.doctor.check import Check, judged
from rloo_cli.doctor.machine import look_at_clock, look_at_limits, look_at_memory, look_at_ports, look_at_shared_memory
from rloo_cli.doctor.places import look_at_hub, look_at_output
from rloo_cli.doctor.software import look_at_extras, look_at_floors, look_at_packages, look_at_pins, look_at_python
from rloo_cli.doctor.surroundings import look_at_launcher, look_at_slurm
from rloo_cli.doctor.torch_probe import TorchProbe
from rloo_cli.errors import RecipeError, RlooError
from rloo_cli.plan.extras import check_deepspeed, missing_extras
from rloo_cli.plan.prepare import CheckedRecipe, check_recipe
from rloo_cli.serving.command import KEY_VARIABLE
from rloo_cli.serving.key import read_key

DEFAULT_OUTPUT = "runs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What to look at beside the machine."""

    recipe: str | None = None
    """A recipe's file or shipped name, whose needs are looked at."""
    server: str | None = None
    """Address of a vLLM server; None = the recipe's, if it has one."""
    key_file: str | None = None
    output_dir: str | None = None
    """Where runs go; None = where the recipe says, else runs/."""


def examine(asked: Asked, environ: Mapping[str, str]) -> Iterator[Check]:
    """Every check, one after the other."""
    probe = TorchProbe(environ)
    checked, about_recipe = _recipe(asked.recipe) if asked.recipe is not None else (None, None)
    yield look_at_python()
    yield look_at_packages()
    yield look_at_pins()
    yield look_at_floors()
    yield look_at_extras()
    yield look_at_memory()
    yield look_at_shared_memory()
    yield look_at_limits()
    yield look_at_clock()
    yield look_at_output(_output_folder(asked, checked))
    yield look_at_hub(environ)
    yield look_at_ports()
    yield look_at_launcher(environ)
    yield look_at_slurm(environ)
    yield from probe.checks()
    if about_recipe is not None:
        yield about_recipe
    yield from _server(asked, checked, environ)


def _output_folder(asked: Asked, checked: CheckedRecipe | None) -> Path:
    written = checked.loaded.recipe.run.output_dir if checked is not None else None
    return Path(asked.output_dir or written or DEFAULT_OUTPUT)


def _recipe(name: str) -> tuple[CheckedRecipe | None, Check]:
    """The recipe, valid by itself with its reward functions found, and what it lacks here."""
    try:
        checked = check_recipe(name, is_training=True)
    except RlooError as error:
        lines = error.message.splitlines()
        more = f" (and {len(lines) - 1} more lines)" if len(lines) > 1 else ""
        return None, judged("recipe", lines[0] + more, remedy=f"rloo plan {name} --no-model tells all of it", fails=True)
    missing = missing_extras(checked.loaded.recipe)
    try:
        check_deepspeed(checked.loaded.distribution)
    except RecipeError as error:
        missing.append(error.message)
    said = "; ".join(missing) if missing else f"{name} is valid, its reward functions are found, and no package is missing"
    return checked, judged("recipe", said, remedy="install it, or change the recipe", fails=bool(missing))


def _server(asked: Asked, checked: CheckedRecipe | None, environ: Mapping[str, str]) -> Iterator[Check]:
    generation = checked.loaded.recipe.generation if checked is not None else None
    address, key_file = asked.server, asked.key_file
    if generation is not None and generation.use_vllm and generation.vllm_mode == "server":
        address = address or generation.vllm_server_base_url or f"http://{generation.vllm_server_host}:{generation.vllm_server_port}"
        key_file = key_file or generation.vllm_server_key_file
    if address is None:
        return
    from rloo_cli.doctor.server import look_at_server

    try:
        key = read_key(Path(key_file).expanduser()) if key_file is not None else environ.get(KEY_VARIABLE) or None
    except RlooError as error:
        yield judged("server", error.message, remedy="the key file is the one that `rloo vllm-serve --key-file` made", fails=True)
        return
    yield look_at_server(address, key)
