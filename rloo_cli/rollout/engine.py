"""The seam between the loop and whatever generates: token ids in; token ids, log-probs and finish reasons out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rloo_cli.types import Completion, VisualInputs

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn. Transforms apply in the order repetition penalty, temperature, top-k, top-p, min-p.

    Example: `SamplingParams(max_new_tokens=48)`
    """

    max_new_tokens: int | None
    """Longest completion in tokens, EOS included; None = up to the model's context."""
    temperature: float = 1.0
    """0 = greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 = off."""
    min_p: float = 0.0
    """0 = off."""
    repetition_penalty: float = 1.0
    """1 = off; over prompt and completion, as transformers does."""
    stop: tuple[str, ...] = ()
    """A row ends when its decoded completion contains one of these; the text up to and including it stays."""
    regex: str | None = None
    """Only completions that match it as a whole are drawn, or beginnings of some where the length ends them (vLLM alone can); None = any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt, to be completed `num_generations` times."""

    token_ids: tuple[int, ...]
    num_generations: int
    first_row: int
    """Row number, within the step, of the first of these completions; row `first_row + g` draws the random numbers of (seed, step, that row)."""
    group_row: int | None = None
    """Row number of the group's very first completion, where another rank makes that one; None = `first_row`."""
    visual: VisualInputs | None = None
    """The prompt's images."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomKey:
    """Names a family of random streams: a row's numbers are a pure function of (stream, seed, step, row)."""

    seed: int
    step: int
    stream: str = "train"
    """`train` or `eval`: evaluation changes no training number."""


OnGroup = Callable[[int, tuple[Completion, ...]], None]
"""Called with (request index, its G completions in order) as soon as the last row of the group has ended."""


class Engine(Protocol):
    """Generates completions under the weights it was last given."""

    weights_version: int
    """The optimizer step whose weights are loaded."""

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        params: SamplingParams,
        key: RandomKey,
        *,
        on_group: OnGroup | None = None,
        check_stop: Callable[[], None] | None = None,
    ) -> list[tuple[Completion, ...]]:
        """The completions of each request, in order.

        `check_stop` is called between decode steps and raises to abandon the batch.

        Raises:
            EngineError: the engine failed.
            NonFiniteError: a logit or log-prob is NaN (the message names request and row).
        """
        ...

    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Take new weights, by the names of the model's state dict, and stamp what follows with `version`."""
        ...

    def close(self) -> None:
        """Release what the engine holds; safe to call twice."""
        ...
