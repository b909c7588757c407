"""What a model's configuration says, read without its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rloo_cli.data.adapter_folder import base_of
from rloo_cli.data.model_folder import model_errors, reason_of
from rloo_cli.errors import RecipeError
from rloo_cli.recipe.schema import ModelSection

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def load_config(model: ModelSection, *, trust_remote_code: bool) -> PreTrainedConfig:
    """The model's configuration; of an adapter's folder that of the model which it belongs to.

    Raises:
        RecipeError: there is no model of that name, or its configuration cannot be read.
    """
    from transformers import AutoConfig

    model = base_of(model)
    try:
        return AutoConfig.from_pretrained(model.model_name_or_path, revision=model.model_revision, trust_remote_code=trust_remote_code)
    except model_errors() as error:
        raise RecipeError(
            f"model.model_name_or_path: cannot read the configuration of {model.model_name_or_path!r}: {reason_of(error)}"
        ) from error


def context_length(config: PreTrainedConfig) -> int | None:
    """Positions that the model was built for, or None where its configuration does not say."""
    return _count(config, "max_position_embeddings")


def vocabulary_size(config: PreTrainedConfig) -> int | None:
    """Token ids that the model has, or None where its configuration does not say."""
    return _count(config, "vocab_size")


def _count(config: PreTrainedConfig, name: str) -> int | None:
    value = getattr(config.get_text_config(), name, None)
    return value if isinstance(value, int) and value > 0 else None
