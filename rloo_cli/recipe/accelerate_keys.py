"""The strategies, and the keys of accelerate's and DeepSpeed's files that say nothing about a run of ours, with the values that need no word."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

StrategyName = Literal["ddp", "fsdp2", "zero2", "zero3"]
STRATEGIES: tuple[str, ...] = get_args(StrategyName)

TOP_IDLE: Mapping[str, tuple[Any, ...]] = {
    "debug": (False,),
    "downcast_bf16": (False,),
    "enable_cpu_affinity": (False,),
    "gpu_ids": ("all",),
    "main_training_function": ("main",),
    "rdzv_backend": ("static", "c10d"),
    "same_network": (True, False),
    "use_cpu": (False,),
    "dynamo_config": ({},),
    "fp8_config": ({},),
    "megatron_lm_config": ({},),
    "mpirun_config": ({},),
    "parallelism_config": ({},),
    "tpu_env": ([],),
    "tpu_name": (),
    "tpu_use_cluster": (False,),
    "tpu_use_sudo": (False,),
    "tpu_vm": ([],),
    "tpu_zone": (),
    "command_file": (),
    "commands": ([],),
}
"""Key of `accelerate config` → what it writes by itself."""

FSDP_IDLE: Mapping[str, tuple[Any, ...]] = {
    "fsdp_activation_checkpointing": (False,),
    "fsdp_activation_checkpointing_offload": (False,),
    "fsdp_auto_wrap_policy": ("TRANSFORMER_BASED_WRAP",),
    "fsdp_backward_prefetch": ("BACKWARD_PRE", "NO_PREFETCH"),
    "fsdp_cpu_ram_efficient_loading": (True, False),
    "fsdp_forward_prefetch": (False,),
    "fsdp_ignored_modules": (),
    "fsdp_min_num_params": (0,),
    "fsdp_sharding_strategy": ("FULL_SHARD",),
    "fsdp_state_dict_type": ("SHARDED_STATE_DICT", "FULL_STATE_DICT"),
    "fsdp_sync_module_states": (True, False),
    "fsdp_transformer_layer_cls_to_wrap": (),
    "fsdp_use_orig_params": (True,),
}

DEEPSPEED_IDLE: Mapping[str, tuple[Any, ...]] = {
    "deepspeed_exclusion_filter": (),
    "deepspeed_hostfile": (),
    "deepspeed_inclusion_filter": (),
    "deepspeed_moe_layer_cls_names": (),
    "deepspeed_multinode_launcher": ("standard",),
    "gradient_accumulation_steps": (1, "auto"),
    "gradient_clipping": ("auto",),
    "offload_optimizer_nvme_path": ("none",),
    "offload_param_nvme_path": ("none",),
    "zero3_init_flag": (True, False),
    "zero3_save_16bit_model": (True, False),
}

JSON_IDLE: Mapping[str, tuple[Any, ...]] = {
    "activation_checkpointing": (),
    "comms_logger": (),
    "flops_profiler": (),
    "gradient_accumulation_steps": ("auto", 1),
    "gradient_clipping": ("auto",),
    "steps_per_print": (),
    "train_batch_size": ("auto",),
    "train_micro_batch_size_per_gpu": ("auto",),
    "wall_clock_breakdown": (False,),
    "zero_allow_untested_optimizer": (True, False),
    "zero_force_ds_cpu_optimizer": (True, False),
}
"""Key of a DeepSpeed file beside `zero_optimization`, `bf16` and `fp16`."""


def without_effect(values: Mapping[str, Any], idle: Mapping[str, tuple[Any, ...]]) -> list[str]:
    """The keys that ask for something, and do not get it: the recipe or the machine decides it."""
    return [key for key, value in values.items() if key in idle and value is not None and value not in idle[key]]


VERSION_2 = "only the second version of FSDP is offered: write `fsdp_version: 2` (`accelerate to-fsdp2` converts a file)"


def idle_told(path: Path, values: Mapping[str, Any], idle: Mapping[str, tuple[Any, ...]]) -> tuple[str, ...]:
    """A note that names the keys of a file that ask for something and do not get it, or none."""
    told = without_effect(values, idle)
    return (f"{path}: without effect here: {', '.join(told)}",) if told else ()


def whole_number(text: str) -> int | str:
    """The number that a text is, else the text."""
    return int(text) if text.isdecimal() and len(text) <= 20 else text
