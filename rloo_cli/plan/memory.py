"""How much memory a process of a run needs on its device, by term, from the model's configuration alone.

The peak is what stands all the time, plus the larger of what the two halves of a step add:

    standing   weights, ZeRO's own copy of its part, optimizer state, copy that samples, reference, the libraries' own
    rollout    KV cache of the rows that decode
    update     gradients, and the larger of: activations of a micro-batch, logits of a chunk and layers that are gathered for a while;
               the buffers in which the last gradients are summed

How much of each a process has, the strategy says (spread.py). Bytes throughout. A formula, not a measurement: tests hold its parts to
the tensors that the strategies have, and its peak within 30 % of measured ones.
"""

from __future__ import annotations

from dataclasses import replace

from rloo_cli.plan.gathered import gathered, summed
from rloo_cli.plan.numbers import FLOAT32
from rloo_cli.plan.passes import activations, kv_cache, logits
from rloo_cli.plan.shape import ModelShape
from rloo_cli.plan.spread import Spread
from rloo_cli.plan.work import Workload

ALLOCATOR_SLACK = 0.1
"""Share of the live tensors that the allocator holds beyond them (measured on CPUs: 0 to 0.2)."""
RUNTIME = 150 << 20
"""What the libraries take when they are first used: code pages, kernels' caches, buffers (measured: 115 to 155 MiB)."""
GPU_RUNTIME = 1 << 30
"""On a GPU: CUDA's context, the workspaces of its libraries, NCCL's buffers."""
VLLM_ROWS = 64
"""Rows whose keys and values vLLM has room for on a CPU (rollout/vllm_build.py)."""
OPTIMIZER_STATES = {"adamw_torch": 2, "adamw_torch_fused": 2, "sgd": 0, "adagrad": 1, "rmsprop": 1, "adafactor": 0}
"""Numbers kept for each parameter; adafactor keeps a row and a column of each matrix, next to nothing."""
ROLLOUT_FILE = 5 << 10
"""Bytes of a rollout file without any row: the description of its columns."""
STANDING = ("weights", "master", "optimizer", "decode copy", "vllm", "reference", "reward models")
"""Terms that are there all the time."""


def estimate_memory(shape: ModelShape, work: Workload, spread: Spread | None = None) -> dict[str, int]:
    """Bytes of each term in one process, in the order in which `plan` prints them, and `peak`."""
    spread = spread or Spread()
    terms = {**_states(shape, work, spread), **_passes(shape, work, spread)}
    standing = sum(terms[name] for name in STANDING)
    passes = terms["activations"] + terms["logits"] + terms["gathered"]
    rollout, update = terms["kv cache"], terms["gradients"] + max(passes, terms["summed"])
    if spread.strategy == "zero3":  # its buffer for gradients is there all the time
        rollout += terms["gradients"]
    if work.vllm_sleeps:
        standing, rollout = standing - terms["vllm"], rollout + terms["vllm"]
    live = max(standing + max(rollout, update), _at_start(shape, work, spread))
    terms |= {"allocator": round(ALLOCATOR_SLACK * (live - work.vllm_share)), "runtime": GPU_RUNTIME if work.on_gpu else RUNTIME}
    return {**terms, "peak": live + terms["allocator"] + terms["runtime"]}


def _at_start(shape: ModelShape, work: Workload, spread: Spread) -> int:
    """Where each process has all of it, the weights come to the device as the recipe holds them, whatever they are made to there."""
    return 0 if spread.is_sharded else shape.parameters * work.weight_bytes


def _states(shape: ModelShape, work: Workload, spread: Spread) -> dict[str, int]:
    """What stands, and the gradients."""
    n, trained, state = shape.parameters, trained_numbers(shape, work), state_bytes(work, spread)
    here = int(not spread.is_offloaded)
    return {
        "weights": here * _part(n * held_bytes(work, spread) + work.adapter_parameters * FLOAT32, spread.weight_parts),
        "master": _part(n * FLOAT32, spread.state_parts) if spread.is_zero else 0,
        "optimizer": here * _part(trained * state * optimizer_numbers(work, spread), spread.state_parts),
        "decode copy": sampling_copy(shape, work, spread),
        "vllm": _vllm(shape, work) if work.sampler == "vllm" else 0,
        "reference": here * _part(_reference(shape, work, spread), spread.weight_parts),
        "reward models": work.reward_model_bytes,  # whole in each process, whatever the model lies over
        "gradients": here * _part(trained * state, spread.state_parts),
    }


def trained_numbers(shape: ModelShape, work: Workload) -> int:
    """Parameters that have a gradient: the model's, or those of the adapter in it."""
    return work.adapter_parameters or shape.parameters


def optimizer_numbers(work: Workload, spread: Spread) -> int:
    """Numbers that the optimizer keeps for each parameter. ZeRO gives it flat buffers, which adafactor cannot factor."""
    return 1 if spread.is_zero and work.optim == "adafactor" else OPTIMIZER_STATES[work.optim]


def held_bytes(work: Workload, spread: Spread) -> int:
    """Bytes of a weight as a pass uses it: ZeRO holds them in the low precision itself."""
    return work.compute_bytes if spread.is_zero else work.weight_bytes


def state_bytes(work: Workload, spread: Spread) -> int:
    """Bytes of a number of gradient and optimizer state: ZeRO's are float32 and an adapter's too, others are as the weights."""
    return FLOAT32 if spread.is_zero or work.adapter_parameters else work.weight_bytes


def _passes(shape: ModelShape, work: Workload, spread: Spread) -> dict[str, int]:
    return {
        "kv cache": kv_cache(shape, work) if work.sampler == "transformers" else 0,
        "activations": activations(shape, work, spread),
        "logits": logits(shape, work),
        "gathered": gathered(shape, work, spread),
        "summed": summed(shape, work, spread),
    }


def _part(size: int, parts: int) -> int:
    return -(-size // parts)


def sampling_copy(shape: ModelShape, work: Workload, spread: Spread) -> int:
    """The whole model that samples, where it is not the trained one itself: parts cannot sample, and float32 is slow at it."""
    if work.sampler != "transformers":
        return 0
    has_copy = spread.is_sharded or work.sampling_bytes < held_bytes(work, spread)
    return shape.parameters * work.sampling_bytes if has_copy else 0


def _reference(shape: ModelShape, work: Workload, spread: Spread) -> int:
    """Under bf16, where only products are in it (autocast), the embeddings stay as they are."""
    if not work.has_reference or work.adapter_parameters:  # the same model, its adapter off
        return 0
    if work.reference_moves:
        return shape.parameters * work.weight_bytes
    kept = shape.embedding_parameters if spread.strategy == "ddp" else 0
    return (shape.parameters - kept) * work.sampling_bytes + kept * work.weight_bytes


def _vllm(shape: ModelShape, work: Workload) -> int:
    """A GPU's share; on a CPU its weights, which it holds twice (plain, and as its kernels want them), and keys and values of some rows."""
    if work.vllm_share:
        return work.vllm_share
    positions = VLLM_ROWS * (work.prompt_tokens + work.completion_tokens)
    whole = 2 * shape.parameters + positions * shape.layers * 2 * shape.kv_heads * shape.head_dim
    return _part(work.compute_bytes * whole, work.vllm_parts)


def vllm_lacks(shape: ModelShape, work: Workload) -> int:
    """Bytes that vLLM's share of a GPU is too small for its weights and keys and values of one row; 0 where there is no such share."""
    if not work.vllm_share:
        return 0
    row = work.row_tokens * shape.layers * 2 * shape.kv_heads * shape.head_dim
    needed = _part(work.sampling_bytes * (shape.parameters + row), work.vllm_parts)
    return max(0, needed - work.vllm_share)


def loading_bytes(shape: ModelShape, work: Workload, spread: Spread) -> int:
    """Bytes of a machine's own memory while the model is loaded: one copy in the main process under sharding, one a process otherwise."""
    copies = 1 if spread.is_sharded else spread.local_processes
    return shape.parameters * work.weight_bytes * copies


def offloaded_bytes(shape: ModelShape, work: Workload, spread: Spread) -> int:
    """Bytes of a machine's own memory that hold its processes' parts where they are offloaded."""
    whole = _states(shape, work, replace(spread, is_offloaded=False))
    left = _states(shape, work, spread)
    return spread.local_processes * sum(whole[term] - left[term] for term in whole)


def estimate_disk(
    shape: ModelShape, work: Workload, *, checkpoints: int, rows: int, files: int, spread: Spread | None = None
) -> dict[str, int]:
    """Bytes of one checkpoint, of what a process writes of it, of all that are kept, of `final/` and of the rollouts at most.

    `rows`: completions of the run, those of evaluations too; `files`: in which they lie.

    A checkpoint is as large under any strategy: where the optimizer's state lies in parts, each process writes its own.
    """
    spread = spread or Spread()
    trained, number = trained_numbers(shape, work), state_bytes(work, spread)
    weights = trained * number
    reference = weights if work.reference_moves else 0
    checkpoint = weights + trained * number * optimizer_numbers(work, spread) + reference
    text_and_ids = work.completion_tokens * (4 + 4 + 4)  # text, id and log-prob of a token; parquet's compression is left out
    return {
        "checkpoint": checkpoint,
        "process": _part(checkpoint, spread.state_parts),
        "checkpoints": checkpoint * checkpoints,
        "final": weights,
        "rollouts": rows * text_and_ids + files * ROLLOUT_FILE,
    }
