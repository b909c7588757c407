"""How a model is laid out over the processes of a run, as `accelerate` configurations say it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

StrategyName = Literal["ddp", "fsdp2", "zero2", "zero3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """What is sharded, and over how many processes."""

    strategy: StrategyName = "ddp"
    num_processes: int | None = None
    """What a file of the user's says; None = the recipe's or the command line's."""
    num_machines: int | None = None
    reshard_after_forward: bool = True
    """FSDP2: let go of a layer's whole weights between forward and backward pass."""
    cpu_offload: bool = False
    """FSDP2: parameters, gradients and optimizer state on the CPU."""
    zero: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of DeepSpeed's `zero_optimization`, from the file."""
