"""How a run's model lies over its processes, and what that costs beside the parts themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from rloo_cli.errors import RefusedError

StrategyName = Literal["ddp", "fsdp2", "zero2", "zero3"]
STRATEGIES: tuple[StrategyName, ...] = get_args(StrategyName)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Processes, machines, and what each process has of the model.

    ddp has all of it in each process; zero2 a part of gradient and optimizer state; fsdp2 and zero3 a part of everything.
    """

    strategy: StrategyName = "ddp"
    processes: int = 1
    """Of all machines."""
    machines: int = 1
    cpu_offload: bool = False
    """fsdp2: the parts lie in the machine's memory, not on the device."""
    reshard_after_forward: bool = True
    """fsdp2: whether gathered layers are given up between the forward and the backward pass."""

    @property
    def local_processes(self) -> int:
        """Processes of one machine."""
        return -(-self.processes // self.machines)

    @property
    def is_sharded(self) -> bool:
        """Whether no process holds the whole model."""
        return self.strategy in ("fsdp2", "zero3")

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


def check_machines(processes: int, machines: int) -> None:
    """Raise RefusedError where the machines would not have equally many processes."""
    if processes % machines:
        below, above = processes // machines * machines, -(-processes // machines) * machines
        nearest = " or ".join(str(count) for count in (below, above) if count)
        raise RefusedError(f"{processes} processes do not come out even on {machines} machines. Nearest that do: {nearest}.")
