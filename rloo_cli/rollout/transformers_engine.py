"""Generation with a transformers model in this process: our own decode loop, prompts computed once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from transformers import GenerationConfig, PreTrainedModel

from rloo_cli.errors import EngineError
from rloo_cli.rollout.decode_copy import DecodeCopy
from rloo_cli.rollout.decoders import PackedDecoder, PlainDecoder
from rloo_cli.rollout.decoding import decode, generate_by_transformers
from rloo_cli.rollout.engine import GenerationRequest, OnGroup, RandomKey, SamplingParams
from rloo_cli.rollout.rows import Rows
from rloo_cli.rollout.shared_attention import DECODE, DecodeUnsupportedError
from rloo_cli.rollout.visual import literal_tokens, model_arguments, text_part, visual_arguments
from rloo_cli.types import Completion, VisualInputs

logger = logging.getLogger(__name__)

Layout = Literal["auto", "packed", "plain"]

AGREEMENT = 1e-3  # nats; float32 paths that compute the same thing differ by 1e-5
AGREEMENT_LOW = 0.1  # nats, mean; weights held in bf16 round differently in each path
PROBE_ROWS, PROBE_TOKENS = 4, 128  # a longer probe would show nothing new: windows are the only far effect, and they are exact
# What a model may raise that does not take our cache, our attention or packed prompts.
UNSUPPORTED = (DecodeUnsupportedError, RuntimeError, TypeError, ValueError, LookupError, AttributeError)


class TransformersEngine:
    """Implements `engine.Engine`. Two ways to decode, with the same tokens in float32:

    - packed: each distinct prompt is computed and kept once, by an attention function of ours;
    - plain: transformers' own cache, repeated to rows, or `model.generate` where the cache is not plain keys and values.

    `auto` tries both on the first prompt and keeps packed where their log-probs agree.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        tokenizer: Any,
        copy_dtype: torch.dtype | None = None,
        layout: Layout = "auto",
        weights_version: int = 0,
        device: torch.device | None = None,
    ) -> None:
        """`copy_dtype`: own frozen copy in this dtype, refreshed by `load_weights`; None = decode with `model` itself.

        A `model` without weights (on the meta device) needs a copy, which lies on `device`.
        """
        self.tokenizer = tokenizer
        self.weights_version = weights_version
        self._copy = None if copy_dtype is None else DecodeCopy(model, copy_dtype, device)
        self._model: PreTrainedModel | None = model if self._copy is None else self._copy.model
        self._probe_model: PreTrainedModel | None = model if layout == "auto" and model.device.type != "meta" else None
        self._layout: Layout = layout
        self._visual_layout: Layout = layout  # of batches with images, which a model may treat otherwise

    @property
    def layout(self) -> Layout:
        """How completions are decoded; `auto` until the first prompt has decided it."""
        return self._layout

    @property
    def model(self) -> PreTrainedModel:
        """The model that decodes.

        Raises:
            EngineError: the engine is closed.
        """
        if self._model is None:
            raise EngineError("the engine is closed")
        return self._model

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        params: SamplingParams,
        key: RandomKey,
        *,
        on_group: OnGroup | None = None,
        check_stop: Callable[[], None] | None = None,
    ) -> list[tuple[Completion, ...]]:
        """The completions of each request, in order; see `engine.Engine`."""
        if not requests:
            return []
        layout = self._layout_for(requests, params.max_new_tokens)
        rows = self._rows(requests, params, on_group)
        self._run(self.model, layout, rows, params, key, check_stop)
        return rows.results()

    def _layout_for(self, requests: Sequence[GenerationRequest], max_new_tokens: int | None) -> Layout:
        with_images = next((request for request in requests if request.visual is not None), None)
        if with_images is None:
            return self.decide_layout(requests[0].token_ids, max_new_tokens)
        if self._visual_layout == "auto":
            self._visual_layout = self._decided(with_images, max_new_tokens)
        return self._visual_layout

    def decide_layout(self, prompt_ids: tuple[int, ...], max_new_tokens: int | None) -> Layout:
        """packed where it gives the plain log-probs on a few rows of real length, else plain; one log line says so."""
        if self._layout == "auto":
            self._layout = self._decided(GenerationRequest(token_ids=prompt_ids, num_generations=1, first_row=0), max_new_tokens)
        self._probe_model = None
        return self._layout

    def _decided(self, request: GenerationRequest, max_new_tokens: int | None) -> Layout:
        length = min(max_new_tokens or PROBE_TOKENS, PROBE_TOKENS)
        reason = self._why_not_packed(self._probe_model or self.model, request.token_ids, length, request.visual)
        self._probe_model = None
        if reason:
            logger.info("rollouts%s: plain layout, since %s", " with images" if request.visual is not None else "", reason)
        return "plain" if reason else "packed"

    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Copy new weights into the decode copy; an engine that shares the trainer's model only notes the version.

        Raises:
            EngineError: a name is not the model's, or one of the model's is missing.
        """
        if self._copy is not None:
            self._copy.load(named_tensors)
        self.weights_version = version

    def close(self) -> None:
        """Release the model; safe to call twice."""
        self._model = self._probe_model = self._copy = None

    def _rows(self, requests: Sequence[GenerationRequest], params: SamplingParams, on_group: OnGroup | None) -> Rows:
        return Rows(
            requests,
            params,
            tokenizer=self.tokenizer,
            eos_ids=eos_ids(self.model.generation_config, self.tokenizer),
            context=context_length(self.model),
            version=self.weights_version,
            on_group=on_group,
        )

    def _run(
        self,
        model: PreTrainedModel,
        layout: Layout,
        rows: Rows,
        params: SamplingParams,
        key: RandomKey,
        check_stop: Callable[[], None] | None,
    ) -> None:
        with _sampling(model, inference=self._copy is not None and model is self._model):
            if layout == "packed":
                with _attention(model, DECODE):
                    decode(PackedDecoder(model), rows, params, key, check_stop)
            elif PlainDecoder.can_run(model):
                decode(PlainDecoder(model), rows, params, key, check_stop)
            else:
                generate_by_transformers(model, rows, params, key, check_stop)

    def _why_not_packed(self, model: PreTrainedModel, prompt_ids: tuple[int, ...], length: int, visual: VisualInputs | None) -> str | None:
        """None where packed and plain agree; else the reason in words."""
        unknown = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
        if unknown or not PlainDecoder.can_run(model):
            return (
                f"{type(model).__name__} has layers whose state is not plain keys and values ({', '.join(sorted(unknown)) or 'its cache'})"
            )
        params = SamplingParams(max_new_tokens=length)
        request = GenerationRequest(token_ids=prompt_ids, num_generations=PROBE_ROWS, first_row=0, visual=visual)
        context = context_length(model)
        rows = Rows([request], params, tokenizer=self.tokenizer, eos_ids=(), context=context, version=0, on_group=None)
        try:
            self._run(model, "packed", rows, params, RandomKey(seed=0, step=0, stream="probe"), None)
        except torch.OutOfMemoryError:
            raise
        except UNSUPPORTED as error:
            return f"{type(model).__name__} cannot share prompts: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        gap = (_score(model, prompt_ids, rows.results()[0], visual) - torch.tensor([c.logprobs for c in rows.results()[0]])).abs()
        exact = next(model.parameters()).dtype in (torch.float32, torch.float64)
        agrees = gap.max() <= AGREEMENT if exact else gap.mean() <= AGREEMENT_LOW
        if not agrees:
            return f"the log-probs of {type(model).__name__} with shared prompts differ by up to {gap.max().item():.2g} nats"
        return None


def eos_ids(generation_config: GenerationConfig | None, tokenizer: Any) -> set[int]:
    """Every token id that ends a completion: those of the generation config and of the tokenizer."""
    given = getattr(generation_config, "eos_token_id", None)
    ids = given if isinstance(given, (list, tuple)) else [given]
    return {token for token in [*ids, getattr(tokenizer, "eos_token_id", None)] if token is not None}


def context_length(model: PreTrainedModel) -> int | None:
    """Longest prompt + completion in tokens that the model is made for; None = it names none."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def _score(
    model: PreTrainedModel, prompt_ids: tuple[int, ...], completions: Sequence[Completion], visual: VisualInputs | None
) -> torch.Tensor:
    """Log-probs [rows, T] of equally long completions, by a plain forward pass."""
    tokens = torch.tensor([prompt_ids + completion.token_ids for completion in completions], device=model.device)
    placed = [(visual, n, 0) for n in range(len(completions))] if visual is not None else []
    images = model_arguments(model, visual_arguments(placed, tokens.shape)) if placed else {}
    is_completion = (torch.arange(tokens.shape[1], device=model.device) >= len(prompt_ids)).expand_as(tokens)
    literal_L = is_completion.flatten().nonzero()[:, 0] if placed else tokens.new_empty(0)
    with _sampling(model, inference=False), literal_tokens(model, tokens, literal_L) as input_ids:
        logits = model(input_ids=input_ids, use_cache=False, **images).logits[:, len(prompt_ids) - 1 : -1].float()
    return logits.log_softmax(-1).gather(2, tokens[:, len(prompt_ids) :, None]).squeeze(2).cpu()


@contextmanager
def _sampling(model: PreTrainedModel, *, inference: bool) -> Iterator[None]:
    """Eval mode, no gradients, no autocast; every module's own mode is put back. A shared model must not see inference tensors."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        with torch.inference_mode() if inference else torch.no_grad(), torch.autocast(model.device.type, enabled=False):
            yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Another attention implementation of the text for a while, in every sub-config."""
    configs = {id(module.config): module.config for module in text_part(model).modules() if isinstance(module, PreTrainedModel)}
    before = [(config, config._attn_implementation) for config in configs.values()]
    for config, _ in before:
        config._attn_implementation = name
    try:
        yield
    finally:
        for config, own in before:
            config._attn_implementation = own
