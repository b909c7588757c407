"""Memory and disk of a planned run: the formula of memory.py applied to this recipe, on this machine's devices or on named ones."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from rloo_cli.plan.comparison import Verdict, advice, compare, sampling_fault
from rloo_cli.plan.context import load_config
from rloo_cli.plan.devices import DeviceMemory, machines_of_gpus
from rloo_cli.plan.memory import estimate_disk, loading_bytes, offloaded_bytes
from rloo_cli.plan.numbers import show_size
from rloo_cli.plan.shape import ModelShape, model_shape
from rloo_cli.plan.spread import Spread, crowding, spread_of
from rloo_cli.plan.work import Workload
from rloo_cli.plan.workload import lengths_of, workload
from rloo_cli.recipe.schema import Recipe
from rloo_cli.run.environment import usable_cores

if TYPE_CHECKING:
    from rloo_cli.plan.prepare import Prepared


def add_resources(document: dict[str, Any], prepared: Prepared, device: DeviceMemory, *, trust_remote_code: bool) -> str | None:
    """Add what the run needs of memory and disk, from the model's configuration: `launch`, `memory`, `strategies`, `host`, `disk` and notes.

    Returns why the run cannot work on these devices; None where nothing is known against it.
    """
    recipe, batch = prepared.checked.loaded.recipe, prepared.checked.loaded.batch
    config = load_config(recipe.model, trust_remote_code=trust_remote_code)
    shape, spread = model_shape(config), _spread(prepared, device)
    on_device, on_host = reward_model_bytes(recipe, device, trust_remote_code=trust_remote_code)
    work = workload(recipe, batch, lengths_of(prepared), config, shape, device, spread, reward_model_bytes=on_device)
    verdicts = compare(shape, work, spread, device)
    document["launch"] = _launch_document(spread)
    document["memory"] = _memory_document(recipe, shape, work, spread, device, verdicts)
    document["strategies"] = [asdict(verdict) for verdict in verdicts]
    document["host"] = _host_document(shape, work, spread, device)
    document["disk"] = _disk_document(prepared, shape, work, spread)
    document["notes"] += _notes(shape, work, spread, device)
    if on_host:
        document["notes"].append(f"Reward models with `device: cpu` take {show_size(on_host)} of the machine's own memory in each process.")
    return sampling_fault(shape, work, device) if device.kind == "cuda" else None


def reward_model_bytes(recipe: Recipe, device: DeviceMemory, *, trust_remote_code: bool) -> tuple[int, int]:
    """Bytes of the reward models' weights in one process: (on its device, in the memory of a machine with GPUs)."""
    entries = [entry for entry in recipe.rewards if entry.model is not None]
    sizes = {True: 0, False: 0}
    for entry in entries:
        from rloo_cli.training.reward_models import weight_bytes

        sizes[device.kind == "cpu" or entry.device == "auto"] += weight_bytes(entry, trust_remote_code=trust_remote_code)
    return sizes[True], sizes[False]


def _spread(prepared: Prepared, device: DeviceMemory) -> Spread:
    loaded = prepared.checked.loaded
    machines = loaded.num_machines
    if machines == 1 and device.kind == "cuda":
        machines = machines_of_gpus(loaded.num_processes)
    return spread_of(loaded.distribution, processes=loaded.num_processes, machines=machines)


def _launch_document(spread: Spread) -> dict[str, Any]:
    return {
        "strategy": spread.strategy,
        "num_processes": spread.processes,
        "num_machines": spread.machines,
        "processes_per_machine": spread.local_processes,
        "words": spread.words(),
    }


def _memory_document(
    recipe: Recipe, shape: ModelShape, work: Workload, spread: Spread, device: DeviceMemory, verdicts: tuple[Verdict, ...]
) -> dict[str, Any]:
    own = next(verdict for verdict in verdicts if verdict.strategy == spread.strategy)
    return {
        "parameters": shape.parameters,
        "dtype": f"{_trained(work)}weights {recipe.model.dtype}, computing in {'bfloat16' if work.low_precision else recipe.model.dtype}",
        "bytes": own.bytes,
        "device": device.name,
        "is_named": device.is_named,
        "total": device.total,
        "free": device.free,
        "room": device.room(spread.local_processes),
        "fits": own.fits,
        "change": advice(verdicts, spread),
    }


def _trained(work: Workload) -> str:
    return f"an adapter of {work.adapter_parameters / 1e6:,.2f} M beside them, " if work.adapter_parameters else ""


def _host_document(shape: ModelShape, work: Workload, spread: Spread, device: DeviceMemory) -> dict[str, Any]:
    """The main machine's own memory; `free` is known of this one alone."""
    return {
        "loading": loading_bytes(shape, work, spread),
        "offloaded": offloaded_bytes(shape, work, spread),
        "free": int(psutil.virtual_memory().available) if not device.is_named else None,
    }


def _disk_document(prepared: Prepared, shape: ModelShape, work: Workload, spread: Spread) -> dict[str, Any]:
    loaded = prepared.checked.loaded
    steps_per_epoch = (prepared.prompts.size or prepared.total_steps) / loaded.batch.prompts_per_step  # a stream saves by steps
    count = saved_checkpoints(loaded.recipe, prepared.total_steps, steps_per_epoch)
    folder = _existing_parent(Path(loaded.recipe.run.output_dir or "runs"))
    batches = -(-prepared.total_steps // loaded.batch.uses)
    rows = batches * loaded.batch.prompts_per_generation * loaded.batch.num_generations
    looks = evaluations(loaded.recipe, prepared.total_steps, steps_per_epoch) if prepared.eval_prompts is not None else 0
    if prepared.eval_prompts is not None:
        rows += looks * len(prepared.eval_prompts) * loaded.recipe.evaluation.num_generations_eval
    return {
        **estimate_disk(shape, work, checkpoints=count, rows=rows, files=batches + looks, spread=spread),
        "count": count,
        "folder": str(folder),
        "free": shutil.disk_usage(folder).free,
    }


def _notes(shape: ModelShape, work: Workload, spread: Spread, device: DeviceMemory) -> Iterator[str]:
    if device.kind == "cpu" and (note := crowding(spread.local_processes, usable_cores())) is not None:
        yield f"{note}."
    if device.kind == "cpu" and spread.is_sharded and work.sampler == "transformers":
        size = show_size(shape.parameters * work.sampling_bytes)
        yield (
            f"{spread.strategy} cuts the trained model, and without vLLM each process samples with a whole copy of it, {size}; where "
            "that is more than a device has, set generation.use_vllm."
        )


def saved_checkpoints(recipe: Recipe, total_steps: int, steps_per_epoch: float) -> int:
    """How many checkpoints lie on disk at the end."""
    run = recipe.run
    if run.save_strategy == "no":
        return 0
    every = run.save_steps if run.save_strategy == "steps" else max(1, math.ceil(steps_per_epoch))
    count = -(-total_steps // every)  # the last step is saved as well
    return min(count, run.save_total_limit) if run.save_total_limit is not None else count


def evaluations(recipe: Recipe, total_steps: int, steps_per_epoch: float) -> int:
    """How many evaluations a run makes; the last step's among them."""
    evaluation = recipe.evaluation
    count = int(evaluation.eval_on_start)
    if evaluation.eval_strategy == "no":
        return count
    steps = evaluation.eval_steps or recipe.run.logging_steps
    every = steps if evaluation.eval_strategy == "steps" else max(1, math.ceil(steps_per_epoch))
    return count + -(-total_steps // every)


def _existing_parent(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path
