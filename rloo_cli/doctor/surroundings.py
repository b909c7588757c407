"""What the environment says to a run that may not be meant: variables that a launcher left, and SLURM."""

from __future__ import annotations

import shutil
from collections.abc import Mapping

from rloo_cli.doctor.check import Check, judged
from rloo_cli.errors import RefusedError
from rloo_cli.launch.cluster import is_of_layout
from rloo_cli.launch.given import place_of
from rloo_cli.launch.step import step_of, told_of_other_nodes

RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
MISLEADING = {
    "ACCELERATE_MIXED_PRECISION": "training.bf16 decides",
    "ACCELERATE_USE_CPU": "a GPU would not be used",
    "ACCELERATE_DYNAMO_BACKEND": "nothing here is compiled",
    "CUDA_LAUNCH_BLOCKING": "every kernel is waited for",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL slows every collective",
    "NCCL_P2P_DISABLE": "GPUs do not talk to each other directly",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every allocation goes to the driver",
}
"""Variable → what it does that is seldom meant."""
OFF = ("", "0", "no", "false", "off", "info")


def look_at_launcher(environ: Mapping[str, str]) -> Check:
    """Variables of torchrun and accelerate that lie about, and others that slow a run down."""
    is_launched = "TORCHELASTIC_RUN_ID" in environ or "GROUP_RANK" in environ
    ranks = [] if is_launched else [name for name in RANKS[:2] if name in environ]
    layout = sorted(name for name in environ if is_of_layout(name))
    slow = [name for name in MISLEADING if environ.get(name, "").lower() not in OFF]
    if ranks:
        said = f"{' and '.join(ranks)} in the environment: {_word_of_run(environ)}"
        return judged("launcher", said, remedy=f"unset {' '.join(name for name in RANKS if name in environ)}", fails=True, variables=ranks)
    if layout or slow:
        said = "; ".join(
            [
                *([f"{layout[0]} and {len(layout) - 1} more of accelerate's"] if layout else []),
                *(f"{name}: {MISLEADING[name]}" for name in slow),
            ]
        )
        return judged("launcher", said, remedy=f"unset {' '.join([*layout, *slow])}", warns=True, variables=[*layout, *slow])
    return judged(
        "launcher", "under torchrun or accelerate launch" if is_launched else "no variables of a launcher lie about", variables=[]
    )


def _word_of_run(environ: Mapping[str, str]) -> str:
    """What a run makes of what a launcher left: it refuses a part of it, or waits for the others."""
    try:
        place = place_of(environ)
    except RefusedError:
        return "a run takes them for a part of what a launcher says, and refuses to start"
    if place is None:
        return "a run takes itself for the only process of a launcher"
    return f"a run takes itself for one of {place.world_size} processes, and waits for the others"


def look_at_slurm(environ: Mapping[str, str]) -> Check:
    """Whether this is a job of SLURM's, and one that a run understands."""
    job = environ.get("SLURM_JOB_ID")
    if job is None:
        there = "none here" if shutil.which("sbatch") is None else "not in a job; `rloo slurm RECIPE` writes a batch script"
        return judged("slurm", there, job=None)
    try:
        step = step_of(environ)
    except RefusedError as error:
        return judged("slurm", f"job {job}: {error.message}", remedy="srun --ntasks-per-node=1", fails=True, job=job)
    if (note := told_of_other_nodes(environ)) is not None:
        return judged("slurm", f"job {job}: {note}", remedy="start rloo by srun", warns=True, job=job)
    said = f"job {job}" + (
        f", machine {step.machine_rank} of {step.num_machines}, the first is {step.first_host}" if step is not None else ", one machine"
    )
    return judged("slurm", said, job=job)
