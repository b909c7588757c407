"""What training and every look at it begin with: device, precision, the engine's first half, model and policy."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from transformers import PreTrainedModel

from rloo_cli.recipe.schema import Recipe
from rloo_cli.run.ranks import Ranks, join_ranks
from rloo_cli.training import auto
from rloo_cli.training.adapter import add_adapter
from rloo_cli.training.engines import EngineMaker, prepare_engine
from rloo_cli.training.inputs import TrainingInputs
from rloo_cli.training.policy import Policy, disable_dropout, empty_model, load_model
from rloo_cli.training.strategy import Strategy, make_strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Where and how numbers are computed, before any model is there."""

    accelerator: Accelerator
    low_precision: torch.dtype | None
    """bfloat16 where training autocasts and samples in it, or None."""
    maker: EngineMaker
    ranks: Ranks
    generating_ranks: Ranks
    """The same, by lines of their own where a batch is collected while another trains."""
    strategy: Strategy


def prepare_device(inputs: TrainingInputs, stack: ExitStack) -> Device:
    """The device, with the recipe's server connected to; whatever engine is made goes with the stack.

    Raises:
        EngineError, RefusedError: the server is away, another's, or has another model.
    """
    asked = inputs.recipe.training
    state = PartialState(cpu=not torch.cuda.is_available())
    ranks = join_ranks()
    # A resumed run's recipe holds what was decided; measuring again on a busy machine could decide otherwise.
    is_low = asked.bf16 if inputs.resume_from is not None else ranks.broadcast(ranks.is_main and auto.decide_bf16(asked, state.device))
    if asked.bf16 and not is_low:
        inputs.progress.note("bf16: off, this device is not faster at it; float32 throughout.")
    _forget_precision(stack)
    accelerator = Accelerator(mixed_precision="bf16" if is_low else "no", cpu=state.device.type == "cpu")
    low = torch.bfloat16 if is_low else None
    generating_ranks = join_ranks() if asked.async_steps else ranks
    return Device(
        accelerator=accelerator,
        low_precision=low,
        maker=stack.enter_context(closing(prepare_engine(inputs, low, state.device, ranks=ranks, generating_ranks=generating_ranks))),
        ranks=ranks,
        generating_ranks=generating_ranks,
        strategy=make_strategy(inputs.distribution, accelerator, ranks),
    )


def _forget_precision(stack: ExitStack) -> None:
    """Let this training have a precision of its own: accelerate keeps one a process, that of whoever came first, which the stack puts back."""
    before = dict(AcceleratorState._shared_state)
    AcceleratorState._reset_state()

    def put_back() -> None:
        AcceleratorState._shared_state.clear()
        AcceleratorState._shared_state.update(before)

    stack.callback(put_back)


def load_shared(inputs: TrainingInputs, device: Device) -> PreTrainedModel:
    """The recipe's model on the CPU; where the strategy shards, on the main rank, and without weights on the others.

    Raises:
        RecipeError, NonFiniteError: it cannot be loaded.
        NeighbourError: so it is for another rank.
    """
    if not device.strategy.is_sharded:
        return load(inputs)
    ranks = device.ranks
    model = ranks.together(lambda: load(inputs) if ranks.is_main else None)
    generation_config = ranks.broadcast(model.generation_config if model is not None else None)
    if model is None:
        model = _prepared(inputs, empty_model(inputs.recipe.model, trust_remote_code=inputs.trust_remote_code))
        model.generation_config = generation_config
    return model


def load(inputs: TrainingInputs) -> PreTrainedModel:
    """The recipe's model on the CPU, its dropout off where the recipe says so, with the adapter that is to be trained."""
    model = load_model(inputs.recipe.model, seed=inputs.recipe.training.seed, trust_remote_code=inputs.trust_remote_code)
    return _prepared(inputs, model)


def _prepared(inputs: TrainingInputs, model: PreTrainedModel) -> PreTrainedModel:
    if inputs.recipe.training.disable_dropout:
        disable_dropout(model)
    if (attention := inputs.recipe.model.attn_implementation or _needed_attention(model)) is not None:
        model.set_attn_implementation(attention)
    if (section := inputs.recipe.model).use_peft:
        add_adapter(model, section, seed=inputs.recipe.training.seed)
    return model


def _needed_attention(model: PreTrainedModel) -> str | None:
    """eager where the model caps its attention scores (Gemma 2), which transformers' sdpa leaves out without a word; else its own choice."""
    return "eager" if getattr(model.config.get_text_config(), "attn_logit_softcapping", None) else None


def make_policy(inputs: TrainingInputs, model: PreTrainedModel) -> Policy:
    """The policy around a model, before anything `auto` is decided."""
    return Policy(
        model,
        layout="plain",
        temperature=inputs.recipe.generation.temperature,
        head_chunk=None,
        wide_head=inputs.recipe.training.cast_lm_head_to_fp32,
    )


def decide(inputs: TrainingInputs, policy: Policy, device: Device) -> Recipe:
    """The recipe with every `auto` decided by the main rank, and the policy set up accordingly; the policy lies on its device."""
    is_asked = device.ranks.is_main or device.strategy.is_sharded  # whose forward pass, which tries a layout, takes every rank
    decided = device.ranks.broadcast(_decide(inputs, policy, device) if is_asked else {})
    torch.set_num_threads(decided["threads"])
    policy.layout, policy.head_chunk = decided["layout"], decided["head_chunk"]
    return auto.with_decisions(inputs.recipe, **decided)


def _decide(inputs: TrainingInputs, policy: Policy, device: Device) -> dict[str, Any]:
    """The recipe's fields that are `auto`, as decided."""
    recipe, training = inputs.recipe, inputs.recipe.training
    threads = auto.decide_threads(training)
    torch.set_num_threads(threads)
    head = next((part.head for part in inputs.prompts.parts() if part.head.has_images), inputs.prompts.head)
    prompt = head[head.first_with_images or 0]
    probe = prompt.token_ids
    length = recipe.generation.max_completion_length or len(probe)
    layout = auto.decide_layout(
        training,
        policy,
        prompt_ids=probe,
        completion_length=length,
        visual=prompt.visual,
        is_low=device.strategy.is_sharded and device.low_precision is not None,
        give_up=device.strategy.give_up_pass,
    )
    longest = max(part.head.longest for part in inputs.prompts.parts()) + inputs.batch.num_generations * length
    max_tokens = auto.decide_max_tokens(training, policy.model, device.accelerator.device, group_tokens=longest)
    return {
        "bf16": device.low_precision is not None,
        "threads": threads,
        "layout": layout,
        "max_tokens_per_micro_batch": max_tokens,
        "head_chunk": auto.decide_head_chunk(training, policy.model.config.get_text_config().vocab_size, max_tokens),
    }
