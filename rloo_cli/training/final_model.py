"""final/: the trained model as a plain transformers folder, or the trained adapter as peft has it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rloo_cli.run.atomic import AtomicFolder, ensure_free
from rloo_cli.run.folder import RunFolder
from rloo_cli.run.ranks import Ranks
from rloo_cli.training.adapter import adapter_document, is_adapted, published
from rloo_cli.training.model_files import (
    Named,
    Plan,
    as_published,
    copy_files,
    plan_weights,
    save_description,
    write_adapter,
    write_weights,
)
from rloo_cli.training.strategy import Strategy

CARD = "README.md"


def save_final_model(
    folder: RunFolder,
    strategy: Strategy,
    tokenizer: PreTrainedTokenizerBase,
    *,
    step: int,
    ranks: Ranks,
    card: Callable[[], str],
    beside: Sequence[Path] = (),
) -> None:
    """Write model, configuration, generation configuration and tokenizer, or adapter and tokenizer, and a card; complete or not at all; a collective.

    `card` gives the text of README.md, on the main rank; `beside`: files that are copied into it, a vision-language model's processor.

    Raises:
        StorageError: it could not be written; the last checkpoint stands.
        NeighbourError: that is so on the main rank.
    """
    model = strategy.policy.model
    if strategy.name == "ddp":
        ranks.together(lambda: _save_own(folder, model, tokenizer, beside, card, step=step) if ranks.is_main else None)
    else:
        _save_gathered(folder, strategy, model, tokenizer, card, step=step, ranks=ranks)


def _save_own(
    folder: RunFolder,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    beside: Sequence[Path],
    card: Callable[[], str],
    *,
    step: int,
) -> None:
    with _folder(folder, step) as files:
        if is_adapted(model):
            write_adapter(files, adapter_document(model), published(model))
        else:
            model.save_pretrained(files.path)
        tokenizer.save_pretrained(files.path)
        copy_files(beside, files.path)
        files.write(CARD, card())


def _folder(folder: RunFolder, step: int) -> AtomicFolder:
    return AtomicFolder(folder.final, info={"kind": "final", "step": step}, replace=True)


def _save_gathered(
    folder: RunFolder,
    strategy: Strategy,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    card: Callable[[], str],
    *,
    step: int,
    ranks: Ranks,
) -> None:
    """Write what no rank has as a whole, or not in float32 (ZeRO's weights under bf16): the tensors are gathered twice, since a file begins with what will be in it."""
    plan = plan_weights(as_published(model, strategy.named_tensors()))
    with contextlib.ExitStack() as stack:
        files = ranks.together(lambda: stack.enter_context(_with_room(folder, plan, step)) if ranks.is_main else None)
        tensors = as_published(model, strategy.named_tensors())
        ranks.together(lambda: _write(stack, files, plan, tensors, model, tokenizer, card))


def _with_room(folder: RunFolder, plan: Plan, step: int) -> AtomicFolder:
    ensure_free(folder.path, plan.size, f"final model {folder.final}")
    return _folder(folder, step)


def _write(
    stack: contextlib.ExitStack,
    files: AtomicFolder | None,
    plan: Plan,
    tensors: Iterator[Named],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    card: Callable[[], str],
) -> None:
    """Take part in gathering every tensor, and write them where there is a folder to write to."""
    try:
        with stack.pop_all():
            if files is not None:
                write_weights(files, plan, tensors)
                save_description(files.path, model, tokenizer, dtype=plan.dtype)
                files.write(CARD, card())
    finally:
        for _ in tensors:  # also after an error, since the other ranks gather with this one
            pass
