"""Log-probs and entropies of completion tokens, without a [B, T, V] tensor.

`N` counts the completion tokens of a micro-batch; `L` the tokens that go through the model; `D` the hidden size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

T = TypeVar("T")

SLICE = 128  # rows whose softmax is computed at once: temporaries small enough for the allocator to reuse instead of mapping new pages


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """How the model turns a hidden state into logits: softcap(scale · (h Wᵀ + b))."""

    weight_VD: torch.Tensor
    bias_V: torch.Tensor | None
    scale: float = 1.0
    softcap: float | None = None


def find_head(model: torch.nn.Module) -> Head:
    """The model's LM head with what its configuration does to the logits (Gemma's soft cap, Cohere's and Granite's scale)."""
    output = model.get_output_embeddings()
    config = model.config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    softcap = getattr(config, "final_logit_softcapping", None)
    return Head(weight_VD=output.weight, bias_V=getattr(output, "bias", None), scale=scale, softcap=softcap)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    temperature: float
    chunk: int | None
    scale: float
    softcap: float | None
    compute: torch.dtype | None


def _without_autocast(work: Callable[..., T]) -> Callable[..., T]:
    """The same, with every product in the dtype of its factors: they are cast here already."""

    @functools.wraps(work)
    def exact(ctx: Any, first: torch.Tensor, *more: Any) -> T:
        with torch.autocast(first.device.type, enabled=False):
            return work(ctx, first, *more)

    return exact


class _HeadLogprobs(torch.autograd.Function):
    """log softmax(logits / temperature)[target] and the entropy.

    Without `chunk` the logits stay for the backward pass, which turns them into their own gradient in place; with it, they
    are computed again there, a chunk at a time. The gradient of a log-prob by the logits is (onehot − softmax) /
    temperature; entropy is a metric and has none.
    """

    @staticmethod
    @_without_autocast
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        target_N: torch.Tensor,
        options: _Options,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weight, bias = _cast(weight_VD, bias_V, options)
        parts, kept = [], None
        for rows in _slices(len(hidden_ND), options.chunk or max(len(hidden_ND), 1)):
            kept = torch.nn.functional.linear(hidden_ND[rows].to(weight.dtype), weight, bias)
            for part in _slices(len(kept), SLICE):
                parts.append(_statistics(kept[part], target_N[rows][part], options))
        logp_N, entropy_N, lse_N = (torch.cat(values) for values in zip(*parts, strict=True))
        ctx.options, ctx.kept = options, None if options.chunk else kept
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, target_N, lse_N)
        ctx.mark_non_differentiable(entropy_N)
        return logp_N, entropy_N

    @staticmethod
    @_without_autocast
    def backward(ctx: Any, grad_N: torch.Tensor, _entropy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_ND, weight_VD, bias_V, target_N, lse_N = ctx.saved_tensors
        options, kept = ctx.options, ctx.kept
        ctx.kept = None
        weight, bias = _cast(weight_VD, bias_V, options)
        wide = torch.promote_types(weight_VD.dtype, torch.float32)  # what a sum over chunks needs
        grad_hidden_ND, grad_weight_VD = torch.empty_like(hidden_ND), None
        _, learns_weight, learns_bias, *_ = ctx.needs_input_grad  # beside an adapter the head is frozen
        grad_bias_V = None if bias_V is None or not learns_bias else torch.zeros_like(bias_V, dtype=wide)
        for rows in _slices(len(hidden_ND), options.chunk or max(len(hidden_ND), 1)):
            hidden = hidden_ND[rows].to(weight.dtype)
            logits = torch.nn.functional.linear(hidden, weight, bias) if kept is None else kept
            for part in _slices(len(logits), SLICE):
                logits[part] = _grad_logits(logits[part], lse_N[rows][part], target_N[rows][part], grad_N[rows][part], options)
            grad_hidden_ND[rows] = (logits @ weight).to(hidden_ND.dtype)
            if learns_weight:
                product = (logits.T @ hidden).to(wide)
                grad_weight_VD = product if grad_weight_VD is None else grad_weight_VD.add_(product)
            if grad_bias_V is not None:
                grad_bias_V += logits.sum(dim=0, dtype=grad_bias_V.dtype)
        return grad_hidden_ND, _rounded(grad_weight_VD, weight_VD), _rounded(grad_bias_V, bias_V), None, None


def _rounded(gradient: torch.Tensor | None, like: torch.Tensor | None) -> torch.Tensor | None:
    return gradient if gradient is None or like is None else gradient.to(like.dtype)


def _slices(length: int, size: int) -> Iterator[slice]:
    for start in range(0, max(length, 1), size):
        yield slice(start, min(start + size, length))


def _cast(weight: torch.Tensor, bias: torch.Tensor | None, options: _Options) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias in the dtype that the products run in."""
    compute = options.compute or weight.dtype
    return weight.to(compute), None if bias is None else bias.to(compute)


def _scores(logits: torch.Tensor, options: _Options) -> tuple[torch.Tensor, torch.Tensor | None]:
    """softcap(scale · logits) / temperature as a fresh tensor of float32 at least, and tanh of the soft cap where there is one.

    Softmax over a large vocabulary in bfloat16 would lose everything.
    """
    scores = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32, copy=True)
    if options.softcap:
        tanh = scores.mul_(options.scale / options.softcap).tanh_()
        return tanh * (options.softcap / options.temperature), tanh
    factor = options.scale / options.temperature
    return (scores if factor == 1.0 else scores.mul_(factor)), None


def _statistics(logits: torch.Tensor, target: torch.Tensor, options: _Options) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(log-prob of the target, entropy, log-sum-exp) of each row, in one pass of exponentials."""
    scores, _ = _scores(logits, options)
    top = scores.amax(dim=-1, keepdim=True)
    weights = (scores - top).exp_()
    total = weights.sum(dim=-1)
    lse = total.log() + top[:, 0]
    entropy = lse - torch.linalg.vecdot(weights, scores) / total
    return scores.gather(1, target[:, None])[:, 0] - lse, entropy, lse


def _grad_logits(logits: torch.Tensor, lse: torch.Tensor, target: torch.Tensor, grad: torch.Tensor, options: _Options) -> torch.Tensor:
    """g (onehot − softmax) / temperature, carried back through soft cap and scale, shape [n, V]."""
    scores, tanh = _scores(logits, options)
    result = scores.sub_(lse[:, None]).exp_().mul_(-grad[:, None])
    result.scatter_add_(1, target[:, None], grad[:, None].to(result.dtype))
    factor = options.scale / options.temperature
    if tanh is not None:
        result.mul_(1 - tanh**2)
    return result if factor == 1.0 else result.mul_(factor)


def head_logprobs(
    hidden_ND: torch.Tensor, head: Head, target_N: torch.Tensor, *, temperature: float, chunk: int | None, wide: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-prob, entropy) of each completion token, both [N], nats; float32 or wider; only the first is differentiable.

    Under autocast the products run in its dtype, as the model's own head would.

    Args:
        hidden_ND: the hidden state that predicts each token.
        head: the LM head.
        target_N: the token ids.
        temperature: divides the logits.
        chunk: positions at once, recomputed in the backward pass; None = all, kept.
        wide: the products run in float32 at least, of the weights as they are held.
    """
    device = hidden_ND.device.type
    compute = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    options = _Options(
        temperature=temperature,
        chunk=chunk,
        scale=head.scale,
        softcap=head.softcap,
        compute=torch.promote_types(head.weight_VD.dtype, torch.float32) if wide else compute,
    )
    return _HeadLogprobs.apply(hidden_ND, head.weight_VD, head.bias_V, target_N, options)
