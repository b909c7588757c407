"""What SLURM says in the environment of a task: which machine of the step this is, and where the first one is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from rloo_cli.errors import RefusedError

FIRST_PORT, PORTS = 10000, 10000
"""Below the range from which the kernel takes ports for outgoing connections."""
STEPS_PER_JOB = 64
FIRST_SPECIAL_STEP = 0xFFFFFF00
"""Step ids from here on are the batch script itself, and the shell of `salloc`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of a SLURM job with one task on each of its nodes."""

    num_machines: int
    machine_rank: int
    first_host: str
    port: int
    """Derived from job and step, so that every task comes to the same one."""


def step_of(environ: Mapping[str, str]) -> Step | None:
    """The step of several nodes that this process is a task of; None outside of one.

    Raises:
        RefusedError: it has several tasks on a node.
    """
    number = environ.get("SLURM_STEP_ID", "")
    if not number.isdecimal() or int(number) >= FIRST_SPECIAL_STEP or "SLURM_PROCID" not in environ:
        return None
    nodes = _number(environ, "SLURM_STEP_NUM_NODES")
    if (tasks := _most_tasks(environ.get("SLURM_STEP_TASKS_PER_NODE", "1"))) > 1:
        raise RefusedError(
            f"{tasks} tasks of this SLURM step run on a node, and one starts all processes of its node: say `srun --ntasks-per-node=1 "
            f"--gpus-per-node={tasks} rloo train …`. For trainings that have nothing to do with each other add `--num-machines 1`."
        )
    if nodes == 1:
        return None
    return Step(
        num_machines=nodes,
        machine_rank=_number(environ, "SLURM_NODEID"),  # counts within the step, not within the job
        first_host=first_host(environ.get("SLURM_STEP_NODELIST", "")),
        port=FIRST_PORT + (_number(environ, "SLURM_JOB_ID") * STEPS_PER_JOB + int(number)) % PORTS,
    )


def told_of_other_nodes(environ: Mapping[str, str]) -> str | None:
    """A note where a batch script on several nodes starts us without srun: then this node trains alone."""
    nodes = environ.get("SLURM_JOB_NUM_NODES", environ.get("SLURM_NNODES", ""))
    number = environ.get("SLURM_STEP_ID", "")
    if (number.isdecimal() and int(number) < FIRST_SPECIAL_STEP) or not nodes.isdecimal() or int(nodes) < 2:
        return None
    return f"this SLURM job has {nodes} nodes, and only this one trains: `srun --ntasks-per-node=1 rloo train …` trains on all of them"


def first_host(node_list: str) -> str:
    """The first of the hosts that a node list of SLURM's names: `gpu[003-007,9],login` → `gpu003`.

    Raises:
        RefusedError: it names none.
    """
    found = re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", node_list)  # ranges become their first number before the commas in them can matter
    host = found.partition(",")[0].strip()
    if not host:
        raise RefusedError("SLURM_STEP_NODELIST names no host: say --main-process-ip, or --num-machines 1 to train on this machine alone.")
    return host


def _most_tasks(text: str) -> int:
    """`8(x2),4` → 8."""
    counts = [part.partition("(")[0] for part in text.split(",")]
    return max(int(count) for count in counts) if all(count.isdecimal() for count in counts) else 1


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not text.isdecimal():
        raise RefusedError(f"{name} in the environment is no number ({text[:40]!r}), though SLURM_STEP_ID is set: unset both, or use srun.")
    return int(text)
