"""What a model's configuration says, read without its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rloo_cli.data.model_folder import model_errors, reason_of
from rloo_cli.errors import RecipeError
from rloo_cli.recipe.schema import ModelSection

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def load_config(model: ModelSection, *, trust_remote_code: bool) -> PreTrainedConfig:
    """The model's configuration.

    Raises:
        RecipeError: there is no model of that name, or its configuration cannot be read.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model.model_name_or_path, revision=model.model_revision, trust_remote_code=trust_remote_code)
    except model_errors() as error:
        raise RecipeError(
            f"model.model_name_or_path: cannot read the configuration of {model.model_name_or_path!r}: {reason_of(error)}"
        ) from error


def context_length(model: ModelSection, *, trust_remote_code: bool) -> int | None:
    """Positions that the model was built for, or None where its configuration does not say."""
    text = load_config(model, trust_remote_code=trust_remote_code).get_text_config()
    length = getattr(text, "max_position_embeddings", None)
    return length if isinstance(length, int) and length > 0 else None


def vocabulary_size(model: ModelSection, *, trust_remote_code: bool) -> int | None:
    """Token ids that the model has, or None where its configuration does not say."""
    size = getattr(load_config(model, trust_remote_code=trust_remote_code).get_text_config(), "vocab_size", None)
    return size if isinstance(size, int) and size > 0 else None
