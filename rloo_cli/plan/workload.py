"""What a step of a recipe does with its model in one process, `auto` decided as training would on that device."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from rloo_cli.plan.devices import DeviceMemory
from rloo_cli.plan.report import longest_completion
from rloo_cli.plan.shape import ModelShape
from rloo_cli.plan.spread import Spread
from rloo_cli.plan.work import Workload
from rloo_cli.recipe.schema import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from rloo_cli.plan.prepare import Prepared

GUESSED_COMPLETION = 1024
"""Tokens of a completion where neither recipe nor model bounds it."""


def workload(prepared: Prepared, config: PreTrainedConfig, shape: ModelShape, device: DeviceMemory, spread: Spread) -> Workload:
    """What a step of this run does with the model in each process."""
    from rloo_cli.training.auto import decide_head_chunk, token_budget

    loaded = prepared.checked.loaded
    recipe, batch, training = loaded.recipe, loaded.batch, loaded.recipe.training
    prompt = math.ceil(prepared.prompts.lengths.mean())
    completion = longest_completion(prepared) or GUESSED_COMPLETION
    longest = int(prepared.prompts.lengths.max()) + batch.num_generations * completion
    weight_bytes = 4 if recipe.model.dtype == "float32" else 2
    free = device.free - shape.parameters * weight_bytes // spread.weight_parts
    budget = token_budget(training, config, on_gpu=device.kind == "cuda", free=max(0, free), group_tokens=longest)
    group, rows = batch.num_generations, -(-batch.completions_per_step // spread.processes)
    step_tokens = -(-rows // group) * prompt + rows * completion
    tokens = min(budget, step_tokens)
    if batch.max_micro_batch_rows is not None:
        most = min(batch.max_micro_batch_rows, rows)
        tokens = min(tokens, most * completion + -(-most // group) * prompt)
    decode_rows = -(-batch.prompts_per_generation * group // spread.processes)
    return Workload(
        weight_bytes=weight_bytes,
        low_precision=_is_low(recipe, device),
        has_reference=recipe.algorithm.beta > 0,
        checkpointing=training.gradient_checkpointing,
        optim=training.optim,
        micro_batch_tokens=tokens,
        micro_batch_completion_tokens=round(tokens * rows * completion / step_tokens),
        head_chunk=decide_head_chunk(training, shape.vocab, budget),
        decode_rows=decode_rows,
        decode_prompts=min(batch.prompts_per_generation, -(-decode_rows // group) + bool(decode_rows % group)),
        prompt_tokens=prompt,
        completion_tokens=completion,
        sampler=sampler(recipe),
        vllm_share=_vllm_share(recipe, device),
        vllm_sleeps=recipe.generation.vllm_enable_sleep_mode and _vllm_share(recipe, device) > 0,
        on_gpu=device.kind == "cuda",
    )


def _is_low(recipe: Recipe, device: DeviceMemory) -> bool:
    """Whether training autocasts: every named GPU is fast at bfloat16, what is here is asked."""
    import torch

    from rloo_cli.training.auto import decide_bf16

    if device.is_named:
        return recipe.training.bf16
    return decide_bf16(recipe.training, torch.device(device.kind))


def sampler(recipe: Recipe) -> Literal["transformers", "vllm", "elsewhere"]:
    """What makes the completions, as seen from a trainer's device."""
    if not recipe.generation.use_vllm:
        return "transformers"
    return "vllm" if recipe.generation.vllm_mode == "colocate" else "elsewhere"


def _vllm_share(recipe: Recipe, device: DeviceMemory) -> int:
    """Bytes of the GPU that vLLM takes beside the trainer; 0 on a CPU."""
    if device.kind != "cuda" or sampler(recipe) != "vllm":
        return 0
    return round(recipe.generation.vllm_gpu_memory_utilization * device.total)
