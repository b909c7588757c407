"""What `auto` stands for on this machine, decided once and written into the run's recipe."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import replace

import psutil
import torch
from transformers import PreTrainedConfig

from rloo_cli.errors import RecipeError, RlooError
from rloo_cli.recipe.schema import Recipe, TrainingSection
from rloo_cli.rollout.visual import has_own_positions
from rloo_cli.training.bf16_speed import BF16_PAYS
from rloo_cli.training.bf16_speed import product_seconds as _product_seconds
from rloo_cli.training.microbatches import GroupRows, Layout, build_scoring_batch
from rloo_cli.training.policy import Policy
from rloo_cli.types import VisualInputs

logger = logging.getLogger(__name__)

AGREEMENT = 1e-3  # nats; float32 layouts that compute the same thing differ by 1e-5
AGREEMENT_BF16 = 0.1  # nats, mean; weights held in bf16 round differently in each layout
CPU_TOKENS, GPU_TOKENS = 4096, 16384  # beyond these a larger micro-batch gains nothing
LEAST_TOKENS = 256
CPU_ACTIVATIONS, GPU_ACTIVATIONS = 1 << 30, 16 << 30  # bytes; enough tokens for products to run at their full rate
ACTIVATION_SHARE = 0.3  # of the free memory, which nothing may exceed
HEAD_BYTES_KEPT = 1 << 29  # logits up to this size are kept for the backward pass
HEAD_CHUNK_BYTES = 1 << 28


def decide_bf16(training: TrainingSection, device: torch.device) -> bool:
    """Whether to run in bfloat16: asked for, and this device is measurably faster at it."""
    if not training.bf16:
        return False
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    full, half = _product_seconds()
    return full > BF16_PAYS * half


def decide_threads(training: TrainingSection) -> int:
    """CPU threads of the trainer: as given, else torch's own choice, a thread a core or OMP_NUM_THREADS."""
    return torch.get_num_threads() if training.threads == "auto" else training.threads


def decide_layout(
    training: TrainingSection,
    policy: Policy,
    *,
    prompt_ids: tuple[int, ...],
    completion_length: int,
    visual: VisualInputs | None = None,
    is_low: bool = False,
    give_up: Callable[[], None] = lambda: None,
) -> Layout:
    """packed where it gives the plain layout's log-probs on a group of real length, else plain; one log line says so.

    Args:
        training: of the recipe.
        policy: on its device; where it is sharded every rank asks.
        prompt_ids: of some prompt.
        completion_length: the longest, in tokens.
        visual: that prompt's images.
        is_low: the policy computes in bf16, whatever its weights are held in.
        give_up: called when a forward pass has failed.
    """
    if training.layout == "packed" and visual is not None and has_own_positions(policy.model):
        raise RecipeError(
            f"training.layout: packed sequences do not bear prompts with images of {type(policy.model).__name__}, whose positions depend on "
            "the images (M-RoPE): use `layout: plain` or `auto`."
        )
    if training.layout != "auto":
        return training.layout
    group = replace(_probe_group(prompt_ids, completion_length), visual=visual)
    plain, packed = _probe(policy, group, "plain"), None
    try:
        packed = _probe(policy, group, "packed")
    except (RlooError, RuntimeError, TypeError, ValueError) as error:
        logger.info("layout: plain, since this model cannot be packed (%s)", str(error).splitlines()[0])
        give_up()
    if packed is None:
        return "plain"
    gap = (plain - packed).abs()
    is_exact = next(policy.parameters()).dtype == torch.float32 and not is_low
    agrees = gap.max() <= AGREEMENT if is_exact else gap.mean() <= AGREEMENT_BF16
    if not agrees:
        logger.info("layout: plain, since packed log-probs of this model differ by up to %.2g nats", gap.max().item())
    return "packed" if agrees else "plain"


def _probe_group(prompt_ids: tuple[int, ...], completion_length: int) -> GroupRows:
    """Two completions of the prompt's own tokens, one of full length, so that a sliding window would show."""
    draw = random.Random(0)  # noqa: S311
    lengths = (completion_length, max(completion_length // 2, 1))
    completions = tuple(tuple(draw.choices(prompt_ids, k=length)) for length in lengths)
    return GroupRows(group=0, prompt_ids=prompt_ids, rows=(0, 1), completion_ids=completions)


def _probe(policy: Policy, group: GroupRows, layout: Layout) -> torch.Tensor:
    was_training = policy.training
    policy.layout = layout
    with torch.no_grad():
        logp_N, _ = policy.eval()(build_scoring_batch([group], layout, next(policy.parameters()).device))
    policy.train(was_training)
    return logp_N


def decide_max_tokens(training: TrainingSection, model: torch.nn.Module, device: torch.device, *, group_tokens: int) -> int:
    """Tokens of a micro-batch on this device, as it is now; see `token_budget`."""
    on_gpu = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else psutil.virtual_memory().available
    return token_budget(training, model.config, on_gpu=on_gpu, free=free, group_tokens=group_tokens)


def token_budget(training: TrainingSection, config: PreTrainedConfig, *, on_gpu: bool, free: int, group_tokens: int) -> int:
    """Tokens of a micro-batch: enough to keep the device busy, at least a whole group, and no more than `free` bytes of memory allow.

    A group that is cut costs a scoring pass with a reference model; activations beyond what keeps the device busy only cost
    memory.
    """
    if training.max_tokens_per_micro_batch != "auto":
        return training.max_tokens_per_micro_batch
    text = config.get_text_config()
    layer = 16 * text.hidden_size + 4 * (getattr(text, "intermediate_size", None) or 4 * text.hidden_size)
    kept = text.num_hidden_layers * (text.hidden_size if training.gradient_checkpointing else layer) + layer
    limit, activations = (GPU_TOKENS, GPU_ACTIVATIONS) if on_gpu else (CPU_TOKENS, CPU_ACTIVATIONS)
    busy = min(limit, activations // (kept * 4))
    return max(LEAST_TOKENS, min(max(busy, group_tokens), int(ACTIVATION_SHARE * free / (kept * 4))))


def decide_head_chunk(training: TrainingSection, vocabulary: int, max_tokens: int) -> int | None:
    """Positions at once through the LM head; None keeps all logits for the backward pass, where they are small enough."""
    if training.head_chunk != "auto":
        return training.head_chunk
    if max_tokens * vocabulary * 4 <= HEAD_BYTES_KEPT:
        return None
    return max(1, HEAD_CHUNK_BYTES // (vocabulary * 4))


def decisions_told(recipe: Recipe, device: torch.device) -> str:
    """How training computes here, in a line, from a recipe in which all is decided."""
    training = recipe.training
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} ({training.threads} threads)"
    precision = "bfloat16" if training.bf16 else recipe.model.dtype
    return f"device: {where}, {precision}, {training.layout}, micro-batches of up to {training.max_tokens_per_micro_batch} tokens"


def with_decisions(recipe: Recipe, **training: object) -> Recipe:
    """The recipe with the decided values in its training section."""
    return recipe.model_copy(update={"training": recipe.training.model_copy(update=training)})
