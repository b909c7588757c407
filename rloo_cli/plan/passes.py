"""What a forward and backward pass, and the decoding of a batch, hold for a while."""

from __future__ import annotations

from rloo_cli.plan.numbers import BFLOAT16, FLOAT32
from rloo_cli.plan.shape import ModelShape
from rloo_cli.plan.spread import Spread
from rloo_cli.plan.work import Workload

SOFTMAX_SLICE = 128
"""Positions whose softmax is taken at once (training/logprobs.py)."""


def kv_cache(shape: ModelShape, work: Workload) -> int:
    """Keys and values of the rows that decode here; each prompt's once."""
    positions = work.decode_prompts * work.prompt_tokens + work.decode_rows * work.completion_tokens
    return positions * shape.layers * 2 * shape.kv_heads * shape.head_dim * work.compute_bytes


def activations(shape: ModelShape, work: Workload, spread: Spread) -> int:
    """What the backward pass needs of the layers, and the weights that autocast keeps in its own dtype meanwhile.

    With checkpointing each layer keeps its input and one layer at a time is whole; without, all are.
    """
    number = work.compute_bytes
    # Autocast leaves what runs through the layers in float32; where the weights of a pass are in bfloat16 it is that.
    stream = FLOAT32 if spread.strategy == "ddp" else number
    q_and_kv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    # Stream: two norms' inputs and outputs, two residual sums; in the products' dtype: q, k, v, attention out, gate, up, act, their product.
    layer = 4 * shape.hidden * stream + (2 * shape.hidden + 2 * q_and_kv + 4 * shape.intermediate) * number
    kept = shape.layers * shape.hidden * stream + layer if work.checkpointing else shape.layers * layer
    return work.micro_batch_tokens * kept + _cast_weights(shape, work, spread)


def _cast_weights(shape: ModelShape, work: Workload, spread: Spread) -> int:
    if not work.low_precision or work.weight_bytes == BFLOAT16:
        return 0
    if work.adapter_parameters and work.checkpointing:  # those of a frozen layer go with its pass
        return shape.layer_parameters * BFLOAT16
    return 0 if spread.strategy != "ddp" else (shape.parameters - shape.embedding_parameters) * BFLOAT16


def logits(shape: ModelShape, work: Workload) -> int:
    """The logits of a chunk, which become their own gradient in place, and the gradient of the head's weight while it is summed up, unless it is frozen.

    Softmax goes through them a slice at a time. While the reference is scored, the policy's own logits wait for their backward pass.
    """
    positions = work.micro_batch_completion_tokens
    chunk = positions if work.head_chunk is None else min(work.head_chunk, positions)
    waiting = positions if work.has_reference and work.head_chunk is None else 0
    softmax = 3 * SOFTMAX_SLICE * shape.vocab * FLOAT32
    head_gradient = (
        0 if work.adapter_parameters else shape.vocab * shape.hidden * (work.weight_bytes + (BFLOAT16 if work.low_precision else 0))
    )
    number = FLOAT32 if work.wide_head else work.compute_bytes
    return (chunk + waiting) * shape.vocab * number + softmax + head_gradient
