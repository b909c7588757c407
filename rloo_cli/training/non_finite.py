"""Numbers that are not finite, and where: the error that names step, prompt, completion and token; what an engine returned, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from rloo_cli.errors import EngineError, NonFiniteError
from rloo_cli.types import Completion, Prompt

if TYPE_CHECKING:
    from rloo_cli.training.experience import Experience
    from rloo_cli.training.microbatches import ScoringBatch


def row_error(
    *,
    step: int,
    place: str,
    value: float,
    row: int,
    num_generations: int,
    prompt: Prompt,
    token: int,
    token_ids: Sequence[int] = (),
    remedy: str = "",
) -> NonFiniteError:
    """The error of a number that belongs to one token of one row of the generation batch.

    Example: `step 12: the log-prob of the policy is nan in completion 3 of prompt 17 (row 11, token 5); nothing was updated.`
    """
    message = (
        f"step {step}: the {place} is {value} in completion {row % num_generations} of prompt {prompt.row} (row {row}, token {token}); "
        f"nothing was updated.{' ' if remedy else ''}{remedy}"
    )
    return NonFiniteError(message, place=place, value=value, row=row, token=token, token_ids=token_ids)


def check_completions(prompt: Prompt, completions: Sequence[Completion], *, step: int, first_row: int, num_generations: int) -> None:
    """Raise where an engine's answer for a prompt cannot be trained on: the one gate that the completions of every engine pass.

    Raises:
        EngineError: another number of completions than asked for, one without tokens, or not one log-prob for each token.
        NonFiniteError: a log-prob is NaN or infinite.
    """
    if len(completions) != num_generations:
        raise EngineError(
            f"step {step}: the engine returned {len(completions)} completions of prompt {prompt.row} instead of {num_generations}."
        )
    for g, completion in enumerate(completions):
        where = f"step {step}: completion {g} of prompt {prompt.row}"
        if not completion.token_ids:
            raise EngineError(f"{where}: the engine returned no tokens; an empty completion is the end-of-sequence token alone.")
        _check_count(where, completion)
        if _are_finite(completion.logprobs):
            continue
        token, value = next((t, v) for t, v in enumerate(completion.logprobs) if not _are_finite([v]))
        if not isinstance(value, int | float):
            raise EngineError(f"{where}, token {token}: the engine returned {value!r} where the token's log-prob has to be.")
        raise row_error(
            step=step,
            place="log-prob that the engine sampled with",
            value=value,
            row=first_row + g,
            num_generations=num_generations,
            prompt=prompt,
            token=token,
        )


def _check_count(where: str, completion: Completion) -> None:
    tokens, found = len(completion.token_ids), completion.logprobs
    count = len(found) if found is not None else 0
    if count != tokens:
        raise EngineError(
            f"{where}, token {min(count, tokens)}: the engine returned {count} log-probs for {tokens} tokens; each token needs one of its own."
        )


def _are_finite(values: Sequence[float]) -> bool:
    try:
        return all(map(math.isfinite, values))
    except TypeError:
        return False


def refuse_non_finite(logp_N: torch.Tensor, batch: ScoringBatch, experience: Experience, step: int, what: str) -> None:
    """Raise NonFiniteError naming row and token where a log-prob of a micro-batch is NaN or infinite."""
    finite_N = torch.isfinite(logp_N)
    if finite_N.all():
        return
    n = int((~finite_N).nonzero()[0])
    b, width = int(batch.row_N[n]), experience.num_generations
    raise row_error(
        step=step,
        place=what,
        value=logp_N[n].item(),
        row=batch.rows[b],
        num_generations=width,
        prompt=experience.groups[batch.rows[b] // width].prompt,
        token=n - int((batch.row_N < b).sum()),
    )


def refuse_non_finite_metrics(found: Mapping[str, float], step: int) -> None:
    """A metric that cannot be recorded stops the step before the weights have moved."""
    for name, value in found.items():
        if not math.isfinite(value):
            message = f"step {step}: {name}, over the rows of the pass, is {value}; nothing was updated."
            raise NonFiniteError(message, place=name, value=value)
