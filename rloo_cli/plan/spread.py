"""How a run's model lies over its processes, and what that costs beside the parts themselves."""

from __future__ import annotations

from dataclasses import dataclass

from rloo_cli.errors import RefusedError
from rloo_cli.recipe.accelerate_keys import StrategyName
from rloo_cli.recipe.distribution import Distribution

BUCKET = 1 << 24
"""Elements of a bucket of gradients under ZeRO (training/strategy_zero.py)."""
LIVE_PARAMETERS = 10**9
"""DeepSpeed's own stage3_max_live_parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Processes, machines, and what each process has of the model.

    ddp has all of it in each process; zero2 a part of gradient and optimizer state; fsdp2 and zero3 a part of everything.
    """

    strategy: StrategyName = "ddp"
    processes: int = 1
    """Of all machines."""
    machines: int = 1
    is_offloaded: bool = False
    """fsdp2: the parts of weights, gradient and optimizer state lie in the machine's memory, not on the device."""
    reshard_after_forward: bool = True
    """fsdp2: whether gathered layers are given up between the forward and the backward pass."""
    bucket: int = BUCKET
    """zero2 and zero3: gradients that are summed at once."""
    live_parameters: int = LIVE_PARAMETERS
    """zero3: parameters that may be whole at once."""

    @property
    def local_processes(self) -> int:
        """Processes of one machine."""
        return -(-self.processes // self.machines)

    @property
    def is_sharded(self) -> bool:
        """Whether no process holds the whole model."""
        return self.strategy in ("fsdp2", "zero3")

    @property
    def is_zero(self) -> bool:
        """Whether DeepSpeed updates float32 numbers of its own, beside the weights."""
        return self.strategy in ("zero2", "zero3")

    @property
    def weight_parts(self) -> int:
        """Into how many parts weights and reference are cut."""
        return self.processes if self.is_sharded else 1

    @property
    def state_parts(self) -> int:
        """Into how many parts gradient and optimizer state are cut."""
        return 1 if self.strategy == "ddp" else self.processes

    def words(self) -> str:
        """`32 processes on 4 machines of 8, zero3`."""
        if self.processes == 1:
            return "1 process" if self.strategy == "ddp" else f"1 process, {self.strategy}"
        where = "1 machine" if self.machines == 1 else f"{self.machines} machines of {self.local_processes}"
        return f"{self.processes} processes on {where}, {self.strategy}"


def spread_of(distribution: Distribution, *, processes: int, machines: int) -> Spread:
    """How that distribution lies on so many processes and machines."""
    zero = distribution.zero
    return Spread(
        strategy=distribution.strategy,
        processes=processes,
        machines=machines,
        is_offloaded=distribution.cpu_offload,
        reshard_after_forward=distribution.reshard_after_forward,
        bucket=int(zero.get("reduce_bucket_size", BUCKET)),
        live_parameters=int(zero.get("stage3_max_live_parameters", LIVE_PARAMETERS)),
    )


def check_machines(processes: int, machines: int) -> None:
    """Raise RefusedError where the machines would not have equally many processes."""
    if processes % machines:
        below, above = processes // machines * machines, -(-processes // machines) * machines
        nearest = " or ".join(str(count) for count in (below, above) if count)
        raise RefusedError(f"{processes} processes do not come out even on {machines} machines. Nearest that do: {nearest}.")


def crowding(processes: int, cores: int) -> str | None:
    """What to tell where a machine's processes, which train on its cores, are more than these; None where they are not."""
    if processes <= cores:
        return None
    return f"{processes} processes on {cores} core{'s' if cores > 1 else ''} take turns and hold as many copies: as many as there are cores are faster"
