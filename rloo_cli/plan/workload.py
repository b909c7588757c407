"""What a step of a recipe does with its model in one process, `auto` decided as training would on that device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from rloo_cli.plan.devices import DeviceMemory
from rloo_cli.plan.report import longest_completion
from rloo_cli.plan.shape import ModelShape
from rloo_cli.plan.spread import Spread
from rloo_cli.plan.work import Workload
from rloo_cli.recipe.batch import BatchPlan
from rloo_cli.recipe.schema import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from rloo_cli.plan.prepare import Prepared

GUESSED_COMPLETION = 1024
"""Tokens of a completion where neither recipe nor model bounds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens of what is trained on."""

    prompt: int
    """Of a prompt, on average."""
    longest_prompt: int
    completion: int
    """Of a completion, at most."""


def lengths_of(prepared: Prepared) -> Lengths:
    """Those of a recipe's data."""
    lengths = np.concatenate([part.head.lengths for part in prepared.prompts.parts()])
    return Lengths(
        prompt=math.ceil(lengths.mean()),
        longest_prompt=int(lengths.max()),
        completion=longest_completion(prepared) or GUESSED_COMPLETION,
    )


def workload(
    recipe: Recipe,
    batch: BatchPlan,
    lengths: Lengths,
    config: PreTrainedConfig,
    shape: ModelShape,
    device: DeviceMemory,
    spread: Spread,
    *,
    reward_model_bytes: int = 0,
) -> Workload:
    """What a step of this run does with the model in each process."""
    from rloo_cli.training.adapter import adapter_size
    from rloo_cli.training.auto import decide_head_chunk, token_budget

    training, group = recipe.training, batch.num_generations
    weight_bytes = 4 if recipe.model.dtype == "float32" else 2
    free = max(0, device.free - shape.parameters * weight_bytes // spread.weight_parts)
    longest = lengths.longest_prompt + group * lengths.completion
    budget = token_budget(training, config, on_gpu=device.kind == "cuda", free=free, group_tokens=longest)
    rows = -(-batch.completions_per_step // spread.processes)
    tokens, share = _micro_batch(batch, lengths, rows, budget)
    decode_rows = -(-batch.prompts_per_generation * group // spread.processes)
    return Workload(
        weight_bytes=weight_bytes,
        low_precision=_is_low(recipe, device),
        has_reference=recipe.algorithm.beta > 0,
        reference_moves=recipe.algorithm.sync_ref_model,
        wide_head=training.cast_lm_head_to_fp32,
        checkpointing=training.gradient_checkpointing,
        optim=training.optim,
        micro_batch_tokens=tokens,
        micro_batch_completion_tokens=round(tokens * share),
        head_chunk=decide_head_chunk(training, shape.vocab, budget),
        decode_rows=decode_rows,
        decode_prompts=min(batch.prompts_per_generation, -(-decode_rows // group) + bool(decode_rows % group)),
        prompt_tokens=lengths.prompt,
        completion_tokens=lengths.completion,
        sampler=sampler(recipe),
        vllm_share=_vllm_share(recipe, device),
        vllm_parts=min(recipe.generation.vllm_tensor_parallel_size, spread.processes),
        vllm_sleeps=recipe.generation.vllm_enable_sleep_mode and _vllm_share(recipe, device) > 0,
        reward_model_bytes=reward_model_bytes,
        on_gpu=device.kind == "cuda",
        adapter_parameters=adapter_size(config, recipe.model) if recipe.model.use_peft else 0,
    )


def _micro_batch(batch: BatchPlan, lengths: Lengths, rows: int, budget: int) -> tuple[int, float]:
    """(tokens of a micro-batch, share of them that are completions) where a process has so many rows of a step."""

    def tokens(count: int) -> int:
        return -(-count // batch.num_generations) * lengths.prompt + count * lengths.completion

    most = rows if batch.max_micro_batch_rows is None else min(rows, batch.max_micro_batch_rows)
    return min(budget, tokens(most)), rows * lengths.completion / tokens(rows)


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
