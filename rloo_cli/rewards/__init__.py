"""Completions in, rewards out: built-in rewards are public names of this package.

Each is imported when its name is first read, so that the package costs nothing and a missing extra is felt only by who uses it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rloo_cli.rewards.accuracy import accuracy_reward
    from rloo_cli.rewards.cosine_length import cosine_length_reward
    from rloo_cli.rewards.exact_match import exact_match_reward
    from rloo_cli.rewards.python_tests import python_tests_reward
    from rloo_cli.rewards.reasoning_accuracy import reasoning_accuracy_reward
    from rloo_cli.rewards.regex import regex_reward
    from rloo_cli.rewards.repetition_penalty import repetition_penalty_reward
    from rloo_cli.rewards.soft_overlong import get_soft_overlong_punishment, soft_overlong_punishment_reward
    from rloo_cli.rewards.think_format import think_format_reward

_MODULES = {
    "accuracy_reward": "accuracy",
    "cosine_length_reward": "cosine_length",
    "exact_match_reward": "exact_match",
    "get_soft_overlong_punishment": "soft_overlong",
    "python_tests_reward": "python_tests",
    "reasoning_accuracy_reward": "reasoning_accuracy",
    "regex_reward": "regex",
    "repetition_penalty_reward": "repetition_penalty",
    "soft_overlong_punishment_reward": "soft_overlong",
    "think_format_reward": "think_format",
}

__all__ = [
    "accuracy_reward",
    "cosine_length_reward",
    "exact_match_reward",
    "get_soft_overlong_punishment",
    "python_tests_reward",
    "reasoning_accuracy_reward",
    "regex_reward",
    "repetition_penalty_reward",
    "soft_overlong_punishment_reward",
    "think_format_reward",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    reward = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = reward
    return reward
