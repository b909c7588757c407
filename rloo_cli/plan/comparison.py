"""The four strategies side by side for one recipe: what each needs, whether it fits, and what to change where it does not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rloo_cli.plan.devices import DeviceMemory
from rloo_cli.plan.memory import estimate_memory, vllm_lacks
from rloo_cli.plan.numbers import show_size
from rloo_cli.plan.remedies import Case, remedy
from rloo_cli.plan.shape import ModelShape
from rloo_cli.plan.spread import Spread
from rloo_cli.plan.work import Workload
from rloo_cli.recipe.accelerate_keys import StrategyName

BY_WEIGHT: tuple[StrategyName, ...] = ("ddp", "zero2", "fsdp2", "zero3")
"""In the order in which one would take them: what needs less communication first."""
TERMS = {
    "weights": "weights",
    "master": "ZeRO's float32 copy",
    "optimizer": "optimizer state",
    "decode copy": "the whole copy that samples",
    "vllm": "vLLM",
    "reference": "the reference",
    "kv cache": "the KV cache",
    "gradients": "gradients",
    "activations": "activations",
    "logits": "logits",
    "gathered": "gathered layers",
    "summed": "sums of gradients",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a strategy comes to on the devices of the plan."""

    strategy: StrategyName
    bytes: Mapping[str, int]
    """By term, and `peak`."""
    fits: bool
    why: str
    """`41.2 of 79.2 GiB`, or what there is too much of."""
    change: str | None
    """What to change first so that it fits, without another strategy; None where it fits, or nothing helps."""


def compare(shape: ModelShape, work: Workload, spread: Spread, device: DeviceMemory) -> tuple[Verdict, ...]:
    """A verdict for each strategy on these processes; the one of `spread` is as its file has it, the others by their defaults."""
    strategies = (spread.strategy,) if work.adapter_parameters else BY_WEIGHT  # an adapter is trained beside a whole model
    return tuple(_verdict(shape, work, _with(spread, name), device) for name in strategies)


def _with(spread: Spread, strategy: StrategyName) -> Spread:
    if strategy == spread.strategy:
        return spread
    return Spread(strategy=strategy, processes=spread.processes, machines=spread.machines)


def _verdict(shape: ModelShape, work: Workload, spread: Spread, device: DeviceMemory) -> Verdict:
    room = device.room(spread.local_processes)
    case = Case(shape=shape, work=work, spread=spread, room=room, gpu=device.total if device.kind == "cuda" else 0)
    terms = estimate_memory(shape, work, spread)
    return Verdict(
        strategy=spread.strategy,
        bytes=terms,
        fits=case.fits,
        why=_why(case, terms, room),
        change=None if case.fits else remedy(case),
    )


def _why(case: Case, terms: Mapping[str, int], room: int) -> str:
    of = f"{show_size(terms['peak'])} of {show_size(room)}"
    if terms["peak"] > room:
        return f"{of}, most of it {_largest(terms)}"
    lacks = vllm_lacks(case.shape, case.work)
    return f"vLLM lacks {show_size(lacks)} in its share of {show_size(case.work.vllm_share)}" if lacks else of


def _largest(terms: Mapping[str, int]) -> str:
    name = max(TERMS, key=lambda term: terms[term])
    return f"{TERMS[name]} ({show_size(terms[name])})"


def advice(verdicts: tuple[Verdict, ...], spread: Spread) -> str | None:
    """What to change first for this recipe; None where it fits as it is, or nothing is known to help."""
    by_name = {verdict.strategy: verdict for verdict in verdicts}
    own = by_name[spread.strategy]
    if own.fits:
        return None
    other = next((name for name in by_name if by_name[name].fits), None)
    if other is not None:
        return f"`run.accelerate_config: {other}`"
    if own.change is not None:
        return own.change
    helped = next((name for name in by_name if by_name[name].change is not None), None)
    return f"`run.accelerate_config: {helped}` and {by_name[helped].change}" if helped else None


def sampling_fault(shape: ModelShape, work: Workload, device: DeviceMemory) -> str | None:
    """Why no process can sample by itself: the whole model is larger than a device; None where it can."""
    size = shape.parameters * work.sampling_bytes
    if work.sampler != "transformers" or size <= device.total:
        return None
    return (
        f"generation.use_vllm: without vLLM each process samples with the whole model, {show_size(size)}, and {device.name} has "
        f"{show_size(device.total)}: set it, with `vllm_mode: server` (a server on GPUs of its own) or colocate over several GPUs "
        "(tensor parallelism)."
    )
