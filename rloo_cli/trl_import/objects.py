"""Arguments of TRL's trainer that are objects or dictionaries of their own, as fields of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rloo_cli.recipe.fields import LEAVES

INIT_FIELDS: Mapping[str, str] = {
    "dtype": "dtype",
    "torch_dtype": "dtype",
    "revision": "model_revision",
    "attn_implementation": "attn_implementation",
    "trust_remote_code": "trust_remote_code",
}
"""What `model_init_kwargs` may hold → the field that says it."""

LORA_FIELDS: Mapping[str, str] = {
    "r": "lora_r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "target_modules": "lora_target_modules",
    "target_parameters": "lora_target_parameters",
    "modules_to_save": "lora_modules_to_save",
    "task_type": "lora_task_type",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
}
"""Arguments of peft's LoraConfig → the field that says it."""

LORA_DEFAULTS: Mapping[str, Any] = {"r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
"""Of LoraConfig itself, where they are not those of TRL's ModelConfig, which the fields have."""
LORA_HARMLESS: Mapping[str, tuple[Any, ...]] = {"bias": ("none",), "peft_type": ("LORA", "PeftType.LORA"), "inference_mode": (False,)}
"""Arguments that no field says, and their values that change nothing."""


def init_fields(kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """(the fields that a `model_init_kwargs` says, a line for each key that none says)."""
    fields: dict[str, Any] = {}
    faults = []
    for key, value in kwargs.items():
        if key in INIT_FIELDS:
            fields[INIT_FIELDS[key]] = value
        elif value is not None and key not in ("device_map", "use_cache"):
            faults.append(f"model_init_kwargs: `{key}` is no field of a recipe; there are {', '.join(sorted(INIT_FIELDS))}.")
    return fields, faults


def lora_fields(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """(the fields that a LoraConfig with these arguments says, a line for each argument that none says)."""
    fields: dict[str, Any] = {"use_peft": True}
    faults = []
    for name, value in {**LORA_DEFAULTS, **arguments}.items():
        field = LORA_FIELDS.get(name)
        if field is not None and (field in LEAVES or value not in (None, False)):
            fields[field] = value
        elif field is None and value not in (*LORA_HARMLESS.get(name, ()), None, False, [], {}):
            faults.append(f"peft_config: `{name}` of LoraConfig is no field of a recipe.")
    return {name: value for name, value in fields.items() if value is not None}, faults
