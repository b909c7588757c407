"""`train` and `evaluate_model`: the collaborators put together, then the loop."""

from __future__ import annotations

import logging
from contextlib import closing
from dataclasses import replace

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

from rloo_cli.errors import RefusedError
from rloo_cli.recipe.dump import dump_recipe
from rloo_cli.recipe.schema import Recipe
from rloo_cli.rollout.engine import Engine
from rloo_cli.run.atomic import write_file
from rloo_cli.run.checkpoint import set_aside_newer
from rloo_cli.run.metrics import MetricsWriter
from rloo_cli.run.randomness import restore_random_state, seed_everything
from rloo_cli.run.trackers import Trackers
from rloo_cli.training import auto
from rloo_cli.training.engines import prepare_engine
from rloo_cli.training.evaluation import evaluate
from rloo_cli.training.experience import Collector, Experience
from rloo_cli.training.fingerprint import fingerprint
from rloo_cli.training.inputs import TrainingInputs
from rloo_cli.training.loop import run_loop
from rloo_cli.training.optimizer import build_optimizer
from rloo_cli.training.policy import Policy, disable_dropout, has_dropout, load_model, make_reference
from rloo_cli.training.recorder import Recorder
from rloo_cli.training.state import RunPosition, load_position
from rloo_cli.training.training_run import TrainingRun
from rloo_cli.training.update import Updater, UpdateSettings

logger = logging.getLogger(__name__)


def train(inputs: TrainingInputs) -> None:
    """Train to the end, or until a signal; final/ and metrics.jsonl are then on disk.

    Raises:
        RlooError: each kind with its exit code.
        StopRequested: a signal came before the loop began.
    """
    inputs.progress.note(f"run folder: {inputs.folder.path}")
    with inputs.progress.phase("load model"), inputs.stop.at_once():
        run = _assemble(inputs)
    try:
        run_loop(run)
    finally:
        run.close()


def evaluate_model(inputs: TrainingInputs) -> tuple[Experience, dict[str, float]]:
    """The completions and `eval/…` metrics of the recipe's model, or of the checkpoint to resume from; writes nothing."""
    assert inputs.eval_prompts is not None
    accelerator = _accelerator(low_precision=False)
    low = torch.bfloat16 if auto.decide_bf16(inputs.recipe.training, accelerator.device) else None
    maker = prepare_engine(inputs, low, accelerator.device)
    model = _load(inputs)
    step = 0
    if inputs.resume_from is not None:
        model.load_state_dict(inputs.resume_from.load_tensors("model"), strict=False)
        step = inputs.resume_from.step
    torch.set_num_threads(auto.decide_threads(inputs.recipe.training))
    with closing(maker.make(model.to(accelerator.device))) as engine, inputs.progress.phase("evaluate"):
        engine.load_weights(model.state_dict().items(), version=step)
        collector = _collector(inputs, engine)
        return evaluate(collector, inputs.eval_prompts, inputs.recipe, inputs.rewards.names, step, inputs.stop.check)


def _assemble(inputs: TrainingInputs) -> TrainingRun:
    seed_everything(inputs.recipe.training.seed, "start")
    asked = inputs.recipe.training
    # A resumed run's recipe holds what was decided; measuring again on a busy machine could decide otherwise.
    accelerator = _accelerator(low_precision=asked.bf16 if inputs.resume_from is not None else auto.decide_bf16(asked, _device()))
    low = torch.bfloat16 if accelerator.mixed_precision == "bf16" else None
    if inputs.recipe.training.bf16 and low is None:
        inputs.progress.note("bf16: off, this device is not faster at it; float32 throughout.")
    maker = prepare_engine(inputs, low, accelerator.device)
    model = _load(inputs)
    origin = fingerprint(model)
    _refuse_other_model(inputs, origin)
    model = model.to(accelerator.device)
    policy, recipe = _policy(inputs, model, accelerator, low)
    inputs = replace(inputs, recipe=recipe)
    write_file(inputs.folder.recipe, dump_recipe(recipe))
    reference = make_reference(policy, low_precision=low) if recipe.algorithm.beta > 0 else None
    if recipe.training.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = build_optimizer(policy, recipe.training, total_steps=inputs.total_steps, accelerator=accelerator)
    position, offset = RunPosition(), 0
    if (checkpoint := inputs.resume_from) is not None:
        position, offset = (
            load_position(checkpoint, [entry.weight for entry in recipe.rewards]),
            checkpoint.load_document("metrics")["offset"],
        )
        _load_weights(model, checkpoint.load_tensors("model"))
        optimizer.load_state(checkpoint.load_tensors("optimizer"), checkpoint.load_document("optimizer"))
        restore_random_state(checkpoint.load_document("random"), checkpoint.load_tensors("random"))
    set_aside_newer(inputs.folder.checkpoints, position.step)
    engine = maker.make(model)
    engine.load_weights(model.state_dict().items(), version=position.step)
    updater = Updater(
        accelerator=accelerator,
        policy=accelerator.prepare(policy),
        reference=reference,
        optimizer=optimizer,
        algorithm=recipe.algorithm,
        settings=_settings(inputs, model),
        check_stop=inputs.stop.check,
    )
    collector = _collector(inputs, engine)
    recorder = _recorder(inputs, offset, position.step)
    return TrainingRun(
        inputs, collector=collector, engine=engine, updater=updater, recorder=recorder, position=position, model_fingerprint=origin
    )


def _refuse_other_model(inputs: TrainingInputs, origin: str) -> None:
    """Raise RefusedError where the model to start from is not the one that the checkpoint's run began with; it is the reference."""
    checkpoint = inputs.resume_from
    if checkpoint is None or not checkpoint.has("origin") or checkpoint.load_document("origin")["model"] == origin:
        return
    raise RefusedError(
        f"{inputs.recipe.model.model_name_or_path} is not the model that {checkpoint.path} was trained from: its weights or shapes have "
        "changed. Bring it back, or start a new run."
    )


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _accelerator(*, low_precision: bool) -> Accelerator:
    return Accelerator(mixed_precision="bf16" if low_precision else "no", cpu=_device().type == "cpu")


def _load(inputs: TrainingInputs) -> PreTrainedModel:
    model = load_model(inputs.recipe.model, seed=inputs.recipe.training.seed, trust_remote_code=inputs.trust_remote_code)
    if inputs.recipe.training.disable_dropout:
        disable_dropout(model)
    return model


def _load_weights(model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> None:
    """Put a checkpoint's tensors into the model; those of tied names are there once."""
    with torch.no_grad():
        own = model.state_dict()
        for name, tensor in tensors.items():
            own[name].copy_(tensor)


def _policy(inputs: TrainingInputs, model: PreTrainedModel, accelerator: Accelerator, low: torch.dtype | None) -> tuple[Policy, Recipe]:
    """The policy, and the recipe with every `auto` decided."""
    recipe, training, device = inputs.recipe, inputs.recipe.training, accelerator.device
    threads = auto.decide_threads(training)
    torch.set_num_threads(threads)
    policy = Policy(model, layout="plain", temperature=recipe.generation.temperature, head_chunk=None)
    probe = inputs.prompts[0].token_ids
    length = recipe.generation.max_completion_length or len(probe)
    policy.layout = auto.decide_layout(training, policy, prompt_ids=probe, completion_length=length)
    longest = int(inputs.prompts.lengths.max()) + inputs.batch.num_generations * length
    max_tokens = auto.decide_max_tokens(training, model, device, group_tokens=longest)
    policy.head_chunk = auto.decide_head_chunk(training, model.config.get_text_config().vocab_size, max_tokens)
    decided = {
        "bf16": low is not None,
        "threads": threads,
        "layout": policy.layout,
        "max_tokens_per_micro_batch": max_tokens,
        "head_chunk": policy.head_chunk,
    }
    return policy, auto.with_decisions(recipe, **decided)


def _collector(inputs: TrainingInputs, engine: Engine) -> Collector:
    return Collector(engine, inputs.rewards, inputs.tokenizer, max_steps=inputs.total_steps)


def _settings(inputs: TrainingInputs, model: PreTrainedModel) -> UpdateSettings:
    batch, training = inputs.batch, inputs.recipe.training
    assert isinstance(training.max_tokens_per_micro_batch, int)
    return UpdateSettings(
        slices=batch.steps_per_generation_batch,
        off_policy=batch.off_policy,
        max_tokens=training.max_tokens_per_micro_batch,
        max_rows=batch.max_micro_batch_rows,
        max_grad_norm=training.max_grad_norm,
        active_dropout=has_dropout(model),
        is_stale=training.async_steps > 0,
    )


def _recorder(inputs: TrainingInputs, offset: int, step: int) -> Recorder:
    run = inputs.recipe.run
    trackers = Trackers(
        run.report_to,
        folder=inputs.folder,
        run_name=run.run_name or inputs.folder.path.name,
        recipe=inputs.recipe.model_dump(mode="json"),
        start_step=step,
    )
    metrics = MetricsWriter(inputs.folder.metrics, offset=offset)
    return Recorder(
        folder=inputs.folder,
        metrics=metrics,
        progress=inputs.progress,
        trackers=trackers,
        names=inputs.rewards.names,
        logging_steps=run.logging_steps,
    )


__all__ = ["evaluate_model", "train"]
