"""What a process holds beside its own parts, for the time of a layer or of a sum over the processes."""

from __future__ import annotations

from rloo_cli.plan.numbers import BFLOAT16, FLOAT32
from rloo_cli.plan.shape import ModelShape
from rloo_cli.plan.spread import Spread
from rloo_cli.plan.work import Workload

DDP_BUCKET = 64 << 20
"""Bytes of gradient that are summed at once (training/strategy.py); a larger parameter is a bucket of its own."""


def gathered(shape: ModelShape, work: Workload, spread: Spread) -> int:
    """Bytes of layers that are whole for a while, and of buffers in which gradients are summed; 0 for one process."""
    if spread.processes == 1 and spread.strategy == "ddp":
        return 0
    if spread.strategy == "ddp":
        return min(shape.parameters * work.weight_bytes, max(DDP_BUCKET, shape.largest_tensor * work.weight_bytes))
    number = BFLOAT16 if work.low_precision else FLOAT32
    return 2 * shape.layer_parameters * number
