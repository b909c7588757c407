"""The decode loop, and its stand-in for models that only transformers' own `generate` can run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from rloo_cli.rollout.decoders import CheckStop, Decoder
from rloo_cli.rollout.engine import GenerationRequest, RandomKey, SamplingParams
from rloo_cli.rollout.rows import Rows, compact
from rloo_cli.rollout.sampling import Sampler
from rloo_cli.rollout.visual import model_arguments, visual_arguments
from rloo_cli.types import VisualInputs


def distinct_prompts(requests: Sequence[GenerationRequest]) -> tuple[list[tuple[int, ...]], list[VisualInputs | None], list[int]]:
    """The different prompts, shortest first, their images, and for every row the index of its own."""
    visual_of = {_key(request): request.visual for request in requests}
    keys = sorted(visual_of, key=lambda key: (len(key[0]), key))
    index = {key: p for p, key in enumerate(keys)}
    of_row = [index[_key(request)] for request in requests for _ in range(request.num_generations)]
    return [prompt for prompt, _ in keys], [visual_of[key] for key in keys], of_row


def _key(request: GenerationRequest) -> tuple[tuple[int, ...], str]:
    return tuple(request.token_ids), "" if request.visual is None else request.visual.digest


def decode(decoder: Decoder, rows: Rows, params: SamplingParams, key: RandomKey, check_stop: CheckStop) -> None:
    """Fill `rows`; rows that end leave the batch."""
    prompts, visuals, prompt_of_row = distinct_prompts(rows.requests)
    logits_nV = decoder.prefill(prompts, prompt_of_row, int(rows.limit_of_row.max()), check_stop, visuals)
    sampler = Sampler(params, key, rows.number_of_row, [prompts[p] for p in prompt_of_row], vocabulary=logits_nV.shape[-1])
    while True:
        if check_stop is not None:
            check_stop()
        tokens_n, logprobs_n = sampler.draw(logits_nV, rows.length)
        ended_n = rows.record(tokens_n.cpu().numpy(), logprobs_n.cpu().numpy())
        if ended_n.any():
            order_n = compact(ended_n)
            if not len(order_n):
                return
            rows.active = rows.active[order_n]
            index_n = torch.from_numpy(order_n).to(tokens_n.device)
            decoder.reorder(order_n)
            sampler.reorder(index_n)
            tokens_n = tokens_n[index_n]
        logits_nV = decoder.step(tokens_n)


def generate_by_transformers(model: PreTrainedModel, rows: Rows, params: SamplingParams, key: RandomKey, check_stop: CheckStop) -> None:
    """Fill `rows` through `model.generate`, prompts of one length at a time: such models' states do not bear padding."""
    lengths = np.array([len(rows.requests[r].token_ids) for r in rows.request_of_row])
    for length in np.unique(lengths):
        members = np.flatnonzero(lengths == length)
        rows.restart(members)
        requests = [rows.requests[rows.request_of_row[row]] for row in members]
        prompts = [tuple(request.token_ids) for request in requests]
        placed = [(request.visual, n, 0) for n, request in enumerate(requests) if request.visual is not None]
        hook = _GenerateHook(rows, params, key, prompts, check_stop)
        longest = int(rows.limit_of_row[members].max())
        tokens = torch.tensor(prompts, device=model.device)
        with _blank_generation_config(model):
            model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                generation_config=GenerationConfig(do_sample=False, max_new_tokens=longest, eos_token_id=-1, pad_token_id=0),
                logits_processor=LogitsProcessorList([hook.choose]),
                stopping_criteria=StoppingCriteriaList([hook.is_done]),
                **model_arguments(model, visual_arguments(placed, tokens.shape)),
            )


@contextmanager
def _blank_generation_config(model: PreTrainedModel) -> Iterator[None]:
    """Hide the model's own defaults (top_k, repetition_penalty, …), which `generate` would fill in."""
    own, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


class _GenerateHook:
    """Draws inside `generate`: as a logits processor it leaves one token possible, as a criterion it ends rows."""

    def __init__(
        self, rows: Rows, params: SamplingParams, key: RandomKey, prompts: Sequence[tuple[int, ...]], check_stop: CheckStop
    ) -> None:
        self.rows, self.params, self.key, self.prompts, self.check_stop = rows, params, key, prompts, check_stop
        self.sampler: Sampler | None = None
        self.alive = np.arange(len(prompts))
        self.done_n = np.zeros(len(prompts), dtype=bool)

    def choose(self, input_ids: torch.Tensor, scores_nV: torch.Tensor) -> torch.Tensor:
        if self.check_stop is not None:
            self.check_stop()
        if self.sampler is None:
            numbers = [self.rows.number_of_row[row] for row in self.rows.active]
            self.sampler = Sampler(self.params, self.key, numbers, self.prompts, vocabulary=scores_nV.shape[-1])
        tokens_n, logprobs_n = self.sampler.draw(scores_nV, self.rows.length)
        if len(self.alive):
            ended = self.rows.record(tokens_n.cpu().numpy()[self.alive], logprobs_n.cpu().numpy()[self.alive])
            self.done_n[self.alive[ended]] = True
            self.alive, self.rows.active = self.alive[~ended], self.rows.active[~ended]
        return torch.full_like(scores_nV, float("-inf")).scatter_(1, tokens_n.unsqueeze(1), 0.0)

    def is_done(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.from_numpy(self.done_n.copy()).to(input_ids.device)
