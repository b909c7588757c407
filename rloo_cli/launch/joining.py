"""A rank among the others: joined, and proved to be what was asked for, before a model is loaded."""

from __future__ import annotations

from collections.abc import MutableMapping

from rloo_cli.errors import RefusedError
from rloo_cli.launch.cluster import is_of_layout
from rloo_cli.launch.job import Job
from rloo_cli.launch.shared_folder import prove_one_folder
from rloo_cli.run.ranks import Ranks


def join_others(job: Job) -> Ranks:
    """This process among the job's others, with which it now has a process group: gloo on a CPU, NCCL on GPUs, a GPU each.

    Raises:
        RefusedError: the processes that were started are not those that were asked for, or do not see one run folder.
    """
    import torch
    from accelerate import PartialState

    from rloo_cli.run.ranks import DEADLINE, join_ranks

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


def keep_layout_ours(environ: MutableMapping[str, str]) -> None:
    """Leave it to the strategy to shard what `accelerate launch` was told to; what that was has been read."""
    for name in [name for name in environ if is_of_layout(name)]:
        del environ[name]
