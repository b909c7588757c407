"""Whether bfloat16 is worth its casts on a CPU, measured. torch alone is imported, so that a look at a machine need not wait for more."""

from __future__ import annotations

import time

import torch

BF16_PAYS = 1.5
"""How many times as fast as float32 a bf16 product must run before autocast is worth its casts."""


def product_seconds(size: int = 512, repeats: int = 9) -> tuple[float, float]:
    """The best times of a square matrix product on the CPU, float32 and bfloat16, on one thread and in turn: others may use the machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    factors = [torch.ones(size, size, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    times: list[list[float]] = [[], []]
    for _ in range(repeats):
        for factor, measured in zip(factors, times, strict=True):
            started = time.perf_counter()
            torch.mm(factor, factor)
            measured.append(time.perf_counter() - started)
    torch.set_num_threads(threads)
    return min(times[0]), min(times[1])
