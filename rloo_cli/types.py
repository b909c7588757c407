"""The values that cross the boundaries between packages. Frozen, slotted, keyword-only; no torch.

Shape suffixes, here and everywhere: `P` prompts of a generation batch, `G` completions of one prompt
(a group), `B = P·G` rows, `T` completion tokens, `V` vocabulary.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Message = Mapping[str, Any]
"""One chat message, `{"role": "user", "content": "…"}`."""

PromptContent = str | Sequence[Message]
"""A prompt as the data set holds it: a string, or a list of messages."""

LARGEST_REWARD = 1e30
"""Of a reward, and of what a reward function logs: its square sums in float64, its products in float32."""


class FinishReason(enum.StrEnum):
    """Why a completion ended."""

    STOPPED = "stopped"
    """An end-of-sequence token was sampled."""
    STOP_STRING = "stop_string"
    """One of the recipe's stop strings appeared."""
    TRUNCATED = "truncated"
    """`max_completion_length` or the context was reached."""
    ABORTED = "aborted"
    """The engine gave up on the row (a server cut the request)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedImage:
    """An image file as the data set holds it."""

    data: bytes = field(repr=False)
    """Of the file: PNG, JPEG, …"""
    name: str
    """The path that the data set gives; empty where it holds bytes alone."""
    digest: str
    """SHA-256 of `data`, hex."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VisualInputs:
    """The images of one prompt, ready for the model: kept once, whatever the number of its completions."""

    images: tuple[EncodedImage, ...]
    """In the order of their placeholders, at least one."""
    tensors: Mapping[str, torch.Tensor]
    """What the model's processor made of the pixels, by the name of the model's argument (`pixel_values`, `image_grid_thw`, …). Those of
    several prompts are put together along the first axis, smaller ones padded with zeros at the ends of the others."""
    token_types: Mapping[str, tuple[int, ...]]
    """Arguments with a number for every token of the prompt (`mm_token_type_ids`); 0 for text."""

    @property
    def digest(self) -> str:
        """Names the images: prompts of equal tokens and digest are equal to the model."""
        return " ".join(image.digest for image in self.images)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One row of the data set, ready for the model.

    Example: `Prompt(row=3, content="What is 1+1?", text="<|user|>What is 1+1?…", token_ids=(5, 9), columns={"answer": "2"})`
    """

    row: int
    """Row number in the split after over-long rows were dropped, from 0; it names the prompt in every message."""
    content: PromptContent
    """What reward functions get as an element of `prompts`."""
    text: str
    """The content rendered by the chat template (or the string itself)."""
    token_ids: tuple[int, ...]
    """The ids of `text`, length ≥ 1; an image's placeholder stands as often as the model's processor repeats it."""
    columns: Mapping[str, Any]
    """Every further column of the row, handed to reward functions by name."""
    visual: VisualInputs | None = None
    """Its images; None where it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One completion of a prompt as an engine returned it."""

    token_ids: tuple[int, ...]
    """Length T ≥ 1 (an empty completion is the EOS token alone); the EOS token is included where it was sampled."""
    logprobs: tuple[float, ...]
    """Length T, nats: log-prob of each token under the distribution it was drawn from."""
    finish_reason: FinishReason
    weights_version: int
    """The optimizer step whose weights made it (0 = initial weights)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A prompt and its G completions, in order."""

    prompt: Prompt
    completions: tuple[Completion, ...]
    """Length G."""
    texts: tuple[str, ...]
    """Length G: each completion decoded with skip_special_tokens=True, what reward functions read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """What a reward function may know about the run."""

    step: int
    """Optimizer step being prepared, from 1 (0 in an evaluation before training)."""
    max_steps: int

    @property
    def global_step(self) -> int:
        """Optimizer steps that are done: transformers' name, for reward functions written for it."""
        return max(self.step - 1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRewards:
    """The rewards of one group.

    Example: two functions, G = 2: `values=((1.0, 0.0), (0.5, None))`
    """

    values: tuple[tuple[float | None, ...], ...]
    """Shape (functions, G): raw, unweighted; None = "does not apply" (or failed under `on_error: unscored`)."""
    failures: tuple[str, ...] = ()
    """One line for each item that failed under `on_error: unscored`."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Values given to `log_metric`, the mean for each name."""
    extras: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Columns given to `log_extra`, each of length G."""
    seconds: float = 0.0
    """Wall time the group's calls took in their worker."""
