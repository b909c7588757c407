"""A folder that holds a LoRA adapter, and the model that the adapter belongs to. Only local folders are looked at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rloo_cli.data.model_folder import CONFIG, TOKENIZER_FILES, read_object, refusal
from rloo_cli.recipe.schema import ModelSection

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"


def adapter_folder(model: ModelSection) -> Path | None:
    """The folder of the adapter that `model_name_or_path` names; None where it names a model."""
    folder = Path(model.model_name_or_path).expanduser()
    return folder if is_adapter(folder) else None


def is_adapter(folder: Path) -> bool:
    """Whether an adapter lies in a folder, rather than a model."""
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / CONFIG).is_file()


def base_of(model: ModelSection) -> ModelSection:
    """The section of the model itself: of an adapter's folder that of the model which the adapter belongs to.

    Raises:
        RecipeError: the folder holds an adapter, and the recipe trains none; the adapter is of another kind, or its model is not there.
    """
    folder = adapter_folder(model)
    if folder is None:
        return model
    config = adapter_config(folder)
    if not model.use_peft:
        raise refusal(
            folder,
            "a LoRA adapter. Write model.use_peft: true to train it on, or make a model of it first: `rloo export --merge ADAPTER DIR`.",
        )
    name, revision = config["base_model_name_or_path"], config.get("revision")
    return model.model_copy(update={"model_name_or_path": name, "model_revision": revision})


def adapter_config(folder: Path) -> dict[str, Any]:
    """What a folder says of its adapter.

    Raises:
        RecipeError: it is no LoRA adapter, has no weights, or names no model that could be its own.
    """
    path = folder / ADAPTER_CONFIG
    config = read_object(path)
    if config.get("peft_type") != "LORA":
        raise refusal(path, f"`peft_type` is {str(config.get('peft_type'))[:40]!r}; only LORA can be trained on.")
    name, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not isinstance(name, str) or not name or not (revision is None or isinstance(revision, str)):
        raise refusal(path, "names no `base_model_name_or_path`: write the folder or hub id of the model that the adapter belongs to.")
    base = Path(name).expanduser()
    if not base.is_dir() and (name.startswith(("/", ".", "~")) or name.count("/") > 1):
        raise refusal(path, f"the adapter belongs to {name}, which is no folder here: correct `base_model_name_or_path`.")
    if is_adapter(base):
        raise refusal(path, f"the adapter belongs to {name}, which is an adapter itself: merge that one first.")
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise refusal(folder, f"holds no {ADAPTER_WEIGHTS}; weights are read from safetensors files only.")
    return config


def tokenizer_source(model: ModelSection) -> ModelSection:
    """The section whose files hold the tokenizer: an adapter's folder where it has one, else its model's."""
    folder = adapter_folder(model)
    if folder is None or any((folder / name).is_file() for name in TOKENIZER_FILES):
        return model
    return base_of(model)
