"""Log-probs and entropies of completion tokens, without a [B, T, V] tensor.

`N` counts the completion tokens of a micro-batch; `L` the tokens that go through the model; `D` the hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch


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


class _HeadLogprobs(torch.autograd.Function):
    """log softmax(logits / temperature)[target] and the entropy, a chunk of positions at a time.

    With `keep` the logits stay for the backward pass; without, each chunk is computed again there. The gradient of a
    log-prob by the logits is (onehot − softmax) / temperature; entropy is a metric and has none.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        target_N: torch.Tensor,
        options: Mapping[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logp, entropy, lse, kept = [], [], [], []
        weight, bias = _cast(weight_VD, bias_V, options)
        for rows in _chunks(len(hidden_ND), options["chunk"]):
            logits = _logits(hidden_ND[rows], weight, bias, options)
            scores = _full(logits) / options["temperature"]
            lse_n = scores.logsumexp(dim=-1)
            logp.append(scores.gather(1, target_N[rows, None])[:, 0] - lse_n)
            entropy.append(lse_n - torch.linalg.vecdot((scores - lse_n[:, None]).exp_(), scores))
            lse.append(lse_n)
            if options["keep"]:
                kept.append(logits)
        ctx.options, ctx.kept = options, kept
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, target_N, torch.cat(lse))
        logp_N, entropy_N = torch.cat(logp), torch.cat(entropy)
        ctx.mark_non_differentiable(entropy_N)
        return logp_N, entropy_N

    @staticmethod
    def backward(ctx: Any, grad_N: torch.Tensor, _entropy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_ND, weight_VD, bias_V, target_N, lse_N = ctx.saved_tensors
        options = ctx.options
        weight, bias = _cast(weight_VD, bias_V, options)
        grad_hidden_ND = torch.empty_like(hidden_ND)
        grad_weight_VD = torch.zeros_like(weight_VD)
        grad_bias_V = None if bias_V is None else torch.zeros_like(bias_V)
        for i, rows in enumerate(_chunks(len(hidden_ND), options["chunk"])):
            logits = ctx.kept[i] if options["keep"] else _logits(hidden_ND[rows], weight, bias, options)
            grad = _grad_logits(_full(logits), lse_N[rows], target_N[rows], grad_N[rows], options)
            low = grad.to(weight.dtype)
            grad_hidden_ND[rows] = low @ weight
            grad_weight_VD += low.T @ hidden_ND[rows].to(weight.dtype)
            if grad_bias_V is not None:
                grad_bias_V += grad.sum(dim=0)
        return grad_hidden_ND, grad_weight_VD, grad_bias_V, None, None


def _chunks(length: int, chunk: int) -> Iterator[slice]:
    for start in range(0, length, chunk):
        yield slice(start, min(start + chunk, length))


def _cast(weight: torch.Tensor, bias: torch.Tensor | None, options: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias in the dtype that the products run in."""
    compute = options["compute"] or weight.dtype
    return weight.to(compute), None if bias is None else bias.to(compute)


def _full(logits: torch.Tensor) -> torch.Tensor:
    """Float32 at least: softmax over a large vocabulary in bfloat16 loses everything."""
    return logits if logits.dtype == torch.float64 else logits.float()


def _logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, options: Mapping[str, Any]) -> torch.Tensor:
    logits = torch.nn.functional.linear(hidden.to(weight.dtype), weight, bias)
    if options["scale"] != 1.0:
        logits = logits * options["scale"]
    if options["softcap"]:
        logits = torch.tanh(logits / options["softcap"]) * options["softcap"]
    return logits


def _grad_logits(
    logits: torch.Tensor, lse: torch.Tensor, target: torch.Tensor, grad: torch.Tensor, options: Mapping[str, Any]
) -> torch.Tensor:
    """g (onehot − softmax) / temperature, carried back through soft cap and scale, shape [n, V]."""
    result = (logits / options["temperature"] - lse[:, None]).exp_().mul_(-grad[:, None])
    result.scatter_add_(1, target[:, None], grad[:, None].to(result.dtype))
    factor = options["scale"] / options["temperature"]
    if options["softcap"]:
        result *= 1 - (logits / options["softcap"]) ** 2
    return result if factor == 1.0 else result.mul_(factor)


def head_logprobs(
    hidden_ND: torch.Tensor, head: Head, target_N: torch.Tensor, *, temperature: float, chunk: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-prob, entropy) of each completion token, both [N], nats; float32 or wider; only the first is differentiable.

    Under autocast the products run in its dtype, as the model's own head would.

    Args:
        hidden_ND: the hidden state that predicts each token.
        head: the LM head.
        target_N: the token ids.
        temperature: divides the logits.
        chunk: positions at once, recomputed in the backward pass; None = all, kept.
    """
    device = hidden_ND.device.type
    compute = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    options = {
        "temperature": temperature,
        "chunk": chunk or max(len(hidden_ND), 1),
        "keep": chunk is None and torch.is_grad_enabled(),
        "scale": head.scale,
        "softcap": head.softcap,
        "compute": compute,
    }
    return _HeadLogprobs.apply(hidden_ND, head.weight_VD, head.bias_V, target_N, options)
