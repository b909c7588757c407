"""What a process holds beside its own parts: layers that are whole for a while, and buffers in which gradients are summed."""

from __future__ import annotations

from rloo_cli.plan.numbers import BFLOAT16, FLOAT32
from rloo_cli.plan.shape import ModelShape
from rloo_cli.plan.spread import Spread
from rloo_cli.plan.work import Workload

DDP_BUCKET = 64 << 20
"""Bytes of gradient that are summed at once (training/strategy_replicated.py); a larger parameter is a bucket of its own."""

SUB_GROUP = 10**9
"""Elements that DeepSpeed's stage 3 updates at once."""


def gathered(shape: ModelShape, work: Workload, spread: Spread) -> int:
    """Bytes that are held beside the activations, in the dtype of the products where nothing else is said."""
    match spread.strategy:
        case "ddp":
            return 0
        case "fsdp2":
            return _fsdp_layers(shape, work, spread)
        case "zero2":
            # A micro-batch's gradient of this process's part stands beside the sum of those before until it is added.
            own = -(-shape.parameters // spread.state_parts) * (FLOAT32 + (BFLOAT16 if work.low_precision else 0))
            return own + _zero_buckets(shape, work, spread)
        case "zero3":
            return min(shape.parameters, spread.live_parameters) * work.compute_bytes + _zero_buckets(shape, work, spread)


def _fsdp_layers(shape: ModelShape, work: Workload, spread: Spread) -> int:
    """What stands outside the layers from a forward pass to its backward pass, and the larger of: the layer in hand and the next, the
    layer's gradient, and its float32 copy that is summed; in between, what the reference has whole while it is scored."""
    number, root, layer = work.compute_bytes, shape.root_parameters, shape.layer_parameters
    kept = 0 if spread.reshard_after_forward else shape.parameters - root
    backward = (max(kept, 2 * layer) + layer) * number + layer * FLOAT32
    scoring = (kept + root + 2 * layer) * number if work.has_reference else 0
    return root * number + max(backward, scoring)


def _zero_buckets(shape: ModelShape, work: Workload, spread: Spread) -> int:
    """Two float32 buckets, one being filled while the other is summed, and the largest parameter's gradient on its way there."""
    return 2 * spread.bucket * FLOAT32 + shape.largest_tensor * (work.compute_bytes + FLOAT32)


def summed(shape: ModelShape, work: Workload, spread: Spread) -> int:
    """Bytes that are held when the activations are gone: the last gradients to be summed, or what the optimizer reads them from."""
    match spread.strategy:
        case "ddp":
            largest = max(DDP_BUCKET, shape.largest_tensor * work.weight_bytes)
            gradients = work.adapter_parameters * FLOAT32 or shape.parameters * work.weight_bytes
            return min(gradients, largest) if spread.processes > 1 else 0
        case "fsdp2":
            return shape.root_parameters * (2 * work.compute_bytes + FLOAT32)
        case "zero2" | "zero3":
            own = -(-shape.parameters // spread.state_parts)
            return (own if spread.strategy == "zero2" else min(own, SUB_GROUP)) * FLOAT32
