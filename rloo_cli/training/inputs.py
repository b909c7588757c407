"""What training is given by the layers above it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from rloo_cli.data.mixture import Mixture
from rloo_cli.data.prompt_set import PromptSet
from rloo_cli.data.prompt_source import PromptSource
from rloo_cli.recipe.batch import BatchPlan
from rloo_cli.recipe.distribution import Distribution
from rloo_cli.recipe.schema import Recipe
from rloo_cli.run.checkpoint import Checkpoint
from rloo_cli.run.folder import RunFolder
from rloo_cli.run.progress import Progress
from rloo_cli.run.signals import StopSignal

if TYPE_CHECKING:
    from rloo_cli.rewards.runner import RewardRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingInputs:
    """Everything checked and opened before the model is loaded."""

    recipe: Recipe
    """As validated; on resume, the run's own resolved recipe."""
    batch: BatchPlan
    total_steps: int
    tokenizer: PreTrainedTokenizerBase
    prompts: PromptSource
    eval_prompts: PromptSet | Mixture | None
    rewards: RewardRunner
    """Started."""
    folder: RunFolder
    """Locked by the caller, sub-folders prepared."""
    resume_from: Checkpoint | None
    trust_remote_code: bool
    processor_files: tuple[Path, ...] = ()
    """What a vision-language model has beside its tokenizer, to go with the trained one."""
    progress: Progress
    distribution: Distribution = field(default_factory=Distribution)
    """How the model lies over the processes."""
    stop: StopSignal = field(default_factory=StopSignal)
    """Entered by the caller; where it is not, no signal is heard."""
