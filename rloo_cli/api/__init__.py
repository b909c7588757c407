"""Training from Python: `from rloo_cli import RLOOConfig, RLOOTrainer`, as the quick start of the public documentation has it.

A trainer is a recipe: what it is given is written as one, and trained by what `rloo train` calls.
"""

from rloo_cli.api.config import RLOOConfig
from rloo_cli.api.output import TrainerState, TrainOutput
from rloo_cli.api.trainer import RLOOTrainer

__all__ = ["RLOOConfig", "RLOOTrainer", "TrainOutput", "TrainerState"]
