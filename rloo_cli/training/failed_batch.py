"""The batch that training stopped at, kept for inspection: `failed/step-000012.parquet`, columns as in rollouts/, and the facts as JSON."""

from __future__ import annotations

import platform
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from rloo_cli.errors import NonFiniteError, StorageError
from rloo_cli.run import atomic
from rloo_cli.run.environment import package_versions
from rloo_cli.run.folder import RunFolder
from rloo_cli.run.rollouts import RolloutRow, write_rollouts
from rloo_cli.types import Completion, Group, Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchInHand:
    """A batch that is being sampled."""

    step: int
    prompts: Sequence[Prompt]
    groups: dict[int, Group]
    """Those that are complete, by the index of their prompt; filled on the way."""
    num_generations: int
    first_row: int
    """Row of the first completion among all of the step."""


def keep_failed_batch(
    folder: RunFolder, error: NonFiniteError, rows: Sequence[RolloutRow], *, step: int, weights_version: int, first_row: int = 0
) -> NonFiniteError:
    """The error, its message ending with how to look at the batch, which is now on disk.

    `first_row`: number of `rows[0]` among all rows of the step, by which the error tells its row.

    Where it cannot be written, the message says why: the first error is not hidden by a second.
    """
    path = folder.failed_batch(step)
    try:
        atomic.make_folder(path.parent)
        write_rollouts(path, rows)
        atomic.write_json(path.with_suffix(".json"), _facts(error, rows, step=step, weights_version=weights_version, first_row=first_row))
        where = f"The batch is kept; look at it: rloo rollouts show {shlex.quote(str(path))}"
    except (StorageError, ArithmeticError, LookupError, TypeError, ValueError) as failure:
        where = f"The batch could not be kept ({failure})."
    return NonFiniteError(
        f"{error.message} {where}", place=error.place, value=error.value, row=error.row, token=error.token, token_ids=error.token_ids
    )


def unfinished_rows(
    batch: BatchInHand, error: NonFiniteError, names: Sequence[str], *, weights_version: int, tokenizer: PreTrainedTokenizerBase
) -> list[RolloutRow]:
    """A row for each completion of a batch that was not sampled to its end: those of whole groups, and what the failed row had."""
    rows = []
    for p, prompt in enumerate(batch.prompts):
        for g in range(batch.num_generations):
            row = batch.first_row + p * batch.num_generations + g
            group = batch.groups.get(p)
            rows.append(
                RolloutRow(
                    step=batch.step,
                    prompt_row=prompt.row,
                    prompt=prompt.content,
                    prompt_text=prompt.text,
                    images=prompt.visual.images if prompt.visual is not None and g == 0 else (),
                    weights_version=weights_version,
                    rewards=dict.fromkeys(names),
                    **(_sampled(group, g) if group is not None else _so_far(error.token_ids if row == error.row else (), tokenizer)),
                )
            )
    return rows


def _sampled(group: Group, g: int) -> dict[str, Any]:
    completion: Completion = group.completions[g]
    return {
        "completion": group.texts[g],
        "completion_ids": completion.token_ids,
        "logprobs": completion.logprobs,
        "finish_reason": completion.finish_reason,
    }


def _so_far(token_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    text = tokenizer.batch_decode([list(token_ids)], skip_special_tokens=True)[0] if token_ids else None
    return {"completion": text, "completion_ids": token_ids or None, "logprobs": None, "finish_reason": None}


def _facts(error: NonFiniteError, rows: Sequence[RolloutRow], *, step: int, weights_version: int, first_row: int) -> dict[str, Any]:
    index = None if error.row is None else error.row - first_row
    return {
        "step": step,
        "row": error.row,
        "prompt": rows[index].prompt_row if index is not None and 0 <= index < len(rows) else None,
        "token": error.token,
        "place": error.place,
        "value": None if error.value is None else str(error.value),  # JSON has no NaN
        "message": error.message,
        "weights_version": weights_version,
        "python": platform.python_version(),
        "packages": package_versions(),
    }
