"""Launch, memory, strategies and disk of a plan, as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rloo_cli.plan.numbers import GIB, MIB, show_size

MEMORY_WORDS = {
    "weights": "weights being trained",
    "master": "float32 copy of its part that ZeRO updates",
    "optimizer": "optimizer state",
    "decode copy": "copy of the model that samples",
    "vllm": "vLLM: its weights, keys and values",
    "reference": "reference model",
    "reward models": "reward models",
    "kv cache": "KV cache while sampling",
    "gradients": "gradients",
    "activations": "activations of a micro-batch",
    "logits": "logits",
    "gathered": "layers that are whole for a while",
    "summed": "buffers in which gradients are summed, after the activations",
    "allocator": "what the allocator holds beyond these",
    "runtime": "libraries, on first use",
    "peak": "peak, beside about 0.4 GiB of imported libraries",
}
COLUMNS = ("model", "state", "passes", "sampling", "peak")
"""Of the table of strategies."""


def columns(terms: Mapping[str, int]) -> tuple[int, ...]:
    """What stands in each of COLUMNS; the peak is less than their sum where sampling and passes do not meet."""
    passes = max(terms["activations"] + terms["logits"] + terms["gathered"], terms["summed"])
    return (
        terms["weights"] + terms["master"] + terms["reference"],
        terms["gradients"] + terms["optimizer"],
        passes,
        terms["decode copy"] + terms["vllm"] + terms["kv cache"],
        terms["peak"],
    )


def launch_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """How many processes, where, and how the model lies over them; nothing for one that has it whole."""
    launch = document.get("launch")
    if launch is None or (launch["num_processes"] == 1 and launch["strategy"] == "ddp"):
        return
    yield "Launch"
    yield f"  {launch['words']}"


def memory_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """The terms of one process, and whether there is room."""
    memory = document.get("memory")
    if memory is None:
        return
    yield f"Memory of one device, estimated ({_parameters(memory['parameters'])} parameters, {memory['dtype']})"
    for term, size in memory["bytes"].items():
        if size or term == "peak":
            yield f"  {show_size(size):>10}  {MEMORY_WORDS[term]}"
    share = "" if memory["room"] == memory["free"] else f", {show_size(memory['room'])} for each process"
    yield f"  free{'' if memory['is_named'] else ' now'}: {show_size(memory['free'])} on {memory['device']}{share}"
    if not memory["fits"]:
        first = (
            f"Change first: {memory['change']}." if memory["change"] else "No change that is known here is enough: take a smaller model."
        )
        yield f"  does not fit. {first}"
    host = document["host"]
    if host["loading"] >= GIB or host["offloaded"]:
        offloaded = f", and {show_size(host['offloaded'])} that is offloaded" if host["offloaded"] else ""
        yield f"  a machine's own memory: {show_size(host['loading'])} while the model is loaded{offloaded}"


def _parameters(count: int) -> str:
    return f"{count / 1e9:,.2f} B" if count >= 1e9 else f"{count / 1e6:,.1f} M"


def strategy_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """A row for each strategy; nothing where one process has room for all, whatever the strategy."""
    verdicts = document.get("strategies")
    if verdicts is None or (document["launch"]["num_processes"] == 1 and document["memory"]["fits"]):
        return
    unit, name = (GIB, "GiB") if max(verdict["bytes"]["peak"] for verdict in verdicts) >= GIB else (MIB, "MiB")
    yield f"Strategies, {name} of each process ({document['launch']['words'].rsplit(', ', 1)[0]})"
    yield "  " + "".join(f"{name:>10}" for name in ("", *COLUMNS))
    for verdict in verdicts:
        sizes = "".join(f"{size / unit:>10,.1f}" for size in columns(verdict["bytes"]))
        mark = "→" if verdict["strategy"] == document["launch"]["strategy"] else " "
        yield f"  {mark} {verdict['strategy']:<8}{sizes}  {'fits' if verdict['fits'] else 'does not fit'}: {verdict['why']}"
        if verdict["change"]:
            yield f"{'':>12}would with {verdict['change']}"


def disk_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """Checkpoints, the final model and rollouts."""
    disk = document.get("disk")
    if disk is None:
        return
    yield "Disk, estimated"
    checkpoints = f"{disk['count']} checkpoint{'' if disk['count'] == 1 else 's'} of {show_size(disk['checkpoint'])}"
    if disk["process"] < disk["checkpoint"]:
        checkpoints += f" ({show_size(disk['process'])} from each process)"
    yield f"  {checkpoints}, the final model {show_size(disk['final'])}, rollouts at most {show_size(disk['rollouts'])}"
    yield f"  free now: {show_size(disk['free'])} below {disk['folder']}"
