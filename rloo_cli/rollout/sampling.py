"""Draws the next token of every row by inverse CDF from the row's own uniforms. `n` active rows, `V` vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rloo_cli.rollout.engine import RandomKey, SamplingParams
from rloo_cli.rollout.transforms import transform
from rloo_cli.rollout.uniforms import draw_uniforms

FLAT_VOCABULARY = 4096
"""Above this the CDF is searched in two levels, blocks and then the tokens of one block: a running sum is slow on a CPU."""
BLOCK = 256
DRAW_LOGITS = 1 << 25
"""Logits that are turned into probabilities at once: 128 MB in float32, whatever the batch."""
UNIFORMS_AHEAD = 256
"""Tokens for which uniforms are drawn at once."""


class Sampler:
    """Holds what sampling remembers of the active rows: their uniforms and, for a repetition penalty, the tokens seen."""

    def __init__(
        self, params: SamplingParams, key: RandomKey, rows: Sequence[int], prompts: Sequence[tuple[int, ...]], *, vocabulary: int
    ) -> None:
        """`rows`: number of each row within the step; `prompts`: its prompt's token ids."""
        self.params, self.key = params, key
        self.rows = np.asarray(rows)
        self.first = 0  # token that the first row of uniforms_Tn belongs to
        self.uniforms_Tn = torch.empty(0, len(rows), dtype=torch.float64)
        self.seen_nV: torch.Tensor | None = None
        if params.repetition_penalty != 1.0:
            self.seen_nV = torch.zeros(len(rows), vocabulary, dtype=torch.bool)
            for seen_V, prompt in zip(self.seen_nV, prompts, strict=True):
                seen_V[list(prompt)] = True

    def draw(self, logits_nV: torch.Tensor, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Token `position` of every active row: ids [n], and log-probs [n] in nats, NaN where a logit was.

        The log-prob is that of the distribution the token was drawn from; at temperature 0 (greedy) that of the
        logits at temperature 1.
        """
        rows = max(1, DRAW_LOGITS // logits_nV.shape[-1])
        uniforms_n = self._uniforms_n(position, logits_nV.device)
        pieces = [self._draw(logits_nV[i : i + rows], uniforms_n[i : i + rows], slice(i, i + rows)) for i in range(0, len(logits_nV), rows)]
        tokens_n, logprobs_n = pieces[0] if len(pieces) == 1 else map(torch.cat, zip(*pieces, strict=True))
        return tokens_n, logprobs_n

    def _draw(self, logits_nV: torch.Tensor, uniforms_n: torch.Tensor, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        if self.seen_nV is not None:
            self.seen_nV = self.seen_nV.to(logits_nV.device)
        seen_nV = None if self.seen_nV is None else self.seen_nV[rows]
        logits_nV = transform(logits_nV, self.params, seen_nV)
        if self.params.temperature == 0.0:
            tokens_n1 = logits_nV.argmax(-1, keepdim=True)
            logprobs_n1 = logits_nV.log_softmax(-1).gather(1, tokens_n1)
        else:
            probs_nV = logits_nV.softmax(-1)
            tokens_n1 = inverse_cdf(probs_nV, uniforms_n)
            logprobs_n1 = probs_nV.gather(1, tokens_n1).log()
        if seen_nV is not None:
            seen_nV.scatter_(1, tokens_n1, value=True)
        return tokens_n1.squeeze(1), logprobs_n1.squeeze(1)

    def reorder(self, order_n: torch.Tensor) -> None:
        """Keep the rows at `order_n`, in that order."""
        self.rows = self.rows[order_n.cpu().numpy()]
        self.uniforms_Tn = self.uniforms_Tn[:, order_n]
        if self.seen_nV is not None:
            self.seen_nV = self.seen_nV[order_n]

    def _uniforms_n(self, position: int, device: torch.device) -> torch.Tensor:
        if position >= self.first + len(self.uniforms_Tn):
            ahead = min(UNIFORMS_AHEAD, self.params.max_new_tokens or UNIFORMS_AHEAD)
            uniforms_nT = draw_uniforms(self.key, self.rows.tolist(), position, position + ahead)
            self.uniforms_Tn = torch.from_numpy(np.ascontiguousarray(uniforms_nT.T)).to(device)
            self.first = position
        return self.uniforms_Tn[position - self.first]


def inverse_cdf(probs_nV: torch.Tensor, uniforms_n: torch.Tensor) -> torch.Tensor:
    """The first token [n, 1] at which each row's cumulative probability exceeds its uniform; never one of probability 0.

    Sums run in float64, so that rare tokens late in a large vocabulary keep their probability.
    """
    uniforms_n1, size = uniforms_n.unsqueeze(1), probs_nV.shape[-1]
    if size <= FLAT_VOCABULARY:
        cumulative_nV = probs_nV.cumsum(-1, dtype=torch.float64)
        return _first_above(cumulative_nV, uniforms_n1 * cumulative_nV[:, -1:])
    padding = -size % BLOCK
    padded_nV = torch.nn.functional.pad(probs_nV, (0, padding)) if padding else probs_nV
    probs_nbk = padded_nV.unflatten(-1, (-1, BLOCK))
    cumulative_nb = probs_nbk.sum(-1).cumsum(-1, dtype=torch.float64)
    target_n1 = uniforms_n1 * cumulative_nb[:, -1:]
    block_n1 = _first_above(cumulative_nb, target_n1)
    # What is left of the uniform is a uniform within the block: rescaled, so that rounding cannot lead beyond its last token.
    edges_nb = torch.nn.functional.pad(cumulative_nb, (1, 0))
    low_n1, high_n1 = edges_nb.gather(1, block_n1), edges_nb.gather(1, block_n1 + 1)
    rest_n1 = ((target_n1 - low_n1) / (high_n1 - low_n1)).clamp_(max=1.0 - 2.0**-53)
    inside_nk = probs_nbk.gather(1, block_n1.unsqueeze(-1).expand(-1, -1, BLOCK)).squeeze(1).cumsum(-1, dtype=torch.float64)
    return block_n1 * BLOCK + _first_above(inside_nk, rest_n1 * inside_nk[:, -1:])


def _first_above(cumulative_nk: torch.Tensor, target_n1: torch.Tensor) -> torch.Tensor:
    return torch.searchsorted(cumulative_nk, target_n1, right=True).clamp_(max=cumulative_nk.shape[-1] - 1)
