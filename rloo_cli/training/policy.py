"""The trained model and its reference: loading, what is frozen, and the module that scores completions."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from rloo_cli.data.adapter_folder import base_of
from rloo_cli.data.model_folder import model_errors, reason_of
from rloo_cli.data.model_kind import model_class
from rloo_cli.errors import NonFiniteError, RecipeError
from rloo_cli.recipe.schema import ModelSection
from rloo_cli.rollout.visual import has_own_positions, literal_tokens, model_arguments, text_part
from rloo_cli.training.logprobs import find_head, head_logprobs
from rloo_cli.training.microbatches import Layout, ScoringBatch, VisualBatch
from rloo_cli.training.packed import PACKED, PackedUnsupportedError

GIB = 1 << 30

Scorer = Callable[[ScoringBatch], tuple[torch.Tensor, torch.Tensor]]
"""What gives (log-prob, entropy) of every completion token of a micro-batch: a policy, or a reference."""


class Policy(torch.nn.Module):
    """A causal language model that turns a micro-batch into log-probs and entropies.

    The forward pass is the module's own, so that whatever wraps a module (DDP, FSDP, DeepSpeed) wraps scoring too.
    """

    def __init__(
        self, model: PreTrainedModel, *, layout: Layout, temperature: float, head_chunk: int | None, wide_head: bool = False
    ) -> None:
        """`wide_head`: the LM head's products in float32, whatever autocast says."""
        super().__init__()
        self.wide_head = wide_head
        self.model = model
        self.temperature = temperature
        self.head_chunk = head_chunk
        self.layout: Layout = layout

    @contextmanager
    def attention(self) -> Iterator[None]:
        """The attention that the layout needs, for a while: around a forward pass and, where activations are recomputed, its backward.

        Outside, the model has the attention that it was loaded with, for whoever else uses it.
        """
        if self.layout == "plain":
            yield
            return
        text = text_part(self.model)
        configs = {id(module.config): module.config for module in text.modules() if isinstance(module, PreTrainedModel)}
        before = [(config, config._attn_implementation) for config in configs.values()]
        try:
            for config, _ in before:
                config._attn_implementation = PACKED
            yield
        finally:
            for config, own in before:
                config._attn_implementation = own

    def forward(self, batch: ScoringBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-prob, entropy) of every completion token, both [N], nats."""
        with self.attention():
            if batch.visual is None:
                outputs = self.model.base_model(
                    input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, **batch.model_kwargs
                )
            else:
                outputs = self._with_images(batch, batch.visual)
        hidden_ND = outputs.last_hidden_state.flatten(0, 1).index_select(0, batch.predict_N)
        head = find_head(self.model)
        return head_logprobs(hidden_ND, head, batch.target_N, temperature=self.temperature, chunk=self.head_chunk, wide=self.wide_head)

    def _with_images(self, batch: ScoringBatch, visual: VisualBatch) -> Any:
        """The base model's output for rows with images.

        Raises:
            PackedUnsupportedError: the model finds the positions of such prompts itself, which a packed sequence does not bear.
        """
        positions: torch.Tensor | None = batch.position_ids
        if has_own_positions(self.model):
            if self.layout == "packed":
                raise PackedUnsupportedError(f"the positions of {type(self.model).__name__} depend on the images")
            positions = None
        images = model_arguments(self.model, visual.arguments)
        with literal_tokens(self.model, batch.input_ids, visual.literal_L) as input_ids:
            return self.model.base_model(input_ids=input_ids, position_ids=positions, use_cache=False, **batch.model_kwargs, **images)


def load_model(section: ModelSection, *, seed: int, trust_remote_code: bool) -> PreTrainedModel:
    """The model in the recipe's dtype, on the CPU, from safetensors only; without its adapter, where an adapter's folder is named.

    Raises:
        RecipeError: nothing loadable under that name, more than this machine's memory holds, or not all of its weights are there.
        NonFiniteError: a weight is NaN or infinite.
    """
    section, dtype = base_of(section), getattr(torch, section.dtype)
    options = {"revision": section.model_revision, "trust_remote_code": trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(section.model_name_or_path, **options)
        _refuse_beyond_memory(config, dtype, section.model_name_or_path, trust_remote_code=trust_remote_code)
        missing: set[str] = set()
        if section.random_weights:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = model_class(config).from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
        else:
            model, loading = model_class(config).from_pretrained(
                section.model_name_or_path, dtype=dtype, use_safetensors=True, output_loading_info=True, **options
            )
            missing = loading["missing_keys"]
    except model_errors() as error:
        reason = reason_of(error)
        if isinstance(error, SafetensorError):
            reason = f"a .safetensors file of it is damaged or cut off ({reason}); fetch it again"
        elif "safetensors" in reason:
            reason += " Weights are read from safetensors files only: convert others by `save_pretrained`."
        raise RecipeError(f"model.model_name_or_path: cannot load {section.model_name_or_path!r}: {reason}") from error
    if missing:
        raise RecipeError(
            f"model.model_name_or_path: the files of {section.model_name_or_path!r} lack {len(missing)} of the model's weights, such as "
            f"{min(missing)}; they would be random numbers."
        )
    _refuse_non_finite(model)
    return model


def empty_model(section: ModelSection, *, trust_remote_code: bool) -> PreTrainedModel:
    """The model's structure on the meta device, from its configuration alone; another rank has read what could be wrong with it."""
    config = AutoConfig.from_pretrained(section.model_name_or_path, revision=section.model_revision, trust_remote_code=trust_remote_code)
    return _on_meta(config, getattr(torch, section.dtype), trust_remote_code=trust_remote_code)


def _on_meta(config: PreTrainedConfig, dtype: torch.dtype, *, trust_remote_code: bool) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = model_class(config).from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
        return model


def _refuse_beyond_memory(config: PreTrainedConfig, dtype: torch.dtype, name: str, *, trust_remote_code: bool) -> None:
    """Raise RecipeError for a model that is larger than the machine's memory, from its shapes alone."""
    model = _on_meta(config, dtype, trust_remote_code=trust_remote_code)
    size = sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))
    memory = psutil.virtual_memory().total
    if size > memory:
        raise RecipeError(
            f"model.model_name_or_path: {name!r} has {size / GIB:,.1f} GiB of weights; this machine has {memory / GIB:,.1f} GiB."
        )


def _refuse_non_finite(model: PreTrainedModel) -> None:
    if name := first_non_finite(model):
        raise NonFiniteError(f"the model's weights hold NaN or infinity before training: {name}", place=name)


def first_non_finite(model: torch.nn.Module) -> str | None:
    """The name of the first parameter that holds NaN or infinity; None where all are finite."""
    return next((name for name, parameter in model.named_parameters() if not torch.isfinite(parameter).all()), None)


def disable_dropout(model: torch.nn.Module) -> None:
    """Set every dropout of the model to 0, in modules and in the configuration that attention reads."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "attn_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def has_dropout(model: torch.nn.Module) -> bool:
    """Whether a training-mode forward pass draws random numbers."""
    return any(
        (isinstance(module, torch.nn.Dropout) and module.p > 0)
        or any(
            isinstance(getattr(module, name, None), float) and getattr(module, name) > 0 for name in ("attention_dropout", "attn_dropout")
        )
        for module in model.modules()
    )


def make_reference(policy: Policy, *, low_precision: torch.dtype | None) -> Policy:
    """A frozen copy of the policy as it is now, in eval mode.

    Under bf16 autocast the weights of linear layers that hold bf16 values exactly (as every bf16 checkpoint's do) are kept
    in bf16: autocast would round them to the same numbers, so a KL against the untouched policy is 0 bit for bit.
    """
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    if low_precision is not None:
        shared = {
            id(module.weight) for module in (reference.model.get_input_embeddings(), reference.model.get_output_embeddings()) if module
        }
        for module in reference.modules():
            if isinstance(module, torch.nn.Linear) and id(module.weight) not in shared:
                _store_exactly(module, low_precision)
    return reference


def _store_exactly(linear: torch.nn.Linear, dtype: torch.dtype) -> None:
    for parameter in linear.parameters():
        low = parameter.data.to(dtype)
        if torch.equal(low.to(parameter.dtype), parameter.data):
            parameter.data = low
