"""What `accelerate launch` says of the layout, in the environment of the processes that it starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rloo_cli.errors import RecipeError
from rloo_cli.recipe.accelerate_keys import VERSION_2, whole_number
from rloo_cli.recipe.deepspeed_config import of_deepspeed, of_deepspeed_file
from rloo_cli.recipe.distribution import Distribution
from rloo_cli.recipe.nodes import printable


def distribution_of_environment(environ: Mapping[str, str]) -> Distribution | None:
    """What `accelerate launch` has put into the environment of its processes; None where it asks for no layout.

    Raises:
        RecipeError: it asks for one that is not offered; the environment variable is named.
    """
    if _is_set(environ, "ACCELERATE_USE_MEGATRON_LM"):
        raise _environment_error("ACCELERATE_USE_MEGATRON_LM", "Megatron-LM is not offered; use fsdp2, zero2 or zero3.")
    if _is_set(environ, "ACCELERATE_USE_FSDP") and _is_set(environ, "ACCELERATE_USE_DEEPSPEED"):
        raise _environment_error("ACCELERATE_USE_DEEPSPEED", "contradicts ACCELERATE_USE_FSDP, which is set as well: unset one of them.")
    if _is_set(environ, "ACCELERATE_USE_FSDP"):
        version = environ.get("FSDP_VERSION", "1")
        if version != "2":
            raise _environment_error("FSDP_VERSION", f"is {printable(version, 20)}: {VERSION_2}.")
        return Distribution(
            strategy="fsdp2",
            reshard_after_forward=environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() in ("true", "1", "full_shard"),
            cpu_offload=_is_set(environ, "FSDP_OFFLOAD_PARAMS"),
        )
    if _is_set(environ, "ACCELERATE_USE_DEEPSPEED"):
        return _zero_of_environment(environ)
    return None


def _is_set(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "false").lower() in ("true", "1", "yes", "on")


def _zero_of_environment(environ: Mapping[str, str]) -> Distribution:
    file = environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if file.lower() not in ("", "none"):
        try:
            return of_deepspeed_file(Path(file))
        except RecipeError as error:
            raise _environment_error("ACCELERATE_DEEPSPEED_CONFIG_FILE", error.message) from error
    prefix = "ACCELERATE_DEEPSPEED_"
    values: dict[str, Any] = {"zero_stage": whole_number(environ.get(f"{prefix}ZERO_STAGE", "2"))}
    for name in ("offload_optimizer_device", "offload_param_device"):
        values[name] = environ.get(prefix + name.upper(), "none")
    return of_deepspeed(values, lambda key: f"{_VARIABLE} {prefix}{key.upper()}")


_VARIABLE = "environment variable"


def _environment_error(name: str, message: str) -> RecipeError:
    return RecipeError(f"{_VARIABLE} {name}: {message}")
