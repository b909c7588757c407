"""Two ways to run a model token by token: with shared prompts (`packed`), or with transformers' own cache (`plain`).

`n` active rows, `P` distinct prompts, `V` vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from itertools import accumulate, groupby
from typing import Protocol

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from rloo_cli.rollout.kv_cache import KVCache, Run
from rloo_cli.rollout.shared_attention import DecodeUnsupportedError
from rloo_cli.rollout.visual import has_own_positions, model_arguments, visual_arguments
from rloo_cli.types import VisualInputs

CheckStop = Callable[[], None] | None

PREFILL_TOKENS = 8192
"""Prompt tokens in one forward pass, as long as a single prompt is not longer."""


class Decoder(Protocol):
    """Logits of the next token, step by step."""

    def prefill(
        self,
        prompts: Sequence[tuple[int, ...]],
        prompt_of_row: Sequence[int],
        longest: int,
        check_stop: CheckStop = None,
        visuals: Sequence[VisualInputs | None] = (),
    ) -> torch.Tensor:
        """Logits [n, V] after each row's prompt. `longest`: most completion tokens to come; `check_stop` raises to give up; `visuals`: the prompts' images, () = none."""
        ...

    def step(self, tokens_n: torch.Tensor) -> torch.Tensor:
        """Logits [n, V] after one more token of each row."""
        ...

    def reorder(self, order_n: np.ndarray) -> None:
        """Keep the rows at `order_n`, in that order."""
        ...


class PackedDecoder:
    """Every distinct prompt is computed once, in a packed sequence without padding; rows keep keys and values in our cache.

    The model's attention implementation must be `shared_attention.DECODE` while this runs.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.cache: KVCache
        self.positions_n1: torch.Tensor

    def prefill(
        self,
        prompts: Sequence[tuple[int, ...]],
        prompt_of_row: Sequence[int],
        longest: int,
        check_stop: CheckStop = None,
        visuals: Sequence[VisualInputs | None] = (),
    ) -> torch.Tensor:
        """Logits [n, V] after each row's prompt. Prompts come sorted by length; a stop is looked for between chunks of them."""
        lengths = [len(prompt) for prompt in prompts]
        self.cache = KVCache(lengths, prompt_of_row, longest=longest)
        logits_PV = torch.cat([self._prefill_chunk(prompts, chunk, check_stop, visuals) for chunk in _chunks(lengths)])
        self.cache.start_rows()
        index_n = torch.tensor(prompt_of_row, device=logits_PV.device)
        self.positions_n1 = torch.tensor(lengths, device=logits_PV.device)[index_n].unsqueeze(1)
        return logits_PV[index_n]

    def step(self, tokens_n: torch.Tensor) -> torch.Tensor:
        """Logits [n, V] after one more token of each row."""
        self.cache.next_token()
        logits_nV = self._forward(tokens_n.unsqueeze(1), self.positions_n1)[:, -1]
        self.positions_n1 += 1
        return logits_nV

    def reorder(self, order_n: np.ndarray) -> None:
        """Keep the rows at `order_n`, in that order."""
        self.cache.reorder(order_n)
        self.positions_n1 = self.positions_n1[torch.from_numpy(order_n).to(self.positions_n1.device)]

    def _prefill_chunk(
        self, prompts: Sequence[tuple[int, ...]], chunk: range, check_stop: CheckStop, visuals: Sequence[VisualInputs | None]
    ) -> torch.Tensor:
        if chunk.start and check_stop is not None:
            check_stop()
        device = self.model.device
        lengths = [len(prompts[p]) for p in chunk]
        self.cache.runs = _runs(lengths, chunk.start)
        tokens_1N = torch.tensor([[token for p in chunk for token in prompts[p]]], device=device)
        positions_1N = torch.cat([torch.arange(length) for length in lengths])[None].to(device)
        last_P = torch.tensor(lengths, device=device).cumsum(0) - 1
        images = self._images(visuals[chunk.start : chunk.stop], lengths)
        logits_1PV = self._forward(tokens_1N, positions_1N, logits_to_keep=last_P, **images)
        return logits_1PV[0] if logits_1PV.shape[1] == len(lengths) else logits_1PV[0, last_P]

    def _images(self, visuals: Sequence[VisualInputs | None], lengths: Sequence[int]) -> dict[str, torch.Tensor]:
        """The arguments of a chunk's images.

        Raises:
            DecodeUnsupportedError: the model has positions of its own for prompts with images.
        """
        starts = [0, *accumulate(lengths)]
        placed = [(visual, 0, start) for visual, start in zip(visuals, starts, strict=False) if visual is not None]
        if placed and has_own_positions(self.model):
            raise DecodeUnsupportedError("its positions depend on the images")
        return model_arguments(self.model, visual_arguments(placed, (1, starts[-1]))) if placed else {}

    def _forward(self, tokens: torch.Tensor, positions: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, position_ids=positions, use_cache=False, rollout_cache=self.cache, **kwargs).logits


class PlainDecoder:
    """Prompts padded on the left, transformers' DynamicCache repeated to rows, each model's own attention."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.cache: DynamicCache
        self.attention_mask: torch.Tensor
        self.positions_n1: torch.Tensor

    @staticmethod
    def can_run(model: PreTrainedModel) -> bool:
        """Whether the model's cache is plain keys and values, so that rows can be copied and dropped."""
        if getattr(model, "_is_stateful", False) or not {"position_ids", "past_key_values"} <= set(
            inspect.signature(model.forward).parameters
        ):
            return False
        return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in DynamicCache(config=model.config).layers)

    def prefill(
        self,
        prompts: Sequence[tuple[int, ...]],
        prompt_of_row: Sequence[int],
        longest: int,
        check_stop: CheckStop = None,
        visuals: Sequence[VisualInputs | None] = (),
    ) -> torch.Tensor:
        """Logits [n, V] after each row's prompt, from one forward pass."""
        device, width = self.model.device, max(len(prompt) for prompt in prompts)
        tokens_PS = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
        lengths_P1 = torch.tensor([[len(prompt)] for prompt in prompts], device=device)
        columns_S = torch.arange(width, device=device)
        mask_PS = (columns_S >= width - lengths_P1).long()
        positions_PS = (columns_S - (width - lengths_P1)).clamp(min=0)
        self.cache = DynamicCache(config=self.model.config)
        placed = [(visual, p, width - len(prompts[p])) for p, visual in enumerate(visuals) if visual is not None]
        next_P1 = lengths_P1
        if placed:
            images = model_arguments(self.model, visual_arguments(placed, (len(prompts), width)))
            own_positions = has_own_positions(self.model)
            logits_PV = self._forward(tokens_PS, None if own_positions else positions_PS, mask_PS, **images)
            if own_positions:  # an image takes fewer positions than it has tokens
                next_P1 = lengths_P1 + self.model.base_model.rope_deltas
        else:
            logits_PV = self._forward(tokens_PS, positions_PS, mask_PS)
        index_n = torch.tensor(prompt_of_row, device=device)
        self.cache.batch_select_indices(index_n)
        self.attention_mask, self.positions_n1 = mask_PS[index_n], next_P1[index_n]
        return logits_PV[index_n]

    def step(self, tokens_n: torch.Tensor) -> torch.Tensor:
        """Logits [n, V] after one more token of each row."""
        self.attention_mask = torch.cat((self.attention_mask, torch.ones_like(self.positions_n1)), dim=1)
        logits_nV = self._forward(tokens_n.unsqueeze(1), self.positions_n1, self.attention_mask)
        self.positions_n1 = self.positions_n1 + 1
        return logits_nV

    def reorder(self, order_n: np.ndarray) -> None:
        """Keep the rows at `order_n`, in that order."""
        index_n = torch.from_numpy(order_n).to(self.positions_n1.device)
        self.cache.batch_select_indices(index_n)
        self.attention_mask, self.positions_n1 = self.attention_mask[index_n], self.positions_n1[index_n]

    def _forward(self, tokens: torch.Tensor, positions: torch.Tensor | None, mask: torch.Tensor, **images: torch.Tensor) -> torch.Tensor:
        output = self.model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
            **images,
        )
        return output.logits[:, -1]


def _chunks(lengths: Sequence[int]) -> list[range]:
    """Consecutive prompts of about PREFILL_TOKENS tokens."""
    chunks, start, tokens = [], 0, 0
    for p, length in enumerate(lengths):
        if p > start and tokens + length > PREFILL_TOKENS:
            chunks.append(range(start, p))
            start, tokens = p, 0
        tokens += length
    return [*chunks, range(start, len(lengths))]


def _runs(lengths: Sequence[int], first: int) -> list[Run]:
    """Neighbours of equal length, from prompt `first` on."""
    runs, start = [], 0
    for length, group in groupby(lengths):
        count = len(list(group))
        runs.append(Run(first=first, count=count, start=start, length=length))
        first, start = first + count, start + count * length
    return runs
