"""How a model lies over the processes that train it, as a value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rloo_cli.recipe.accelerate_keys import StrategyName

Precision = Literal["no", "bf16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """How model, gradients and optimizer lie over the processes, and what a user's file says about these."""

    strategy: StrategyName = "ddp"
    num_processes: int | None = None
    """Of all machines, as a file of the user's says; None = the recipe or the command line says it."""
    num_machines: int | None = None
    machine_rank: int | None = None
    main_process_ip: str | None = None
    main_process_port: int | None = None
    mixed_precision: Precision | None = None
    """As a file says; the recipe's `bf16` has to agree."""
    reshard_after_forward: bool = True
    """Of fsdp2: whether a layer's parameters are freed after its forward pass and gathered again in the backward pass."""
    cpu_offload: bool = False
    """Of fsdp2: parameters, gradients and optimizer state stay on the CPU."""
    zero: Mapping[str, Any] = field(default_factory=dict)
    """Of zero2 and zero3: further keys of DeepSpeed's `zero_optimization`."""
    notes: tuple[str, ...] = ()
    """What was read and has no effect, a line each."""

    def is_same_layout(self, other: Distribution) -> bool:
        """Whether both lay the model out alike, whoever says how many processes there are."""
        ours, theirs = (
            (each.strategy, each.reshard_after_forward, each.cpu_offload, json.dumps(dict(each.zero), sort_keys=True))
            for each in (self, other)
        )
        return ours == theirs
