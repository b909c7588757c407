"""The engine that a recipe asks for, and nothing about how it works."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel

from rloo_cli.data.adapter_folder import base_of
from rloo_cli.recipe.schema import ModelSection
from rloo_cli.rollout.engine import Engine
from rloo_cli.run.ranks import Ranks, join_neighbours
from rloo_cli.training.adapter import is_adapted, plain_structure
from rloo_cli.training.inputs import TrainingInputs

if TYPE_CHECKING:
    from rloo_cli.rollout.vllm_server import VllmServerEngine


LENDING = ("fsdp2", "zero2", "zero3")
"""Strategies that may gather a weight on every rank, and free it when the next is asked for."""


class EngineMaker:
    """Makes the engine once the trainer's model is there, and owns it; what can fail without the model has been tried before.

    Args:
        inputs: of the run.
        low_precision: the dtype of sampling where it is not that of the weights: bfloat16, or None.
        server: connected, where the engine is a server.
        ranks: of the run.
        device: where an engine's own copy of a model that no rank holds would lie.
    """

    def __init__(
        self, inputs: TrainingInputs, low_precision: torch.dtype | None, server: Engine | None, ranks: Ranks, device: torch.device
    ) -> None:
        self._inputs = inputs
        self._device = device
        self._low_precision = low_precision
        self._engine = server
        self._ranks = ranks

    def make(self, model: PreTrainedModel) -> Engine:
        """The engine, under whatever weights it began with: `load_weights` gives it the trainer's.

        Raises:
            RecipeError, EngineError: vLLM does not take the model, or what the recipe asks of it.
        """
        if self._engine is None:
            is_vllm = self._inputs.recipe.generation.use_vllm
            if is_vllm:
                self._engine = _colocate(self._inputs, model, self._low_precision, self._ranks)
            else:
                self._engine = _transformers(self._inputs, model, self._low_precision, self._device)
        return self._engine

    def close(self) -> None:
        """Release the engine."""
        if self._engine is not None:
            self._engine.close()


def prepare_engine(
    inputs: TrainingInputs,
    low_precision: torch.dtype | None,
    device: torch.device,
    *,
    ranks: Ranks | None = None,
    generating_ranks: Ranks | None = None,
) -> EngineMaker:
    """The maker of the recipe's engine. A server is connected to here, before any model is loaded; by rank 0 first, which leases it.

    Args:
        ranks: of the run, None = this one alone.
        generating_ranks: the same, by the lines on which they collect batches.

    Raises:
        EngineError, RefusedError: the server is away, another's, or has another model.
        NeighbourError: so it is for another rank.
    """
    generation, ranks = inputs.recipe.generation, ranks or Ranks()
    server = None
    if generation.use_vllm and generation.vllm_mode == "server":
        server = _server(inputs, low_precision, device, generating_ranks or ranks)
        for is_turn in (ranks.is_main, not ranks.is_main):
            ranks.together(server.connect if is_turn else lambda: None)
    return EngineMaker(inputs, low_precision, server, ranks, device)


def give_weights(engine: Engine, tensors: Iterator[tuple[str, torch.Tensor]], version: int, ranks: Ranks) -> None:
    """Hand new weights to every rank's engine; where one does not take them, all fail. A collective, as the iterator may be one.

    Raises:
        EngineError, StopRequested: this rank's.
        NeighbourError: another's.
    """

    def load() -> None:
        try:
            engine.load_weights(tensors, version)
        finally:
            if ranks.world_size > 1:
                deque(tensors, maxlen=0)  # the other ranks go through all of it too

    ranks.together(load)


def longest_sequence(inputs: TrainingInputs) -> int | None:
    """Tokens of the longest prompt of the data with the longest completion; None where only the model's context bounds it."""
    completion = inputs.recipe.generation.max_completion_length
    if completion is None:
        return None
    sets = [inputs.prompts] if inputs.eval_prompts is None else [inputs.prompts, inputs.eval_prompts]
    return max(prompts.longest for prompts in sets) + completion


def _transformers(inputs: TrainingInputs, model: PreTrainedModel, low: torch.dtype | None, device: torch.device) -> Engine:
    from rloo_cli.rollout.transformers_engine import TransformersEngine

    layout = inputs.recipe.training.layout
    if model.device.type == "meta":
        copy_dtype = low or model.dtype
    else:  # weights held in bf16 decode as they are; a copy would be the same
        copy_dtype = None if model.dtype == low else low
        if copy_dtype is not None and is_adapted(model):
            model = plain_structure(model)  # the copy gets weights that have the adapter in them
    return TransformersEngine(
        model, tokenizer=inputs.tokenizer, copy_dtype=copy_dtype, layout="plain" if layout == "plain" else "auto", device=device
    )


def _colocate(inputs: TrainingInputs, model: PreTrainedModel, low: torch.dtype | None, ranks: Ranks) -> Engine:
    from rloo_cli.rollout.transformers_engine import eos_ids
    from rloo_cli.rollout.vllm_colocate import VllmColocateEngine

    recipe = inputs.recipe
    generation, base = recipe.generation, base_of(recipe.model)
    return VllmColocateEngine(
        model_path=base.model_name_or_path,
        revision=base.model_revision,
        tokenizer=inputs.tokenizer,
        eos_ids=eos_ids(model.generation_config, inputs.tokenizer),
        dtype=str(low or model.dtype).removeprefix("torch."),
        max_model_length=generation.vllm_max_model_length or longest_sequence(inputs),
        gpu_memory_utilization=generation.vllm_gpu_memory_utilization,
        enable_sleep_mode=generation.vllm_enable_sleep_mode,
        model_impl=generation.vllm_model_impl,
        trust_remote_code=inputs.trust_remote_code,
        seed=recipe.training.seed,
        constrains=generation.vllm_structured_outputs_regex is not None,
        peers=join_neighbours(ranks, min(generation.vllm_tensor_parallel_size, ranks.world_size)),
    )


def _server(inputs: TrainingInputs, low: torch.dtype | None, device: torch.device, ranks: Ranks) -> VllmServerEngine:
    from rloo_cli.rollout.transformers_engine import eos_ids
    from rloo_cli.rollout.vllm_server import ModelIdentity, VllmServerEngine
    from rloo_cli.serving.identity import config_hash

    recipe, model = inputs.recipe, base_of(inputs.recipe.model)
    generation = recipe.generation
    where = {"revision": model.model_revision, "trust_remote_code": inputs.trust_remote_code}
    config = AutoConfig.from_pretrained(model.model_name_or_path, **where)
    return VllmServerEngine(
        base_url=generation.vllm_server_base_url or f"http://{generation.vllm_server_host}:{generation.vllm_server_port}",
        key=_key(generation.vllm_server_key_file),
        tokenizer=inputs.tokenizer,
        eos_ids=eos_ids(_generation_config(model, config), inputs.tokenizer),
        model_identity=ModelIdentity(
            config_hash=config_hash(config.to_dict()),
            vocab_size=config.get_text_config().vocab_size,
            dtype=str(low or getattr(torch, model.dtype)).removeprefix("torch."),
        ),
        max_model_length=longest_sequence(inputs),
        owner=f"{socket.gethostname()}:{os.getpid()}:{inputs.folder.path}",
        transfer=generation.vllm_weight_transfer,
        transfer_dir=Path(generation.vllm_weight_transfer_dir or inputs.folder.path / "weights").absolute(),
        group_port=generation.vllm_group_port,
        start_timeout=generation.vllm_server_timeout,
        retry_seconds=generation.vllm_server_retry_seconds,
        say=inputs.progress.note,
        device=device,
        check_stop=inputs.stop.check,
        keep_weights=recipe.training.async_steps > 0,
        lent_weights=inputs.distribution.strategy in LENDING or model.use_peft,  # weights with the adapter in them are made one at a time
        peers=ranks,
    )


def _key(key_file: str | None) -> str | None:
    from rloo_cli.serving.command import KEY_VARIABLE
    from rloo_cli.serving.key import read_key

    return read_key(Path(key_file).expanduser()) if key_file is not None else os.environ.get(KEY_VARIABLE) or None


def _generation_config(model: ModelSection, config: PreTrainedConfig) -> GenerationConfig:
    """What the model will have as its own once it is loaded."""
    try:
        return GenerationConfig.from_pretrained(model.model_name_or_path, revision=model.model_revision)
    except OSError:  # it has none, as old folders do
        return GenerationConfig.from_model_config(config)
