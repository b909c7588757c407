"""Seeds that derive from words, and the state of every random number generator as JSON and tensors."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SEED_BITS = 63
"""Seeds fit a signed 64-bit integer, which is what torch takes."""


def derive_seed(seed: int, *words: int | str) -> int:
    """A 63-bit seed that depends on `seed` and the words in order, and on nothing else: `derive_seed(42, "dropout", step)`."""
    text = json.dumps([seed, *words]).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> (64 - SEED_BITS)


def seed_everything(seed: int, *words: int | str) -> None:
    """Seed Python's, numpy's and torch's global generators (every device) with `derive_seed(seed, *words)`."""
    import numpy as np
    import torch

    derived = derive_seed(seed, *words)
    random.seed(derived)
    np.random.seed(derived % 2**32)  # numpy's global generator takes 32 bits
    torch.manual_seed(derived)


def capture_random_state() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The state of all global generators: a JSON document (Python, numpy) and tensors (torch, each CUDA device)."""
    import numpy as np
    import torch

    version, words, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=False)
    numpy_words = {"key": numpy_state["state"]["key"].tolist(), "pos": int(numpy_state["state"]["pos"])}
    document = {
        "python": {"version": version, "words": list(words), "gauss": gauss},
        "numpy": {"state": numpy_words, "has_gauss": int(numpy_state["has_gauss"]), "gauss": float(numpy_state["gauss"])},
    }
    tensors = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors |= {f"cuda.{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    return document, tensors


def restore_random_state(document: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Put every global generator back to the state that `capture_random_state` gave; devices that are gone are passed over."""
    import numpy as np
    import torch

    python, numpy_state = document["python"], document["numpy"]
    random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
    key = np.array(numpy_state["state"]["key"], dtype=np.uint32)
    state = {"key": key, "pos": numpy_state["state"]["pos"]}
    np.random.set_state({"bit_generator": "MT19937", "state": state, "has_gauss": numpy_state["has_gauss"], "gauss": numpy_state["gauss"]})
    torch.set_rng_state(tensors["cpu"])
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            if f"cuda.{index}" in tensors:
                torch.cuda.set_rng_state(tensors[f"cuda.{index}"], index)
