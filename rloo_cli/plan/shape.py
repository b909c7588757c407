"""The sizes of a model that memory depends on, counted on the meta device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rloo_cli.data.model_folder import model_errors, reason_of
from rloo_cli.errors import RecipeError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes that memory depends on. Example: SmolLM2-135M has 134.5 M parameters, 30 layers of 576, 3 KV heads of 64."""

    parameters: int
    """Tied embeddings counted once."""
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    embedding_parameters: int
    """Those of the input and output embeddings, which are kept in float32 in a reference."""
    layer_parameters: int
    """Those of the largest layer: what is gathered at once where weights lie in parts."""
    root_parameters: int
    """Those outside the layers: embeddings and the last norm."""
    largest_tensor: int
    """Numbers of the largest parameter."""


def model_shape(config: PreTrainedConfig) -> ModelShape:
    """The sizes of a model, counted on the meta device: no weights are read or allocated.

    Raises:
        RecipeError: nothing can be built from that configuration.
    """
    import torch

    from rloo_cli.data.model_kind import model_class

    try:
        with torch.device("meta"):
            model = model_class(config).from_config(config)
    except model_errors() as error:
        raise RecipeError(f"model.model_name_or_path: no model can be built from its config.json: {reason_of(error)}") from error
    text = config.get_text_config()
    embeddings = {id(module.weight): module.weight for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module}
    heads = text.num_attention_heads
    layers = _layers(model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return ModelShape(
        parameters=parameters,
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        vocab=text.vocab_size,
        embedding_parameters=sum(weight.numel() for weight in embeddings.values()),
        layer_parameters=max(layers, default=0),
        root_parameters=parameters - sum(layers),
        largest_tensor=max(parameter.numel() for parameter in model.parameters()),
    )


def _layers(model: PreTrainedModel) -> list[int]:
    """Parameters of each of the modules that the model says are not to be split; strategies gather them one at a time."""
    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    return [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
