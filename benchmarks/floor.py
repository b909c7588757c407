"""The floor by count: what a step cannot be faster than on this machine, whoever computes it. Prints one JSON line.

Operations over the measured rate of a large matrix product, plus bytes over the measured copy bandwidth. Counted with every
distinct prompt token and every real completion token once: no padding, no attention scores, no Python.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

PRODUCT_SIZE = 2048
COPY_BYTES = 256 * 2**20
REPEATS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What one step has to process."""

    parameters: int
    """Every weight but the input embedding (a tied one counts once: it is the head)."""
    all_parameters: int
    prompt_tokens: int
    """Distinct: each prompt once, not G times."""
    completion_tokens: float
    decode_steps: float
    """Token steps until the longest completion ends."""
    has_reference: bool
    weight_bytes: int
    """Bytes of a weight in the decode copy: 2 for bfloat16, 4 for float32."""


def operations(counts: Counts) -> float:
    """2N a token for decode and prefill, 6N a token for forward and backward, 2N a token for the reference."""
    tokens = counts.prompt_tokens + counts.completion_tokens
    passes = 2 + 6 + (2 if counts.has_reference else 0)
    return passes * counts.parameters * tokens


def bytes_moved(counts: Counts) -> float:
    """The decode copy is read once a token step; Adam reads weight, gradient and two moments and writes three, in float32."""
    return counts.parameters * counts.weight_bytes * counts.decode_steps + 7 * 4 * counts.all_parameters


def median_seconds(work: Callable[[], object]) -> float:
    """Median wall time of `work` after one call for warm-up."""
    work()
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def product_rate(dtype: str) -> float:
    """Operations a second of a large square matrix product."""
    import torch

    a = torch.randn(PRODUCT_SIZE, PRODUCT_SIZE).to(getattr(torch, dtype))
    return 2 * PRODUCT_SIZE**3 / median_seconds(lambda: a @ a)


def copy_bandwidth() -> float:
    """Bytes read plus bytes written a second by a large copy."""
    import torch

    source = torch.ones(COPY_BYTES // 4)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / median_seconds(lambda: target.copy_(source))


def count_parameters(model: str) -> tuple[int, int]:
    """(weights that every token is multiplied with, all weights) of a transformers folder, without loading it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        loaded = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    total = sum(p.numel() for p in loaded.parameters())
    embedding = loaded.get_input_embeddings().weight
    tied = loaded.get_output_embeddings().weight is embedding
    return (total if tied else total - embedding.numel()), total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompt-tokens", type=int, required=True)
    parser.add_argument("--completion-tokens", type=float, required=True)
    parser.add_argument("--decode-steps", type=float, required=True)
    parser.add_argument("--reference", action="store_true")
    arguments = parser.parse_args()

    parameters, all_parameters = count_parameters(arguments.model)
    rates = {dtype: product_rate(dtype) for dtype in ("float32", "bfloat16")}
    dtype = max(rates, key=rates.__getitem__)
    counts = Counts(
        parameters=parameters,
        all_parameters=all_parameters,
        prompt_tokens=arguments.prompt_tokens,
        completion_tokens=arguments.completion_tokens,
        decode_steps=arguments.decode_steps,
        has_reference=arguments.reference,
        weight_bytes=2 if dtype == "bfloat16" else 4,
    )
    bandwidth = copy_bandwidth()
    seconds = operations(counts) / rates[dtype] + bytes_moved(counts) / bandwidth
    print(json.dumps({"seconds": seconds, "dtype": dtype, "rates": rates, "bandwidth": bandwidth}))


if __name__ == "__main__":
    main()
