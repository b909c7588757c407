"""The processor of a vision-language model: a rendered prompt and its images to token ids and pixel tensors."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo_cli.data.adapter_folder import base_of
from rloo_cli.data.images import decode_image
from rloo_cli.data.model_folder import model_errors, reason_of
from rloo_cli.data.model_kind import is_vision_language
from rloo_cli.errors import RecipeError
from rloo_cli.recipe.schema import ModelSection
from rloo_cli.types import EncodedImage, VisualInputs

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "chat_template.json")
"""What a processor is read from, beside the tokenizer's files."""
OF_THE_TEXT = ("input_ids", "attention_mask")
"""What a processor returns beside the images' tensors, and what we make ourselves."""
TOKEN_TYPES = "token_type_ids"  # noqa: S105 - no password
"""Ends the names of arguments with a number for every token."""


class VisualProcessor:
    """The model's own processor with the run's tokenizer in it; its files are read when the first image comes."""

    def __init__(
        self, model: ModelSection, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, *, trust_remote_code: bool
    ) -> None:
        self._model = model
        self._config = config
        self._tokenizer = tokenizer
        self._trust_remote_code = trust_remote_code

    @functools.cached_property
    def processor(self) -> Any:
        """transformers' processor.

        Raises:
            RecipeError: the model has none that can be read.
        """
        options = {"revision": self._model.model_revision or "main", "trust_remote_code": self._trust_remote_code}
        name = self._model.model_name_or_path
        try:
            processor = _processor_class(self._config).from_pretrained(name, **options)
        except model_errors() as error:
            raise RecipeError(
                f"model.model_name_or_path: cannot load the processor (images to numbers) of {name}: {reason_of(error)}"
            ) from error
        processor.tokenizer = self._tokenizer
        return processor

    def files(self) -> tuple[Path, ...]:
        """The processor's files where they lie: in the model's folder, or in the hub's cache."""
        from transformers.utils import cached_file

        model = self._model
        paths = [
            cached_file(
                model.model_name_or_path, name, revision=model.model_revision or "main", _raise_exceptions_for_missing_entries=False
            )
            for name in FILES
        ]
        return tuple(Path(path) for path in paths if path is not None)

    def __call__(self, text: str, images: Sequence[EncodedImage]) -> tuple[list[int], VisualInputs]:
        """The ids of a rendered prompt, its placeholders repeated, and the images as the model takes them.

        Raises:
            RecipeError: the model's processor cannot be read.
            ValueError: an image cannot be decoded, or there are not as many placeholders as images.
        """
        processor = self.processor
        decoded = [decode_image(image) for image in images]
        try:
            made = processor(text=[text], images=[decoded], return_tensors="pt", add_special_tokens=False)
        except (ValueError, TypeError, LookupError, StopIteration, RuntimeError, ArithmeticError) as error:
            raise ValueError(f"the model's processor refuses its images: {reason_of(error)}") from error
        ids = made["input_ids"][0]
        others = {name: value for name, value in made.items() if name not in OF_THE_TEXT}
        types = {name: tuple(value[0].tolist()) for name, value in others.items() if name.endswith(TOKEN_TYPES)}
        return ids.tolist(), VisualInputs(
            images=tuple(images),
            tensors={name: value for name, value in others.items() if name not in types and hasattr(value, "shape")},
            token_types=types,
        )


def visual_processor(
    model: ModelSection, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, *, trust_remote_code: bool
) -> VisualProcessor | None:
    """The processor of a vision-language model, whose chat template the tokenizer gets where it has none; None for a model of text.

    Raises:
        RecipeError: the template is in the processor, which cannot be read.
    """
    model = base_of(model)
    if not is_vision_language(config):
        return None
    visual = VisualProcessor(model, config, tokenizer, trust_remote_code=trust_remote_code)
    if not tokenizer.chat_template and (Path(model.model_name_or_path) / "chat_template.json").is_file():
        tokenizer.chat_template = visual.processor.chat_template
    return visual


def _processor_class(config: PreTrainedConfig) -> Any:
    """AutoProcessor, or the class that it would choose, without its video part where torchvision, which only videos need, is not there."""
    from transformers import AutoProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
    from transformers.utils import is_torchvision_available

    if is_torchvision_available() or type(config) not in PROCESSOR_MAPPING:
        return AutoProcessor
    own = PROCESSOR_MAPPING[type(config)]
    return _images_only(own) if "video_processor" in own.get_attributes() else own


def _images_only(own: Any) -> Any:
    """The processor class with nothing in the place of its video processor."""

    class ImagesOnly(own):
        """Images and text."""

        @classmethod
        def _get_arguments_from_pretrained(cls, name: str, processor_dict: Any = None, **options: Any) -> list[Any]:
            from transformers import AutoImageProcessor, AutoTokenizer

            makers = {"tokenizer": AutoTokenizer, "image_processor": AutoImageProcessor}
            return [makers[part].from_pretrained(name, **options) if part in makers else None for part in cls.get_attributes()]

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument_name == "video_processor":
                return object
            return super().check_argument_for_proper_class(argument_name, argument)

    ImagesOnly.__name__ = own.__name__
    return ImagesOnly
