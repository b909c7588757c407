"""DAPO's punishment of completions that come close to, or exceed, a length."""

from __future__ import annotations

from functools import partial
from typing import Any

from rloo_cli.rewards.inputs import ParameterError


def soft_overlong_punishment_reward(
    completion_ids: list[list[int]], max_completion_len: int = 1280, soft_punish_cache: int = 256, **kwargs: Any
) -> list[float]:
    """0 up to `max_completion_len - soft_punish_cache` tokens, then falling in a straight line to −1 at `max_completion_len`; −1 beyond.

    With L_max = max_completion_len and L_cache = soft_punish_cache: ((L_max − L_cache) − length) / L_cache.
    Source: Eq. 13 of DAPO, arXiv 2503.14476.

    >>> soft_overlong_punishment_reward([[1] * 90], max_completion_len=100, soft_punish_cache=20)
    [-0.5]
    """
    check_values(max_completion_len, soft_punish_cache)
    return [_punishment(len(ids), max_completion_len, soft_punish_cache) for ids in completion_ids]


def get_soft_overlong_punishment(
    max_completion_len: int = 1280, soft_punish_cache: int = 256, *, completion_ids: list[list[int]] | None = None, **kwargs: Any
) -> Any:
    """Rewards, when called with completions; without, a reward function with these lengths fixed.

    The name under which TRL's command line knows `soft_overlong_punishment_reward` (there with 1280 and 256), and the
    name of TRL's factory: recipes and scripts of both kinds run unchanged.
    """
    if completion_ids is not None:
        return soft_overlong_punishment_reward(completion_ids, max_completion_len, soft_punish_cache)
    reward = partial(soft_overlong_punishment_reward, max_completion_len=max_completion_len, soft_punish_cache=soft_punish_cache)
    reward.__name__ = soft_overlong_punishment_reward.__name__  # type: ignore[attr-defined]
    return reward


def check_values(max_completion_len: int = 1280, soft_punish_cache: int = 256, **kwargs: Any) -> None:
    """Raise ParameterError for parameters that make no sense."""
    if not 0 <= soft_punish_cache <= max_completion_len:
        message = f"soft_punish_cache ({soft_punish_cache}) must lie between 0 and max_completion_len ({max_completion_len})"
        raise ParameterError("soft_punish_cache", message)


soft_overlong_punishment_reward.check_values = check_values  # type: ignore[attr-defined]
get_soft_overlong_punishment.check_values = check_values  # type: ignore[attr-defined]


def _punishment(length: int, longest: int, cache: int) -> float:
    if length <= longest - cache:
        return 0.0
    if length > longest:
        return -1.0
    return (longest - cache - length) / cache
