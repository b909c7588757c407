"""The images of prompts as a forward pass takes them.

Several prompts' tensors stand one behind the other along their first axis, in the order in which their placeholders come;
that is how transformers' vision-language models match images with placeholders, whatever the layout of the text.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from rloo_cli.types import VisualInputs

PLACEHOLDERS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
"""Where configurations name the ids that are replaced by what the vision part sees."""

Placed = tuple[VisualInputs, int, int]
"""A prompt's images, its row in `input_ids`, and the column where the prompt begins."""


def visual_arguments(placed: Sequence[Placed], shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    """The images' arguments of a forward pass over `input_ids` of that shape; none where no prompt has images."""
    visuals = [visual for visual, _, _ in placed]
    names = dict.fromkeys(name for visual in visuals for name in visual.tensors)
    arguments = {name: _joined([visual.tensors[name] for visual in visuals if name in visual.tensors]) for name in names}
    for name in dict.fromkeys(name for visual in visuals for name in visual.token_types):
        types = torch.zeros(shape, dtype=torch.long)
        for visual, row, start in placed:
            own = torch.tensor(visual.token_types[name])
            types[row, start : start + len(own)] = own
        arguments[name] = types
    return arguments


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Along the first axis; smaller ones padded with zeros at the end of the others, as processors pad the images of a batch."""
    if len({tensor.shape[1:] for tensor in tensors}) == 1:
        return torch.cat(list(tensors))
    shape = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    joined = tensors[0].new_zeros(sum(len(tensor) for tensor in tensors), *shape)
    start = 0
    for tensor in tensors:
        joined[(slice(start, start + len(tensor)), *(slice(size) for size in tensor.shape[1:]))] = tensor
        start += len(tensor)
    return joined


def model_arguments(model: PreTrainedModel, arguments: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those that the model takes, on its device and in its dtype."""
    taken = inspect.signature(model.base_model.forward).parameters
    return {
        name: tensor.to(model.device, model.dtype) if tensor.is_floating_point() else tensor.to(model.device)
        for name, tensor in arguments.items()
        if name in taken
    }


def reads_images(model: PreTrainedModel) -> bool:
    """Whether it is a vision-language model."""
    return "image" in model.input_modalities


def has_own_positions(model: PreTrainedModel) -> bool:
    """Whether the positions of a prompt with images are not 0, 1, 2, … (Qwen-VL's M-RoPE) and the model has to find them."""
    return hasattr(model.base_model, "get_rope_index")


def text_part(model: PreTrainedModel) -> torch.nn.Module:
    """What the attention of packed text belongs to: the language model in a vision-language model, else the model."""
    return model.get_decoder() if reads_images(model) else model


@contextmanager
def literal_tokens(model: PreTrainedModel, input_ids: torch.Tensor, literal_L: torch.Tensor) -> Iterator[torch.Tensor]:
    """The ids to call the model with, so that a placeholder id at the flat positions `literal_L` is a token like any other.

    A completion may hold such an id, by chance or mischief. Sampled, it was embedded as a token; in a pass with images the model would
    take it for the place of one more image.
    """
    placeholders = [value for name in PLACEHOLDERS if isinstance(value := getattr(model.config, name, None), int)]
    ids_L = input_ids.flatten()[literal_L]
    is_placeholder_L = torch.isin(ids_L, torch.tensor(placeholders, device=ids_L.device, dtype=ids_L.dtype))
    if not is_placeholder_L.any():
        yield input_ids
        return
    positions, own = literal_L[is_placeholder_L], ids_L[is_placeholder_L]
    harmless = next(token for token in range(len(placeholders) + 1) if token not in placeholders)
    replaced = input_ids.flatten().index_fill(0, positions, harmless).view_as(input_ids)

    def embed(module: torch.nn.Embedding, given: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        if given[0].shape != input_ids.shape:
            return output
        return output.flatten(0, 1).index_copy(0, positions, module.forward(own).to(output.dtype)).view_as(output)

    handle = model.get_input_embeddings().register_forward_hook(embed)
    try:
        yield replaced
    finally:
        handle.remove()
