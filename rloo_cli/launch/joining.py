"""A rank among the others: joined, and proved to be what was asked for, before a model is loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping

from rloo_cli.errors import RefusedError
from rloo_cli.launch.job import Job
from rloo_cli.launch.shared_folder import prove_one_folder
from rloo_cli.run.ranks import Ranks

SHARDED = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM")
"""By these accelerate would lay the model out over the ranks."""


def join_others(job: Job) -> Ranks:
    """This process among the job's others, with which it now has a process group: gloo on a CPU, NCCL on GPUs, a GPU each.

    Raises:
        RefusedError: the processes that were started are not those that were asked for, or do not see one run folder.
    """
    import torch
    from accelerate import PartialState

    from rloo_cli.run.ranks import DEADLINE, join_ranks

    refuse_sharded(os.environ)
    state = PartialState(cpu=not torch.cuda.is_available(), timeout=DEADLINE)
    kind = state.distributed_type.value
    if state.num_processes != job.world_size or state.process_index != job.rank:
        raise RefusedError(
            f"rank {job.rank} of {job.world_size} was to be started, and this process is number {state.process_index} of "
            f"{state.num_processes} ({kind}): the launcher's environment variables (RANK, WORLD_SIZE, LOCAL_RANK) contradict each other."
        )
    wanted = "MULTI_GPU" if torch.cuda.is_available() else "MULTI_CPU"
    if kind != wanted:
        raise RefusedError(
            f"{job.world_size} processes were to train as {wanted}, and accelerate made it {kind}: see its environment variables."
        )
    ranks = join_ranks()
    prove_one_folder(job.attempt, ranks)
    return ranks


def refuse_sharded(environ: Mapping[str, str]) -> None:
    """Raise RefusedError where accelerate was told to shard the model."""
    for name in SHARDED:
        if environ.get(name, "false").lower() in ("true", "1"):
            raise RefusedError(f"{name} is set, and this version keeps a whole copy of the model in each process: unset it.")
