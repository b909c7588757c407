"""The machines that train together: how many, which one this is, and where the first is found.

The command line says it, else the step of a SLURM job, else a file of `accelerate config`, each of the four by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TypeVar

from rloo_cli.errors import RefusedError
from rloo_cli.launch.step import Step
from rloo_cli.recipe.distribution import Distribution

T = TypeVar("T")

PORT = 29500
"""As torchrun and accelerate take it where none is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineOptions:
    """What the command line says; None = nothing."""

    num_machines: int | None = None
    machine_rank: int | None = None
    main_process_ip: str | None = None
    main_process_port: int | None = None

    def named(self) -> dict[str, int | str | None]:
        """By the names that they have on a command line."""
        return {f"--{field.name.replace('_', '-')}": getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Several machines, and this one among them."""

    num_machines: int
    machine_rank: int
    host: str
    """Of machine 0, as the others reach it."""
    port: int
    """At which the launcher of machine 0 listens."""

    @property
    def is_main(self) -> bool:
        """Whether the launcher of this machine decides."""
        return self.machine_rank == 0


def machines_asked(options: MachineOptions, step: Step | None) -> int | None:
    """How many machines are known of before the recipe is read; None where only a file of `accelerate config` can say."""
    return options.num_machines or (step.num_machines if step is not None else None)


def choose_cluster(options: MachineOptions, step: Step | None, distribution: Distribution) -> Cluster | None:
    """The machines that train together; None for one.

    Raises:
        RefusedError: something is missing, or contradicts something else.
    """
    if options.num_machines == 1:
        step = None
    number = machines_asked(options, step) or distribution.num_machines or 1
    if number == 1:
        if any(value for name, value in options.named().items() if name != "--num-machines"):
            given = [name for name, value in options.named().items() if value is not None and name != "--num-machines"]
            raise RefusedError(f"{', '.join(given)}: one machine needs none of these; say --num-machines N for several.")
        return None
    rank = _first(options.machine_rank, step.machine_rank if step else None, distribution.machine_rank)
    host = _first(options.main_process_ip, step.first_host if step else None, distribution.main_process_ip)
    port = _first(options.main_process_port, step.port if step else None, distribution.main_process_port or None) or PORT
    if rank is None:
        others = f"1 to {number - 1} on the others" if number > 2 else "1 on the other"
        raise RefusedError(f"--machine-rank is missing: 0 on the machine that --main-process-ip names, {others}.")
    if rank >= number:
        raise RefusedError(f"--machine-rank {rank}: {number} machines count from 0 to {number - 1}.")
    if host is None:
        raise RefusedError("--main-process-ip is missing: a name or address by which the other machines reach machine 0.")
    return Cluster(num_machines=number, machine_rank=rank, host=host, port=port)


def local_share(num_processes: int, num_machines: int) -> int:
    """How many of all processes each machine starts.

    Raises:
        RefusedError: they do not come out even.
    """
    each, rest = divmod(num_processes, num_machines)
    if rest:
        low = f"{each * num_machines} or " if each else ""
        raise RefusedError(
            f"run.num_processes: {num_processes} processes on {num_machines} machines: all start equally many, so that {low}"
            f"{(each + 1) * num_machines} would do (the number counts those of all machines)."
        )
    return each


def without_layout(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what `accelerate launch` put into it for its own wrapping of models, which is not used."""
    return {name: value for name, value in environ.items() if not is_of_layout(name)}


def is_of_layout(name: str) -> bool:
    """Whether accelerate reads a layout of the model, or a division of the loss, out of this environment variable."""
    return name.startswith(("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_DEEPSPEED_", "FSDP_", *OTHER_VARIABLES))


OTHER_VARIABLES = (
    "ACCELERATE_USE_MEGATRON_LM",
    "ACCELERATE_CONFIG_DS_FIELDS",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "ACCELERATE_GRADIENT_CLIPPING",
    "ACCELERATE_USE_PARALLELISM_CONFIG",
)


def _first(*values: T | None) -> T | None:
    return next((value for value in values if value is not None), None)
