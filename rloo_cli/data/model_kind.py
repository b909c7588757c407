"""Whether a model reads images, and the class of transformers that loads it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def is_vision_language(config: PreTrainedConfig) -> bool:
    """Whether the configuration is that of a model that reads images and writes text (AutoModelForImageTextToText)."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    return getattr(config, "model_type", None) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES


def model_class(config: PreTrainedConfig) -> Any:
    """AutoModelForImageTextToText for a vision-language model, else AutoModelForCausalLM."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if is_vision_language(config) else AutoModelForCausalLM
