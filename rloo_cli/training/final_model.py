"""final/: the trained model as a plain transformers folder."""

from __future__ import annotations

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rloo_cli.run.atomic import AtomicFolder
from rloo_cli.run.folder import RunFolder


def save_final_model(folder: RunFolder, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, step: int) -> None:
    """Write model, configuration, generation configuration and tokenizer, complete or not at all.

    Raises:
        StorageError: it could not be written; the last checkpoint stands.
    """
    with AtomicFolder(folder.final, info={"kind": "final", "step": step}, replace=True) as files:
        model.save_pretrained(files.path)
        tokenizer.save_pretrained(files.path)
