"""How a model lies over the processes that train it: one of our configurations by name, or a file of `accelerate config`.

Read are the keys that say strategy, offloading, and how many processes and machines there are. Keys without a meaning here are told in one
note; whatever would make accelerate do something that we do not is an error.
"""

from __future__ import annotations

import json
import os.path
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rloo_cli.errors import RecipeError
from rloo_cli.recipe.accelerate_keys import DEEPSPEED_IDLE, FSDP_IDLE, JSON_IDLE, STRATEGIES, TOP_IDLE, StrategyName, without_effect
from rloo_cli.recipe.deepspeed_json import read_json, refuse_wrong_counts
from rloo_cli.recipe.fields import closest
from rloo_cli.recipe.nodes import Fields, Node, Problems, printable
from rloo_cli.recipe.scalars import plain_data
from rloo_cli.recipe.yaml_source import FileKind, parse, read_text

Precision = Literal["no", "bf16"]

CONFIGS = Path(__file__).resolve().parent.parent / "launch" / "configs"
"""Our configurations, `fsdp2.yaml`; `accelerate launch --config_file` takes them too."""
REPLICATED_TYPES = ("NO", "MULTI_GPU", "MULTI_CPU")
MOST_COUNT = (1 << 16) - 1
"""Of processes, machines, and a port's number."""
KIND = FileKind(name="a file of `accelerate config`")


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """How model, gradients and optimizer lie over the processes, and what a user's file says about these."""

    strategy: StrategyName = "ddp"
    num_processes: int | None = None
    """Of all machines, as a file of the user's says; None = the recipe or the command line says it."""
    num_machines: int | None = None
    machine_rank: int | None = None
    main_process_ip: str | None = None
    main_process_port: int | None = None
    mixed_precision: Precision | None = None
    """As a file says; the recipe's `bf16` has to agree."""
    reshard_after_forward: bool = True
    """Of fsdp2: whether a layer's parameters are freed after its forward pass and gathered again in the backward pass."""
    cpu_offload: bool = False
    """Of fsdp2: parameters, gradients and optimizer state stay on the CPU."""
    zero: Mapping[str, Any] = field(default_factory=dict)
    """Of zero2 and zero3: further keys of DeepSpeed's `zero_optimization`."""
    notes: tuple[str, ...] = ()
    """What was read and has no effect, a line each."""

    def is_same_layout(self, other: Distribution) -> bool:
        """Whether both lay the model out alike, whoever says how many processes there are."""
        ours, theirs = (
            (each.strategy, each.reshard_after_forward, each.cpu_offload, json.dumps(dict(each.zero), sort_keys=True))
            for each in (self, other)
        )
        return ours == theirs


def read_distribution(name_or_path: str, folder: Path) -> Distribution:
    """The distribution of that name, or in that file (relative to `folder`).

    Raises:
        RecipeError: `file:line:column: key: …` where the file is wrong, asks for what is not offered, or does not exist.
    """
    if name_or_path in STRATEGIES:
        return replace(_read(CONFIGS / f"{name_or_path}.yaml"), num_machines=None, machine_rank=None)
    path = folder / name_or_path
    if not os.path.isfile(path) and not name_or_path.endswith((".yaml", ".yml", ".json")):  # noqa: PTH113 - Path.is_file raises for a name too long
        near = closest(name_or_path, STRATEGIES)
        raise RecipeError(
            f"`{printable(name_or_path, 200)}` is none of {', '.join(STRATEGIES)}, and no file of `accelerate config` either"
            f"{f'; did you mean `{near}`?' if near else '.'}"
        )
    return _read(path)


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
            raise _environment_error("FSDP_VERSION", f"is {printable(version, 20)}: {_VERSION_2}.")
        return Distribution(
            strategy="fsdp2",
            reshard_after_forward=environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() in ("true", "1", "full_shard"),
            cpu_offload=_is_set(environ, "FSDP_OFFLOAD_PARAMS"),
        )
    if _is_set(environ, "ACCELERATE_USE_DEEPSPEED"):
        return _zero_of_environment(environ)
    return None


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


_VERSION_2 = "only the second version of FSDP is offered: write `fsdp_version: 2` (`accelerate to-fsdp2` converts a file)"


def _is_set(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "false").lower() in ("true", "1", "yes", "on")


def _zero_of_environment(environ: Mapping[str, str]) -> Distribution:
    file = environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if file.lower() not in ("", "none"):
        try:
            return _of_deepspeed_file(Path(file))
        except RecipeError as error:
            raise _environment_error("ACCELERATE_DEEPSPEED_CONFIG_FILE", error.message) from error
    prefix = "ACCELERATE_DEEPSPEED_"
    values: dict[str, Any] = {"zero_stage": _number(environ.get(f"{prefix}ZERO_STAGE", "2"))}
    for name in ("offload_optimizer_device", "offload_param_device"):
        values[name] = environ.get(prefix + name.upper(), "none")
    return _of_deepspeed(values, lambda key: f"{_VARIABLE} {prefix}{key.upper()}")


_VARIABLE = "environment variable"


def _environment_error(name: str, message: str) -> RecipeError:
    return RecipeError(f"{_VARIABLE} {name}: {message}")


def _number(text: str) -> int | str:
    return int(text) if text.isdecimal() and len(text) <= 20 else text


# --- files -----------------------------------------------------------------------------------------------------------------------


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


def _read(path: Path) -> Distribution:
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
        layout = _of_named_file(file, section, str(named)) if named else _of_deepspeed(section, lambda key: _where_in(file, key))
        layout = replace(layout, notes=(*layout.notes, *_idle(path, section, DEEPSPEED_IDLE)))
    else:
        raise RecipeError(f"{file.where('distributed_type')}: {kind[:40]!r} is not offered; MULTI_GPU, FSDP or DEEPSPEED.")
    _refuse_unknown(file, "", file.values, {*_TOP_KEYS, *TOP_IDLE})
    return replace(
        layout,
        num_processes=_count(file, "num_processes", least=1),
        num_machines=_count(file, "num_machines", least=1),
        machine_rank=_count(file, "machine_rank", least=0),
        main_process_ip=_optional_text(file, "main_process_ip"),
        main_process_port=_count(file, "main_process_port", least=0),
        mixed_precision=_precision(file),
        notes=(*_idle(path, file.values, TOP_IDLE), *layout.notes),
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
        raise RecipeError(f"{file.where('fsdp_config.fsdp_version')}: {found}: {_VERSION_2}.")
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
        notes=_idle(file.path, section, FSDP_IDLE),
    )


def _of_deepspeed(values: Mapping[str, Any], where: Any) -> Distribution:
    """From keys as `accelerate config` writes them."""
    for key in ("offload_optimizer_device", "offload_param_device"):
        if str(values.get(key) or "none").lower() != "none":
            raise RecipeError(f"{where(key)}: {_NO_OFFLOADING}.")
    return Distribution(strategy=_stage(values.get("zero_stage", 2), where("zero_stage")))


_NO_OFFLOADING = (
    "DeepSpeed's offloading is not offered; fsdp2's is: `distributed_type: FSDP`, with `fsdp_version: 2` and `fsdp_offload_params: true` "
    "in `fsdp_config`"
)
_OFFLOADING = ("offload_optimizer", "offload_param", "cpu_offload", "cpu_offload_params")
"""Keys of DeepSpeed's `zero_optimization`; the last two are older names."""


def _without_offloading(zero: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """What is said beside that nothing is offloaded; DeepSpeed would keep the gradient where only its own optimizers find it."""
    for key in _OFFLOADING:
        said = zero.get(key)
        if said and not (isinstance(said, dict) and str(said.get("device") or "none").lower() == "none"):
            raise RecipeError(f"{path}: zero_optimization.{key}: {_NO_OFFLOADING}.")
    return {key: value for key, value in zero.items() if key not in _OFFLOADING}


def _stage(stage: object, where: str) -> StrategyName:
    if stage == 2 and not isinstance(stage, bool):
        return "zero2"
    if stage == 3:
        return "zero3"
    why = "stage 2 needs less memory at the same speed" if stage == 1 else "stages 2 and 3 are offered, and `ddp` for whole copies"
    raise RecipeError(f"{where}: stage {printable(str(stage), 40)} is not offered: {why}.")


def _of_named_file(file: _File, section: Mapping[str, Any], name: str) -> Distribution:
    doubled = sorted({"zero_stage", "offload_optimizer_device", "offload_param_device"} & section.keys())
    if doubled:
        raise RecipeError(f"{_where_in(file, doubled[0])}: stands beside deepspeed_config_file, which says it as well: keep one of them.")
    path = Path(name)
    beside = file.path.parent / path
    try:
        return _of_deepspeed_file(beside if os.path.lexists(beside) else path)
    except RecipeError as error:
        raise RecipeError(f"{_where_in(file, 'deepspeed_config_file')}: {error.message}") from error


def _of_deepspeed_file(path: Path) -> Distribution:
    """From a JSON file of DeepSpeed's own.

    Raises:
        RecipeError: it cannot be read, or asks for what is not offered.
    """
    document = read_json(path)
    if not isinstance(document, dict) or not isinstance(document.get("zero_optimization"), dict):
        raise RecipeError(f"{path}: zero_optimization: missing; it says the stage, 2 or 3.")
    unknown = sorted(document.keys() - {"zero_optimization", "bf16", "fp16"} - JSON_IDLE.keys())
    if unknown:
        why = (
            "the recipe says it (optim, learning_rate, lr_scheduler_type)" if unknown[0] in ("optimizer", "scheduler") else "not known here"
        )
        raise RecipeError(f"{path}: {printable(unknown[0])}: {why}; remove it.")
    if _is_enabled(document.get("fp16")):
        raise RecipeError(f"{path}: fp16: not offered; bf16 is, by `bf16: true` in the recipe.")
    section = {key: _whole(value) for key, value in document["zero_optimization"].items() if key != "stage" and value != "auto"}
    refuse_wrong_counts(section, path)
    strategy = _stage(document["zero_optimization"].get("stage"), f"{path}: zero_optimization.stage")
    return Distribution(
        strategy=strategy,
        zero=_without_offloading(section, path),
        mixed_precision=_precision_of_json(document.get("bf16")),
        notes=_idle(path, document, JSON_IDLE),
    )


def _is_enabled(section: object) -> bool:
    return isinstance(section, dict) and section.get("enabled") is True


def _precision_of_json(section: object) -> Precision | None:
    if not isinstance(section, dict) or not isinstance(section.get("enabled"), bool):
        return None
    return "bf16" if section["enabled"] else "no"


def _whole(value: Any) -> Any:
    """DeepSpeed counts in whole numbers, which its files write as 5e8."""
    if isinstance(value, dict):
        return {key: _whole(entry) for key, entry in value.items() if entry != "auto"}
    return int(value) if isinstance(value, float) and value.is_integer() else value


# --- single keys -----------------------------------------------------------------------------------------------------------------


def _where_in(file: _File, key: str) -> str:
    return file.where(f"deepspeed_config.{key}")


def _section(file: _File, name: str) -> Mapping[str, Any]:
    section = file.values.get(name) or {}
    if not isinstance(section, dict):
        raise RecipeError(f"{file.where(name)}: expected a mapping.")
    return section


def _refuse_unknown(file: _File, prefix: str, values: Mapping[str, Any], known: set[str]) -> None:
    for key in values:
        if key not in known:
            name = f"{prefix}.{key}" if prefix else key
            raise RecipeError(f"{file.where(name)}: not known here; remove it if training does not depend on it.")


def _idle(path: Path, values: Mapping[str, Any], idle: Mapping[str, tuple[Any, ...]]) -> tuple[str, ...]:
    told = without_effect(values, idle)
    return (f"{path}: without effect here: {', '.join(told)}",) if told else ()


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
        value = _number(value)
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
