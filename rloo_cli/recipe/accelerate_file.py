"""A file of `accelerate config`, read: strategy, offloading, and how many processes and machines there are.

Keys without a meaning here are told in one note; whatever would make accelerate do something that we do not is an error.
"""

from __future__ import annotations

import os.path
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rloo_cli.errors import RecipeError
from rloo_cli.recipe.accelerate_keys import DEEPSPEED_IDLE, FSDP_IDLE, TOP_IDLE, VERSION_2, idle_told, whole_number
from rloo_cli.recipe.deepspeed_config import of_deepspeed, of_deepspeed_file
from rloo_cli.recipe.distribution import Distribution, Precision
from rloo_cli.recipe.nodes import Fields, Node, Problems, printable
from rloo_cli.recipe.scalars import plain_data
from rloo_cli.recipe.yaml_source import FileKind, parse, read_text

REPLICATED_TYPES = ("NO", "MULTI_GPU", "MULTI_CPU")
MOST_COUNT = (1 << 16) - 1
"""Of processes, machines, and a port's number."""
KIND = FileKind(name="a file of `accelerate config`")


@dataclass(frozen=True, slots=True)
class _File:
    """A file's values and their places."""

    path: Path
    tree: Fields
    values: Mapping[str, Any]

    def where(self, key: str) -> str:
        """`my.yaml:7:3: fsdp_config.fsdp_version`."""
        place = self.tree.place
        node: Node = self.tree
        for step in key.split("."):
            pair = node.pairs.get(step) if isinstance(node, Fields) else None
            if pair is None:
                break
            place, node = pair.key_place, pair.node
        return f"{place}: {key}"


def read_file(path: Path) -> Distribution:
    """The distribution that a file says.

    Raises:
        RecipeError: `file:line:column: key: …` where it is wrong, or asks for what is not offered.
    """
    file = _load(path)
    kind = _text(file, "distributed_type", "a file of `accelerate config` says it: MULTI_GPU, FSDP or DEEPSPEED")
    if kind in REPLICATED_TYPES:
        layout = Distribution()
    elif kind == "FSDP":
        layout = _of_fsdp(file)
    elif kind == "DEEPSPEED":
        section = _section(file, "deepspeed_config")
        _refuse_unknown(file, "deepspeed_config", section, {*_DEEPSPEED_KEYS, *DEEPSPEED_IDLE})
        named = section.get("deepspeed_config_file")
        layout = _of_named_file(file, section, str(named)) if named else of_deepspeed(section, lambda key: _where_in(file, key))
        layout = replace(layout, notes=(*layout.notes, *idle_told(path, section, DEEPSPEED_IDLE)))
    else:
        raise RecipeError(f"{file.where('distributed_type')}: {kind[:40]!r} is not offered; MULTI_GPU, FSDP or DEEPSPEED.")
    _refuse_unknown(file, "", file.values, {*_TOP_KEYS, *TOP_IDLE})
    _refuse_foreign_section(file, kind)
    return replace(
        layout,
        num_processes=_count(file, "num_processes", least=1),
        num_machines=_count(file, "num_machines", least=1),
        machine_rank=_count(file, "machine_rank", least=0),
        main_process_ip=_optional_text(file, "main_process_ip"),
        main_process_port=_count(file, "main_process_port", least=0),
        mixed_precision=_precision(file),
        notes=(*idle_told(path, file.values, TOP_IDLE), *layout.notes),
    )


_TOP_KEYS = {
    "compute_environment",
    "distributed_type",
    "num_processes",
    "num_machines",
    "machine_rank",
    "main_process_ip",
    "main_process_port",
    "mixed_precision",
    "fsdp_config",
    "deepspeed_config",
}
_FSDP_KEYS = {"fsdp_version", "fsdp_reshard_after_forward", "fsdp_offload_params"}
_DEEPSPEED_KEYS = {"zero_stage", "offload_optimizer_device", "offload_param_device", "deepspeed_config_file"}


def _load(path: Path) -> _File:
    problems = Problems()
    text = read_text(str(path), problems, KIND)
    tree = parse(text, printable(str(path), 300), problems, kind=KIND) if text is not None else None
    values: Any = plain_data(tree, lambda place, message: problems.add(place, "", message)) if tree is not None else None
    if problems.count:
        raise RecipeError("\n".join(problems.lines()))
    if not isinstance(tree, Fields):
        raise RecipeError(f"{path}: no file of `accelerate config`: expected a mapping that begins with `distributed_type:`.")
    if values.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        raise RecipeError(f"{path}: compute_environment: only LOCAL_MACHINE is offered.")
    return _File(path, tree, values)


def _of_fsdp(file: _File) -> Distribution:
    section = _section(file, "fsdp_config")
    _refuse_unknown(file, "fsdp_config", section, {*_FSDP_KEYS, *FSDP_IDLE})
    if section.get("fsdp_version") != 2:
        found = f"is {printable(str(section['fsdp_version']), 20)}" if "fsdp_version" in section else "is missing, which means 1"
        raise RecipeError(f"{file.where('fsdp_config.fsdp_version')}: {found}: {VERSION_2}.")
    flags = {}
    for name, default in (("fsdp_reshard_after_forward", True), ("fsdp_offload_params", False)):
        flags[name] = section.get(name, default)
        if not isinstance(flags[name], bool):
            raise RecipeError(
                f"{file.where(f'fsdp_config.{name}')}: {printable(repr(flags[name]), 40)} is neither true nor false, which it is in version 2."
            )
    return Distribution(
        strategy="fsdp2",
        reshard_after_forward=flags["fsdp_reshard_after_forward"],
        cpu_offload=flags["fsdp_offload_params"],
        notes=idle_told(file.path, section, FSDP_IDLE),
    )


def _of_named_file(file: _File, section: Mapping[str, Any], name: str) -> Distribution:
    doubled = sorted({"zero_stage", "offload_optimizer_device", "offload_param_device"} & section.keys())
    if doubled:
        raise RecipeError(f"{_where_in(file, doubled[0])}: stands beside deepspeed_config_file, which says it as well: keep one of them.")
    path = Path(name)
    beside = file.path.parent / path
    try:
        return of_deepspeed_file(beside if os.path.lexists(beside) else path)
    except RecipeError as error:
        raise RecipeError(f"{_where_in(file, 'deepspeed_config_file')}: {error.message}") from error


def _where_in(file: _File, key: str) -> str:
    return file.where(f"deepspeed_config.{key}")


def _section(file: _File, name: str) -> Mapping[str, Any]:
    section = file.values.get(name) or {}
    if not isinstance(section, dict):
        raise RecipeError(f"{file.where(name)}: expected a mapping.")
    return section


def _refuse_foreign_section(file: _File, kind: str) -> None:
    """Raise RecipeError for a section that belongs to another `distributed_type`, and would have no effect."""
    for name, owner in (("fsdp_config", "FSDP"), ("deepspeed_config", "DEEPSPEED")):
        if kind != owner and file.values.get(name):
            raise RecipeError(f"{file.where(name)}: is of distributed_type {owner}, and the file says {kind}: remove it, or say {owner}.")


def _refuse_unknown(file: _File, prefix: str, values: Mapping[str, Any], known: set[str]) -> None:
    for key in values:
        if key not in known:
            name = f"{prefix}.{key}" if prefix else key
            raise RecipeError(f"{file.where(name)}: not known here; remove it if training does not depend on it.")


def _text(file: _File, key: str, why: str) -> str:
    value = file.values.get(key)
    if not isinstance(value, (str, bool)) or value == "":
        raise RecipeError(f"{file.where(key)}: missing; {why}.")
    return "NO" if value is False else str(value).upper()  # an unquoted NO is a truth value


def _optional_text(file: _File, key: str) -> str | None:
    value = file.values.get(key)
    return None if value in (None, "") else str(value)


def _count(file: _File, key: str, *, least: int) -> int | None:
    value = file.values.get(key)
    if value is None:
        return None
    if isinstance(value, str):
        value = whole_number(value)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST_COUNT:
        raise RecipeError(f"{file.where(key)}: {printable(str(value), 40)!r} is no whole number from {least} to {MOST_COUNT}.")
    return value


def _precision(file: _File) -> Precision | None:
    value = file.values.get("mixed_precision")
    if value is None:
        return None
    if value is False or value == "no":
        return "no"
    if value != "bf16":
        raise RecipeError(
            f"{file.where('mixed_precision')}: {str(value)[:40]!r} is not offered; `bf16` or `no`, as the recipe's bf16 says."
        )
    return "bf16"
