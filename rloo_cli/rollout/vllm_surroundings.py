"""What vLLM changes in the process that it moves into, put back."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@contextmanager
def guest(environment: Mapping[str, str] | None = None) -> Iterator[None]:
    """A block for building or ending vLLM, with `environment` set in it; afterwards the process is as it was.

    vLLM seeds every random generator, replaces `torch.set_num_threads` by a function that does nothing, writes LD_PRELOAD and
    LOCAL_WORLD_SIZE for children that it may never start, and can bind threads to cores. The trainer's numbers, its speed
    and its own children must not depend on that.
    """
    kept = dict(os.environ)
    numbers = (random.getstate(), np.random.get_state())
    threads, set_num_threads = torch.get_num_threads(), torch.set_num_threads
    affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    handlers = {name: signal.getsignal(name) for name in HANDLED}
    os.environ.update(environment or {})
    try:
        with kept_torch_random():
            yield
    finally:
        _restore_environment(kept)
        random.setstate(numbers[0])
        np.random.set_state(numbers[1])
        torch.set_num_threads = set_num_threads
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if affinity is not None and os.sched_getaffinity(0) != affinity:
            os.sched_setaffinity(0, affinity)
        for name, handler in handlers.items():
            if signal.getsignal(name) is not handler:
                signal.signal(name, handler)


@contextmanager
def kept_torch_random() -> Iterator[None]:
    """A block whose draws from torch's own generators are undone: vLLM draws from them even where every row has its seed."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []):
        yield


def _restore_environment(kept: Mapping[str, str]) -> None:
    for name in set(os.environ) - set(kept):
        del os.environ[name]
    for name, value in kept.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
