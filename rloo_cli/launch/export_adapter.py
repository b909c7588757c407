"""An adapter that a run has trained, made into a folder that peft and vLLM read, or with its model into a plain transformers folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from rloo_cli import __version__
from rloo_cli.data.adapter_folder import ADAPTER_CONFIG, adapter_config, base_of, is_adapter
from rloo_cli.errors import RecipeError, RefusedError, StorageError
from rloo_cli.launch.export import CONFIG, Exported, choose_checkpoint, description, refuse_occupied, rounded, skeleton
from rloo_cli.recipe.schema import ModelSection, Recipe
from rloo_cli.run import atomic
from rloo_cli.run.checkpoint import DESCRIPTION, Checkpoint
from rloo_cli.run.folder import RunFolder
from rloo_cli.run.logs import quiet_libraries

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MODEL_FIELD = "model.model_name_or_path: "
OF_A_MODEL = (CONFIG, "generation_config.json")
"""Files of a description that an adapter's folder does without."""


def holds_adapter(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is that of an adapter, and holds nothing of the model beside it."""
    return f"{DESCRIPTION}/{ADAPTER_CONFIG}" in checkpoint.names


def choose_adapter(name: str, step: int | None) -> tuple[Checkpoint | Path, str]:
    """(a verified checkpoint or an adapter's folder, what to call it) that `rloo export --merge NAME` means.

    Raises:
        RefusedError: there is no such thing, or no adapter in it.
        StorageError: it is damaged.
    """
    path = Path(name)
    if is_adapter(path) and step is None:
        return path, f"adapter {name}"
    final = RunFolder(path).final
    if step is None and is_adapter(final) and not any(RunFolder(path).checkpoints.glob("[0-9]*")):
        return final, f"the final adapter of {name}"
    checkpoint, words = choose_checkpoint(name, step)
    if not holds_adapter(checkpoint):
        raise RefusedError(f"{words} is a whole model: there is nothing to merge, leave --merge out.")
    return checkpoint, words


def export_adapter(checkpoint: Checkpoint, target: Path, *, dtype: str | None = None) -> Exported:
    """Write a checkpoint's adapter to `target`, complete or not at all. The model that it belongs to is not read.

    Raises:
        RefusedError: something is at `target`.
        StorageError: it could not be read or written.
    """
    from rloo_cli.training.adapter import published_names
    from rloo_cli.training.model_files import write_adapter

    refuse_occupied(target)
    model, saved = skeleton(checkpoint), checkpoint.saved_tensors("model")
    if model is None:
        raise RefusedError(f"{checkpoint.path} is of a model with code of its own, whose names are not known here: take the run's final/.")
    document = _put_adapter(model, checkpoint)
    names = published_names(model)
    tensors = {names[own]: rounded(saved.whole(own), dtype) for own in saved.names}
    with _folder(target, str(checkpoint.path)) as files:
        size = write_adapter(files, document, tensors)
        for name, content in description(checkpoint, dtype=dtype or ""):
            if name not in (*OF_A_MODEL, ADAPTER_CONFIG):
                files.write(name, content)
    return Exported(files=1, size=size, dtype=dtype or "float32", is_adapter=True)


def merge(source: Checkpoint | Path, target: Path, *, dtype: str | None = None) -> Exported:
    """Write the model with an adapter in its weights to `target`, complete or not at all.

    W + s · B A is formed in float32 and rounded to the type in which the model was held while it was trained, or to `dtype`.

    Raises:
        RefusedError: something is at `target`; the model is not there, or not the one that was trained.
        StorageError: it could not be read or written.
    """
    from rloo_cli.training.adapter import plain_structure, plain_tensors
    from rloo_cli.training.model_files import as_published, plan_weights, save_description, write_weights

    refuse_occupied(target)
    quiet_libraries()
    try:
        tokenizer, model = _of_checkpoint(source) if isinstance(source, Checkpoint) else _of_folder(source)
    except RecipeError as error:
        raise RefusedError(error.message.removeprefix(MODEL_FIELD)) from error
    plain, kept = plain_structure(model), str(model.dtype).removeprefix("torch.")

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        return as_published(plain, ((name, rounded(tensor, dtype or kept)) for name, tensor in plain_tensors(model)))

    plan = plan_weights(tensors())
    atomic.make_folder(target.parent)
    atomic.ensure_free(target.parent, plan.size, f"model {target}")
    with _folder(target, str(source.path if isinstance(source, Checkpoint) else source)) as files:
        write_weights(files, plan, tensors())
        save_description(files.path, plain, tokenizer, dtype=plan.dtype)
    return Exported(files=len(plan.files) + bool(plan.others), size=plan.size, dtype=str(plan.dtype).removeprefix("torch."))


def _folder(target: Path, source: str) -> atomic.AtomicFolder:
    return atomic.AtomicFolder(target, info={"kind": "export", "source": source, "rloo": __version__}, replace=True)


def _of_folder(folder: Path) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    """Tokenizer and adapted model of an adapter's folder."""
    from rloo_cli.data.chat import load_tokenizer
    from rloo_cli.training.adapter import add_adapter
    from rloo_cli.training.policy import load_model

    section = ModelSection(model_name_or_path=str(folder.resolve()), use_peft=True)
    adapter_config(folder)
    tokenizer = load_tokenizer(section)
    return tokenizer, add_adapter(load_model(section, seed=0, trust_remote_code=False), section, seed=0)


def _of_checkpoint(checkpoint: Checkpoint) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    """Tokenizer and adapted model of a checkpoint, the latter out of the model that the run began with."""
    import torch

    from rloo_cli.data.chat import load_tokenizer
    from rloo_cli.training.adapter import adapter_names
    from rloo_cli.training.fingerprint import fingerprint
    from rloo_cli.training.policy import load_model

    recipe = _recipe_of(checkpoint)
    tokenizer = load_tokenizer(ModelSection(model_name_or_path=str(checkpoint.path / DESCRIPTION)))
    document = _document(checkpoint)
    own = {"model_name_or_path": document["base_model_name_or_path"], "model_revision": document.get("revision")}
    section = recipe.model.model_copy(update=own)
    model = load_model(base_of(section), seed=recipe.training.seed, trust_remote_code=False)
    _put_adapter(model, checkpoint)
    origin = checkpoint.origin().get("base_model")
    began_with_adapter = base_of_name(recipe.model) != base_of_name(section)  # whose weights are in the digest, and not here
    if not began_with_adapter and origin not in (None, fingerprint(model, leave_out=adapter_names(model))):
        raise RefusedError(
            f"{section.model_name_or_path} is not the model that {checkpoint.path} was trained with: its weights have changed."
        )
    saved, tensors = checkpoint.saved_tensors("model"), model.state_dict()
    with torch.no_grad():
        for name in saved.names:
            tensors[name].copy_(saved.whole(name))
    return tokenizer, model


def base_of_name(section: ModelSection) -> str:
    """What the section names, a folder by its real place."""
    path = Path(section.model_name_or_path).expanduser()
    return str(path.resolve()) if path.exists() else section.model_name_or_path


def _put_adapter(model: PreTrainedModel, checkpoint: Checkpoint) -> dict[str, Any]:
    """The checkpoint's adapter_config.json, after an adapter of that kind was put into the model."""
    from rloo_cli.training.adapter import inject, read_config

    try:
        inject(model, read_config(checkpoint.path / DESCRIPTION), seed=0)
    except RecipeError as error:
        raise StorageError(f"cannot make sense of the adapter of {checkpoint.path}: {error.message}") from error
    return _document(checkpoint)


def _document(checkpoint: Checkpoint) -> dict[str, Any]:
    from rloo_cli.data.model_folder import read_object

    return read_object(checkpoint.path / DESCRIPTION / ADAPTER_CONFIG)


def _recipe_of(checkpoint: Checkpoint) -> Recipe:
    try:
        return Recipe.model_validate_json(json.dumps(checkpoint.load_document("recipe")))
    except ValidationError as error:
        raise RefusedError(f"checkpoint {checkpoint.path} comes from another version of rloo: this one cannot read its recipe.") from error
