"""The random numbers of a row: a pure function of (stream, seed, step, row), whatever else is generated beside it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from rloo_cli.rollout.engine import RandomKey

PER_COUNTER = 4  # a Philox block holds four 64-bit numbers, each one double


def draw_uniforms(key: RandomKey, rows: Sequence[int], start: int, stop: int) -> np.ndarray:
    """Uniforms in [0, 1) of tokens `start` to `stop` of each row, float64 of shape [rows, stop − start].

    Philox, keyed by a hash of (stream, seed, step) and counted by (token, row): a longer or later stretch holds the same
    numbers. (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".)
    """
    name = f"{key.stream}\0{key.seed}\0{key.step}".encode()
    digest = hashlib.blake2b(name, digest_size=16).digest()
    philox = np.random.Philox(key=np.frombuffer(digest, dtype="<u8").astype(np.uint64))
    generator, state = np.random.Generator(philox), philox.state
    skipped = start % PER_COUNTER
    uniforms_BT = np.empty((len(rows), skipped + stop - start))
    for b, row in enumerate(rows):
        state["state"]["counter"][:] = (start // PER_COUNTER, 0, 0, row)
        state["buffer_pos"] = PER_COUNTER  # nothing left of the block before
        philox.state = state
        generator.random(out=uniforms_BT[b])
    return uniforms_BT[:, skipped:]
