"""Our sampling parameters in vLLM's words, for both vLLM engines. Imports no vLLM."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import Any

from rloo_cli.errors import RecipeError
from rloo_cli.rollout.engine import RandomKey, SamplingParams

LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.01, 2.0
"""vLLM silently raises a lower temperature to the first, and refuses one above the second."""


def check_sampling(params: SamplingParams) -> None:
    """Nothing, where vLLM draws as asked for.

    Raises:
        RecipeError: a temperature that vLLM would change or refuse.
    """
    if params.temperature != 0.0 and not LOWEST_TEMPERATURE <= params.temperature <= HIGHEST_TEMPERATURE:
        raise RecipeError(
            f"temperature: vLLM samples at {LOWEST_TEMPERATURE:g} to {HIGHEST_TEMPERATURE:g}, or at 0 (greedy), not at {params.temperature:g}; "
            f"change it, or set `use_vllm: false`"
        )


def row_seed(key: RandomKey, row: int) -> int:
    """The seed of a row's own generator, in [0, 2⁶³): a pure function of (stream, seed, step, row)."""
    name = f"{key.stream}\0{key.seed}\0{key.step}\0{row}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1


def sampling_fields(params: SamplingParams, key: RandomKey, row: int, *, eos_ids: Collection[int], max_tokens: int) -> dict[str, Any]:
    """The fields of vLLM's SamplingParams for one row, as JSON can carry them: one request a row, `n` 1, a seed of its own.

    The end of a row is decided by `eos_ids` alone, which hold every EOS id: vLLM's own would come from files of the model
    as it finds them. The log-prob of the sampled token comes back (`logprobs` 0); the engine has to run with
    `logprobs_mode` processed_logprobs for it to be the one drawn from. With min-p beside top-p vLLM cuts by min-p first.
    On a CPU chunked prefill has to be off: vLLM 0.32 fails on a seeded row whose prompt it cuts in two.
    """
    return {
        "n": 1,
        "seed": row_seed(key, row),
        "max_tokens": max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "logprobs": 0,
        "ignore_eos": True,
        "stop_token_ids": sorted(eos_ids),
        "stop": list(params.stop),
        "include_stop_str_in_output": True,
        "skip_special_tokens": True,
        "detokenize": bool(params.stop),
        **({"structured_outputs": {"regex": params.regex}} if params.regex is not None else {}),
    }
