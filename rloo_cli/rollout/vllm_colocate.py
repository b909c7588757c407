"""Generation with vLLM in this process, on the training device: an engine of its own, or one that neighbouring ranks share.

Ranks that share an engine (tensor parallelism) each hold a part of its weights and run the same requests, those of all of them, in the
same order; vLLM schedules alike on each. Each hands on what it had asked for itself, and they look together, before each
step, whether one of them has to stop.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from rloo_cli.errors import EngineError, RecipeError, RlooError
from rloo_cli.rollout.engine import GenerationRequest, OnGroup, RandomKey, SamplingParams
from rloo_cli.rollout.peers import Alone, Peers, agree, shared_batch
from rloo_cli.rollout.rows import completion_limit
from rloo_cli.rollout.vllm_build import FAULTS, EngineSettings, build_engine, end_engine, first_line, lay_out_again
from rloo_cli.rollout.vllm_outputs import RowAnswer, RowBounds, completion_of
from rloo_cli.rollout.vllm_sampling import check_sampling, sampling_fields
from rloo_cli.rollout.vllm_surroundings import kept_torch_random
from rloo_cli.types import Completion

logger = logging.getLogger(__name__)

WEIGHTS, CACHE = "weights", "kv_cache"
"""vLLM's names for the two kinds of memory that sleep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """Where a vLLM request belongs."""

    request: int
    generation: int
    bounds: RowBounds


class _Groups:
    """The completions of a batch, as far as they are there."""

    def __init__(self, requests: Sequence[GenerationRequest]) -> None:
        self._rows: list[list[Completion | None]] = [[None] * request.num_generations for request in requests]

    def put(self, row: _Row, completion: Completion) -> bool:
        """Whether the row's group is whole now."""
        self._rows[row.request][row.generation] = completion
        return None not in self._rows[row.request]

    def __getitem__(self, index: int) -> tuple[Completion, ...]:
        """The completions of a request whose group is whole."""
        return tuple(completion for completion in self._rows[index] if completion is not None)


class VllmColocateEngine:
    """Implements `engine.Engine`. It begins without weights: the first `load_weights` brings them.

    After a failed load or step its state is unknown, and every further call says so; a stop leaves it usable.
    """

    def __init__(
        self,
        *,
        model_path: str,
        revision: str | None,
        tokenizer: Any,
        eos_ids: Collection[int],
        dtype: str,
        max_model_length: int | None,
        gpu_memory_utilization: float,
        enable_sleep_mode: bool,
        model_impl: str,
        trust_remote_code: bool,
        seed: int,
        constrains: bool = False,
        weights_version: int = 0,
        peers: Peers | None = None,
    ) -> None:
        """`max_model_length`: longest prompt + completion in tokens, None = the model's context. `constrains`: whether batches will have a `regex`, for which
        vLLM reads the tokenizer in `model_path`. `peers`: the ranks that share this engine.

        Raises:
            RecipeError: sleep mode on a platform that has none.
            EngineError: vLLM does not take the model or the settings.
        """
        settings = EngineSettings(
            model_path=model_path,
            revision=revision,
            dtype=dtype,
            max_model_length=max_model_length,
            gpu_memory_utilization=gpu_memory_utilization,
            enable_sleep_mode=enable_sleep_mode,
            model_impl=model_impl,
            trust_remote_code=trust_remote_code,
            seed=seed,
            tensor_parallel_size=1 if peers is None else peers.world_size,
            needs_tokenizer=constrains,
        )
        self.weights_version = weights_version
        self._peers: Peers = peers or Alone()
        self._eos_ids = frozenset(eos_ids)
        self._is_guest_of_group = torch.distributed.is_available() and torch.distributed.is_initialized()
        self._llm: Any = build_engine(settings, tokenizer)
        model_config = self._llm.model_config
        self._context: int = model_config.max_model_len
        self._vocab_size: int = model_config.get_vocab_size()
        self._call = itertools.count()
        self._names: frozenset[str] = frozenset()
        self._failure: str | None = None
        self._sleeps = enable_sleep_mode
        self._asleep: set[str] = set()

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        params: SamplingParams,
        key: RandomKey,
        *,
        on_group: OnGroup | None = None,
        check_stop: Callable[[], None] | None = None,
    ) -> list[tuple[Completion, ...]]:
        """The completions of each request, in order; see `engine.Engine`.

        Raises:
            RecipeError: vLLM does not sample that way.
        """
        check_sampling(params)
        llm = self._ready()
        if not self._names:
            raise EngineError("vLLM has no weights yet: `load_weights` comes before the first batch")
        batch = shared_batch(self._peers, requests)
        rows = self._rows(batch.requests, params)
        self._wake(CACHE, WEIGHTS)
        groups = _Groups(batch.requests)
        waiting = dict.fromkeys(rows)  # in order: ranks that share an engine free its memory alike
        finished: deque[int] = deque()

        def hand_on() -> None:
            while finished:
                index = finished.popleft()
                if index in batch.own and on_group is not None:
                    on_group(index - batch.own.start, groups[index])

        def before_step() -> None:
            hand_on()
            if check_stop is not None:
                check_stop()

        try:
            with kept_torch_random():
                self._add(llm, rows, batch.requests, params, key)
                while llm.has_unfinished_requests():
                    agree(self._peers, before_step)
                    for name, completion in self._step(llm, rows):
                        del waiting[name]
                        if groups.put(rows[name], completion):
                            finished.append(rows[name].request)
                agree(self._peers, hand_on)
        finally:
            if waiting and self._failure is None:
                with self._faults("end its requests"):
                    llm.abort_request(list(waiting))
        self._sleep()
        return [groups[index] for index in batch.own]

    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Copy new weights into the engine, by the names of the transformers state dict, and forget cached prompts.

        Each tensor is read before the next is asked for, and not afterwards.

        Raises:
            EngineError: the names are not the model's, or not those of the load before. The engine is of no use afterwards.
        """
        llm = self._ready()
        started = time.perf_counter()
        names: set[str] = set()
        self._failure = f"an update to the weights of step {version} failed half-way"
        self._wake(WEIGHTS)
        with self._faults(f"take the weights of step {version}"), torch.no_grad():
            (missing,) = llm.apply_model(lambda model: _load(model, _noted(named_tensors, names)))
            forgotten = llm.reset_prefix_cache()
        if self._names and self._names != names:
            odd = sorted(self._names ^ names)
            raise EngineError(f"vLLM: {len(odd)} weights were sent before or now, but not both times, `{odd[0]}` among them")
        if missing:
            raise EngineError(f"vLLM: weights of {len(missing)} parameters were not sent, `{missing[0]}` among them")
        if not forgotten:
            raise EngineError("vLLM: the cache of prompts could not be reset after an update: rows are still under way")
        self._names, self._failure, self.weights_version = frozenset(names), None, version
        logger.debug("weights of step %d in vLLM after %.3f s", version, time.perf_counter() - started)

    def close(self) -> None:
        """End vLLM; safe to call twice."""
        llm, self._llm = self._llm, None
        if llm is not None:
            end_engine(llm, keep_process_group=self._is_guest_of_group)

    def _ready(self) -> Any:
        if self._llm is None:
            raise EngineError("the engine is closed")
        if self._failure is not None:
            raise EngineError(f"vLLM is of no use any more: {self._failure}")
        return self._llm

    def _rows(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> dict[str, _Row]:
        """Every row of the batch by the name of its vLLM request."""
        rows: dict[str, _Row] = {}
        call = next(self._call)
        for index, request in enumerate(requests):
            longest = completion_limit(index, request, params, self._context)
            for g in range(request.num_generations):
                bounds = RowBounds(
                    place=f"request {index}, row {request.first_row + g}",
                    max_tokens=longest,
                    vocab_size=self._vocab_size,
                    eos_ids=self._eos_ids,
                    has_stop_strings=bool(params.stop),
                )
                rows[f"{call}-{index}-{g}"] = _Row(request=index, generation=g, bounds=bounds)
        return rows

    def _add(
        self, llm: Any, rows: Mapping[str, _Row], requests: Sequence[GenerationRequest], params: SamplingParams, key: RandomKey
    ) -> None:
        """Queue every row as a request of its own; a group's prompt is computed once, by the prefix cache."""
        from vllm.exceptions import VLLMClientError
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
        from vllm.sampling_params import SamplingParams as VllmSamplingParams

        with self._faults("take the batch"):
            for name, row in rows.items():
                request = requests[row.request]
                fields = sampling_fields(
                    params, key, request.first_row + row.generation, eos_ids=self._eos_ids, max_tokens=row.bounds.max_tokens
                )
                if params.regex is not None:
                    fields["structured_outputs"] = StructuredOutputsParams(**fields["structured_outputs"])
                sampling = VllmSamplingParams(**fields, output_kind=RequestOutputKind.FINAL_ONLY, flat_logprobs=True, skip_clone=True)
                try:
                    llm.add_request(name, tokens_input(list(request.token_ids)), sampling)
                except VLLMClientError as error:
                    raise _declined(error, params) from error

    def _step(self, llm: Any, rows: Mapping[str, _Row]) -> Iterator[tuple[str, Completion]]:
        """Name and completion of each row that ends in vLLM's next step."""
        with self._faults("generate"):
            outputs = llm.step()
        for output in outputs:
            answer = output.outputs[0]
            yield (
                output.request_id,
                completion_of(
                    RowAnswer(token_ids=answer.token_ids, logprobs=answer.logprobs.logprobs, finish_reason=answer.finish_reason),
                    rows[output.request_id].bounds,
                    weights_version=self.weights_version,
                ),
            )

    def _wake(self, *kinds: str) -> None:
        """Take memory back, where it was given up."""
        asleep = [kind for kind in kinds if kind in self._asleep]
        if asleep:
            with self._faults("take its memory back"):
                self._llm.wake_up(tags=asleep)
            self._asleep.difference_update(asleep)

    def _sleep(self) -> None:
        """Give memory up, if the recipe says so. Level 1 keeps the weights in main memory: whether new ones come next is not known here."""
        if self._sleeps:
            with self._faults("give its memory up"):
                self._llm.sleep(level=1)
            self._asleep = {WEIGHTS, CACHE}

    @contextmanager
    def _faults(self, deed: str) -> Iterator[None]:
        """Turns what vLLM raises into an EngineError; the engine's state is unknown then, so it is not used again."""
        try:
            yield
        except FAULTS as error:
            self._failure = f"it could not {deed} ({first_line(error)})"
            raise EngineError(f"vLLM could not {deed}: {first_line(error)}; the log has its traceback") from error


def _declined(error: Exception, params: SamplingParams) -> RlooError:
    """What a request means that vLLM does not take: the expression is none that it can follow, or it is no fault of the recipe."""
    if params.regex is not None:
        return RecipeError(f"generation.vllm_structured_outputs_regex: vLLM cannot follow {params.regex!r}: {first_line(error)}")
    return EngineError(f"vLLM does not take a prompt of the batch: {first_line(error)}")


def _noted(named_tensors: Iterable[tuple[str, torch.Tensor]], names: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The same, with the names put down on the way."""
    for name, tensor in named_tensors:
        names.add(name)
        yield name, tensor


def _load(model: torch.nn.Module, tensors: Iterator[tuple[str, torch.Tensor]]) -> list[str]:
    """Put the weights into vLLM's model; the names of its parameters that got none."""
    loaded = model.load_weights(tensors)
    deque(tensors, maxlen=0)  # what it left out
    lay_out_again(model)
    return [] if loaded is None else sorted({name for name, _ in model.named_parameters()} - loaded)
