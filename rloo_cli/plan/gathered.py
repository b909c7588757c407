"""What a process holds beside its own parts: layers that are whole for a while, and buffers in which gradients are summed."""

from __future__ import annotations

from rloo_cli.plan.numbers import FLOAT32
from rloo_cli.plan.shape import ModelShape
from rloo_cli.plan.spread import Spread
from rloo_cli.plan.work import Workload

DDP_BUCKET = 64 << 20
"""Bytes of gradient that are summed at once (training/strategy_replicated.py); a larger parameter is a bucket of its own."""


def gathered(shape: ModelShape, work: Workload, spread: Spread) -> int:
    """Bytes that are held beside the activations.

    FSDP2 gathers in the dtype of the products: what stands outside the layers for the whole pass, that of the reference for good; the layer in
    hand and the next, and, going backward, the layer's gradient in that dtype and as the float32 numbers that are summed.
    """
    if spread.strategy == "ddp":
        return 0
    number = work.compute_bytes
    whole = shape.root_parameters * (2 if work.has_reference else 1)
    layers = shape.parameters - shape.root_parameters if not spread.reshard_after_forward else 2 * shape.layer_parameters
    return (whole + layers + shape.layer_parameters) * number + shape.layer_parameters * FLOAT32


def summed(shape: ModelShape, work: Workload, spread: Spread) -> int:
    """Bytes that are held when the activations are gone and the last gradients are summed; 0 for one process with all of it."""
    if spread.strategy == "ddp":
        largest = max(DDP_BUCKET, shape.largest_tensor * work.weight_bytes)
        return min(shape.parameters * work.weight_bytes, largest) if spread.processes > 1 else 0
    return shape.root_parameters * (2 * work.compute_bytes + FLOAT32)
