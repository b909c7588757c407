"""Train language models with RLOO (REINFORCE Leave-One-Out) from YAML recipes, or from Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rloo_cli.api import RLOOConfig, RLOOTrainer

__version__ = "0.1.0"
__all__ = ["RLOOConfig", "RLOOTrainer", "__version__"]


def __getattr__(name: str) -> object:
    if name in ("RLOOConfig", "RLOOTrainer"):  # loaded when they are asked for: the command line has no use for them
        from rloo_cli import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
