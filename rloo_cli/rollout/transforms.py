"""What is done to logits before a token is drawn: repetition penalty, temperature, top-k, top-p, min-p, in this order.

The results are those of transformers' processors of the same names (tests compare them). `n` rows, `V` vocabulary.
"""

from __future__ import annotations

import torch

from rloo_cli.rollout.engine import SamplingParams

MINUS_INFINITY = float("-inf")
NUCLEUS_CANDIDATES = 512
"""top-p looks among so many most probable tokens first: sorting a whole vocabulary costs several decode steps on a CPU."""


def transform(logits_nV: torch.Tensor, params: SamplingParams, seen_nV: torch.Tensor | None) -> torch.Tensor:
    """float32 logits of the distribution to draw from; −inf where a token is ruled out. The input is left as it is.

    Args:
        seen_nV: True where a token stands in the row's prompt or completion; needed by the repetition penalty.
    """
    logits_nV = logits_nV if logits_nV.dtype == torch.float64 else logits_nV.float()
    if seen_nV is not None:
        logits_nV = _penalise(logits_nV, seen_nV, params.repetition_penalty)
    if params.temperature not in (0.0, 1.0):
        logits_nV = logits_nV / params.temperature
    if 0 < params.top_k < logits_nV.shape[-1]:
        threshold_n1 = logits_nV.topk(params.top_k).values[:, -1:]
        logits_nV = logits_nV.masked_fill(logits_nV < threshold_n1, MINUS_INFINITY)
    if params.top_p < 1.0:
        logits_nV = _nucleus(logits_nV, params.top_p)
    if params.min_p > 0.0:
        probs_nV = logits_nV.softmax(-1)
        logits_nV = logits_nV.masked_fill(probs_nV < params.min_p * probs_nV.amax(-1, keepdim=True), MINUS_INFINITY)
    return logits_nV


def _penalise(logits_nV: torch.Tensor, seen_nV: torch.Tensor, penalty: float) -> torch.Tensor:
    penalised_nV = torch.where(logits_nV < 0, logits_nV * penalty, logits_nV / penalty)
    return torch.where(seen_nV, penalised_nV, logits_nV)


def _nucleus(logits_nV: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keeps the most probable tokens up to and including the one whose probability reaches `top_p`."""
    probs_nV = logits_nV.softmax(-1)
    size = min(NUCLEUS_CANDIDATES, probs_nV.shape[-1])
    probs_nk, tokens_nk = probs_nV.topk(size)
    if size < probs_nV.shape[-1] and bool((probs_nk.sum(-1) < top_p).any()):
        probs_nk, tokens_nk = probs_nV.sort(dim=-1, descending=True, stable=True)
    keep_nk = probs_nk.cumsum(-1) - probs_nk < top_p
    kept_nk = logits_nV.gather(1, tokens_nk).masked_fill(~keep_nk, MINUS_INFINITY)
    return torch.full_like(logits_nV, MINUS_INFINITY).scatter(1, tokens_nk, kept_nk)
