"""The auxiliary loss of a mixture of experts: how unevenly the routers deal a row's tokens out (`router_aux_loss_coef`).

For row i, over its prompt and completion in all layers with a router, E experts of which each token goes to k:

    aux_i = E Σ_e f_ie P_ie      f_ie = choices of expert e by a token, P_ie = mean probability of e; k where all is even

It is what transformers' `load_balancing_loss_func` gives for the row alone. Balance is asked for within each row, as DeepSeek-V3 does
(arXiv 2412.19437, section 2.1.2), and not within whatever micro-batch a row was put into: the gradient of a step then does not depend on how
it was cut. Source of the formula: Fedus et al. 2021, "Switch Transformers", arXiv 2101.03961, equations 4 to 6.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from transformers import PreTrainedModel

from rloo_cli.errors import RecipeError
from rloo_cli.training.microbatches import GroupRows, Layout


class RouterLoss:
    """Records what the routers of a model say in a forward pass, and makes the auxiliary loss of it; with coefficient 0 there is none.

    Raises:
        RecipeError: the model has no routers that transformers knows of.
    """

    def __init__(self, model: PreTrainedModel, coefficient: float) -> None:
        self.coefficient = coefficient
        self._routers = _routers(model) if coefficient > 0 else []
        self._top_k = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
        if coefficient > 0 and not (self._routers and self._top_k):
            raise RecipeError(
                f"algorithm.router_aux_loss_coef: {type(model).__name__} has no router whose choices could be balanced: it is a loss of "
                "mixtures of experts. Remove the field."
            )

    @contextmanager
    def recording(self) -> Iterator[list[torch.Tensor]]:
        """The routers' logits of the forward pass in the block, [tokens of the input, E] a layer; filled while it runs."""
        logits: list[torch.Tensor] = []

        def keep(index: int) -> Any:
            return lambda module, arguments, output: logits.append(output[index] if isinstance(output, tuple) else output)

        hooks = [module.register_forward_hook(keep(index)) for module, index in self._routers]
        try:
            yield logits
        finally:
            for hook in hooks:
                hook.remove()

    def by_row(self, logits: Sequence[torch.Tensor], pieces: Sequence[GroupRows], layout: Layout) -> torch.Tensor:
        """aux_i of each row of the micro-batch, [B]; the last token of a completion is left out, as it is from the pass."""
        token_M, row_M = _tokens_of_rows(pieces, layout, logits[0].device)
        rows, experts = sum(len(piece.rows) for piece in pieces), logits[0].shape[-1]
        chosen_BE = probability_BE = torch.zeros(rows, experts, device=token_M.device)
        for layer in logits:
            probability_ME = layer.float().softmax(-1)[token_M]
            picked_MK = probability_ME.detach().topk(self._top_k, dim=-1).indices
            chosen_ME = torch.zeros_like(probability_ME).scatter_(1, picked_MK, 1.0)
            chosen_BE = chosen_BE.index_add(0, row_M, chosen_ME)
            probability_BE = probability_BE.index_add(0, row_M, probability_ME)
        total_B = torch.bincount(row_M, minlength=rows) * len(logits)
        return experts * (chosen_BE * probability_BE).sum(-1) / total_B**2


def _routers(model: PreTrainedModel) -> list[tuple[torch.nn.Module, int]]:
    """(module, place of the logits in its output) of every router, by what the model tells transformers to record."""
    found: dict[int, tuple[torch.nn.Module, int]] = {}
    for part in model.modules():
        recorders = (getattr(part, "_can_record_outputs", None) or {}).get("router_logits", ())
        for recorder in recorders if isinstance(recorders, list | tuple) else (recorders,):
            for name, module in part.named_modules():
                if isinstance(module, recorder.target_class) and (recorder.layer_name is None or recorder.layer_name in name):
                    found[id(module)] = (module, recorder.index)
    return list(found.values())


def _tokens_of_rows(pieces: Sequence[GroupRows], layout: Layout, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(place in the flattened input, row of the micro-batch) of every token of every row; a packed prompt's tokens are those of all its rows."""
    ranges: list[list[range]] = []
    width = max(len(piece.prompt_ids) + len(ids) - 1 for piece in pieces for ids in piece.completion_ids)
    start = 0
    for piece in pieces:
        prompt = len(piece.prompt_ids)
        inputs = [len(ids) - 1 for ids in piece.completion_ids]
        if layout == "packed":
            ends = [start + prompt + sum(inputs[:i]) for i in range(len(inputs) + 1)]
            ranges += [[range(start, start + prompt), range(first, last)] for first, last in pairwise(ends)]
            start = ends[-1]
        else:
            ranges += [[range(width * row, width * row + prompt + count)] for row, count in enumerate(inputs, start=len(ranges))]
    tokens = [[token for part in parts for token in part] for parts in ranges]
    row_M = torch.tensor([row for row, places in enumerate(tokens) for _ in places], device=device)
    return torch.tensor([token for places in tokens for token in places], device=device), row_M
