"""Which prompt stands at which place of a run: a pure function of (seed, position), equal for any number of processes."""

from __future__ import annotations

from functools import lru_cache

import numpy as np


def prompt_row(position: int, *, num_prompts: int, seed: int, shuffle: bool) -> int:
    """The row (0 ≤ row < num_prompts) of the prompt at `position`, counted from the start of the run over all epochs.

    Each run of `num_prompts` positions is one epoch and holds every row once. Nothing is dropped at an epoch's end: the
    next position begins the next epoch, in the middle of a batch if need be.
    """
    if position < 0 or num_prompts < 1:
        raise ValueError(f"position {position} of {num_prompts} prompts does not exist")
    epoch, place = divmod(position, num_prompts)
    return int(_permutation(num_prompts, seed, epoch)[place]) if shuffle else place


@lru_cache(maxsize=4)
def _permutation(num_prompts: int, seed: int, epoch: int) -> np.ndarray:
    """The rows in the order of one epoch, int64 of shape (num_prompts,)."""
    return permutation(num_prompts, seed, epoch)


def permutation(count: int, seed: int, *key: int) -> np.ndarray:
    """0 … count − 1 in an order of its own for each (seed, key), int64 of shape (count,)."""
    return np.argsort(raw_bits(count, seed, *key), kind="stable")


def raw_bits(count: int, seed: int, *key: int) -> np.ndarray:
    """The raw 64-bit output of Philox for each (seed, key), uint64 of shape (count,).

    Unlike that of Generator.permutation, its stream is fixed over numpy's versions, so a run resumes in the same order after an upgrade.
    """
    bits: np.ndarray = np.random.Philox(np.random.SeedSequence(seed, spawn_key=key)).random_raw(count)
    return bits
