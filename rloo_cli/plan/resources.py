"""Memory and disk of a planned run: the formula of memory.py applied to this recipe on this machine."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import psutil

from rloo_cli.plan.context import load_config
from rloo_cli.plan.memory import estimate_disk, estimate_memory
from rloo_cli.plan.report import longest_completion
from rloo_cli.plan.shape import model_shape
from rloo_cli.plan.work import Workload
from rloo_cli.recipe.schema import Recipe

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

    from rloo_cli.plan.prepare import Prepared

GUESSED_COMPLETION = 1024
"""Tokens of a completion where neither recipe nor model bounds it."""


def resources_document(prepared: Prepared, *, trust_remote_code: bool) -> dict[str, Any]:
    """`{"memory": …, "disk": …}` in bytes, from the model's configuration; no weights are read."""
    import torch

    recipe = prepared.checked.loaded.recipe
    config = load_config(recipe.model, trust_remote_code=trust_remote_code)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    shape, work = model_shape(config), workload(prepared, config, device)
    count = saved_checkpoints(recipe, prepared.total_steps, len(prepared.prompts) / prepared.checked.loaded.batch.prompts_per_step)
    folder = _existing_parent(Path(recipe.run.output_dir or "runs"))
    rows = prepared.checked.loaded.batch.completions_per_step * prepared.total_steps
    return {
        "memory": {
            "parameters": shape.parameters,
            "dtype": _dtype_words(recipe, work),
            "bytes": estimate_memory(shape, work),
            "device": _device_name(device),
            "free": _free_memory(device),
        },
        "disk": {
            **estimate_disk(shape, work, checkpoints=count, rows=rows),
            "count": count,
            "folder": str(folder),
            "free": shutil.disk_usage(folder).free,
        },
    }


def workload(prepared: Prepared, config: PreTrainedConfig, device: torch.device) -> Workload:
    """What a step of this run does with the model, `auto` decided as training would on this device."""
    from rloo_cli.training.auto import decide_bf16, decide_head_chunk, decide_max_tokens

    loaded = prepared.checked.loaded
    recipe, batch, training = loaded.recipe, loaded.batch, loaded.recipe.training
    prompt = math.ceil(prepared.prompts.lengths.mean())
    completion = longest_completion(prepared) or GUESSED_COMPLETION
    longest = int(prepared.prompts.lengths.max()) + batch.num_generations * completion
    budget = decide_max_tokens(training, SimpleNamespace(config=config), device, group_tokens=longest)
    step_tokens = batch.prompts_per_step * prompt + batch.completions_per_step * completion
    tokens = min(budget, step_tokens)
    if batch.max_micro_batch_rows is not None:
        tokens = min(
            tokens, batch.max_micro_batch_rows * completion + math.ceil(batch.max_micro_batch_rows / batch.num_generations) * prompt
        )
    return Workload(
        weight_bytes=4 if recipe.model.dtype == "float32" else 2,
        low_precision=decide_bf16(training, device),
        has_reference=recipe.algorithm.beta > 0,
        checkpointing=training.gradient_checkpointing,
        optim=training.optim,
        micro_batch_tokens=tokens,
        micro_batch_completion_tokens=round(tokens * batch.completions_per_step * completion / step_tokens),
        head_chunk=decide_head_chunk(training, config.get_text_config().vocab_size, budget),
        decode_rows=batch.prompts_per_generation * batch.num_generations,
        decode_prompts=batch.prompts_per_generation,
        prompt_tokens=prompt,
        completion_tokens=completion,
        sampler=_sampler(recipe),
        vllm_share=_vllm_share(recipe, device),
    )


def _sampler(recipe: Recipe) -> Literal["transformers", "vllm", "elsewhere"]:
    if not recipe.generation.use_vllm:
        return "transformers"
    return "vllm" if recipe.generation.vllm_mode == "colocate" else "elsewhere"


def _vllm_share(recipe: Recipe, device: torch.device) -> int:
    """Bytes of the GPU that vLLM takes beside the trainer; 0 on a CPU."""
    import torch

    if device.type != "cuda" or _sampler(recipe) != "vllm":
        return 0
    return round(recipe.generation.vllm_gpu_memory_utilization * torch.cuda.get_device_properties(device).total_memory)


def saved_checkpoints(recipe: Recipe, total_steps: int, steps_per_epoch: float) -> int:
    """How many checkpoints lie on disk at the end."""
    run = recipe.run
    if run.save_strategy == "no":
        return 0
    every = run.save_steps if run.save_strategy == "steps" else max(1, math.ceil(steps_per_epoch))
    count = -(-total_steps // every)  # the last step is saved as well
    return min(count, run.save_total_limit) if run.save_total_limit is not None else count


def _dtype_words(recipe: Recipe, work: Workload) -> str:
    return f"weights {recipe.model.dtype}, computing in {'bfloat16' if work.low_precision else recipe.model.dtype}"


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return "this machine"
    import torch

    return torch.cuda.get_device_name(device)


def _free_memory(device: torch.device) -> int:
    if device.type == "cpu":
        return int(psutil.virtual_memory().available)
    import torch

    return int(torch.cuda.mem_get_info(device)[0])


def _existing_parent(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path
