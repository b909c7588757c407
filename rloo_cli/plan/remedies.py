"""What to change first where a run does not fit: found by trying each change in the formula, those without a price first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from rloo_cli.plan.memory import estimate_memory, vllm_lacks
from rloo_cli.plan.shape import ModelShape
from rloo_cli.plan.spread import Spread
from rloo_cli.plan.work import Workload

MOST_PROCESSES = 4096
MOST_PERCENT = 90
"""Of a GPU's memory that may be proposed for vLLM."""
HEAD_CHUNK = 128
TOKEN_UNIT = 256
WORTH_IT = 0.98
"""A change that leaves more than this share of the peak is not worth being named."""
SMALLEST_BUDGET = 1024
"""Tokens of a micro-batch below which nothing is proposed: the device would be idle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run that may or may not fit, and what was changed to come to it."""

    shape: ModelShape
    work: Workload
    spread: Spread
    room: int
    """Bytes that a process may use."""
    gpu: int = 0
    """Bytes of the whole GPU, where there is one."""
    changes: tuple[str, ...] = ()

    @property
    def peak(self) -> int:
        """Bytes that a process needs."""
        return estimate_memory(self.shape, self.work, self.spread)["peak"]

    @property
    def fits(self) -> bool:
        """Whether it has the room that it needs, and vLLM its own."""
        return self.peak <= self.room and not vllm_lacks(self.shape, self.work)

    @property
    def shortage(self) -> int:
        """Bytes that the process needs, and those that vLLM lacks in its share."""
        return self.peak + vllm_lacks(self.shape, self.work)

    def changed(self, what: str, *, work: Workload | None = None, spread: Spread | None = None) -> Case:
        """The case after one more change."""
        return replace(self, work=work or self.work, spread=spread or self.spread, changes=(*self.changes, what))


def remedy(case: Case) -> str | None:
    """The field to change first, or several together, or how many processes it takes; None where nothing helps."""
    single = next((after for after in _changes(case) if after.fits), None)
    if single is not None:
        return single.changes[-1]
    helped = _all_that_help(case)
    found = next((after for after in (helped, _more_processes(case), _more_processes(helped)) if after.fits), None)
    offloaded = next((after for after in _offloaded(case) if after.fits), None)
    return ", or ".join(" and ".join(after.changes) for after in (found, offloaded) if after is not None) or None


def _all_that_help(case: Case) -> Case:
    """The case after one change after another, the one that helps most first, until it fits or none helps any more."""
    while not case.fits:
        step = min(_changes(case), key=lambda after: after.shortage, default=case)
        if step.shortage > WORTH_IT * case.shortage:
            break
        case = step
    return case


def _more_processes(case: Case) -> Case:
    count = case.spread.processes
    while case.spread.strategy != "ddp" and not case.fits and count < MOST_PROCESSES:
        count *= 2
        machines = max(1, count // case.spread.local_processes) if case.spread.machines > 1 else case.spread.machines
        case = replace(case, spread=replace(case.spread, processes=count, machines=machines))
    return replace(case, changes=(*case.changes, f"`--num-processes {count}`"))


def _changes(case: Case) -> Iterator[Case]:
    """Single changes, in the order in which one would rather make them. The strategy stays; none changes what is optimised."""
    work = case.work
    if not work.checkpointing:
        yield case.changed("`training.gradient_checkpointing: true`", work=replace(work, checkpointing=True))
    if work.on_gpu and not work.low_precision:
        yield case.changed("`training.bf16: true`", work=replace(work, low_precision=True))
    if work.head_chunk is None or work.head_chunk > HEAD_CHUNK:
        yield case.changed(f"`training.head_chunk: {HEAD_CHUNK}`", work=replace(work, head_chunk=HEAD_CHUNK))
    yield from _smaller_batches(case)
    yield from _other_samplers(case)


def _offloaded(case: Case) -> Iterator[Case]:
    """What makes room on the device and is slow."""
    if case.spread.strategy == "fsdp2" and not case.spread.is_offloaded:
        spread = replace(case.spread, is_offloaded=True)
        yield case.changed("`fsdp_offload_params: true` in a file for `run.accelerate_config`", spread=spread)


def _smaller_batches(case: Case) -> Iterator[Case]:
    tokens, share = case.work.micro_batch_tokens, case.work.micro_batch_completion_tokens / case.work.micro_batch_tokens
    while (tokens := tokens // 2 // TOKEN_UNIT * TOKEN_UNIT) >= max(SMALLEST_BUDGET, case.work.row_tokens):
        work = replace(case.work, micro_batch_tokens=tokens, micro_batch_completion_tokens=round(tokens * share))
        yield case.changed(f"`training.max_tokens_per_micro_batch: {tokens}`", work=work)


def _other_samplers(case: Case) -> Iterator[Case]:
    work, share, lacks = case.work, case.work.vllm_share, vllm_lacks(case.shape, case.work)
    if lacks and (percent := math.ceil(100 * (share + lacks) / case.gpu) + 1) <= MOST_PERCENT:
        yield case.changed(
            f"`generation.vllm_gpu_memory_utilization: {percent / 100}`", work=replace(work, vllm_share=case.gpu * percent // 100)
        )
    if lacks and (parts := 2 * work.vllm_parts) <= case.spread.local_processes and case.shape.kv_heads % parts == 0:
        yield case.changed(f"`generation.vllm_tensor_parallel_size: {parts}`", work=replace(work, vllm_parts=parts))
    if work.sampler == "vllm" and work.on_gpu and not work.vllm_sleeps:
        yield case.changed("`generation.vllm_enable_sleep_mode: true`", work=replace(work, vllm_sleeps=True))
    if work.sampler == "transformers":
        elsewhere = replace(work, sampler="elsewhere")
        yield case.changed("`generation.use_vllm: true` with `vllm_mode: server`", work=elsewhere)
    elif work.sampler == "vllm":
        yield case.changed("`generation.vllm_mode: server`", work=replace(work, sampler="elsewhere", vllm_share=0, vllm_sleeps=False))
