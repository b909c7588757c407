"""`train` and `evaluate_model`: the collaborators put together, then the loop."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from rloo_cli.errors import RefusedError
from rloo_cli.recipe.dump import dump_recipe
from rloo_cli.recipe.schema import AlgorithmSection, Recipe
from rloo_cli.rollout.engine import Engine
from rloo_cli.run.atomic import write_file
from rloo_cli.run.checkpoint import set_aside_newer
from rloo_cli.run.metrics import MetricsWriter
from rloo_cli.run.randomness import restore_random_state, seed_everything
from rloo_cli.run.ranks import Ranks
from rloo_cli.run.shards import SavedTensors
from rloo_cli.run.trackers import Trackers
from rloo_cli.training import auto
from rloo_cli.training.adapter import new_adapter_names, plain_tensors
from rloo_cli.training.collector import Collector
from rloo_cli.training.engines import give_weights
from rloo_cli.training.evaluation import evaluate
from rloo_cli.training.experience import Experience
from rloo_cli.training.fingerprint import fingerprint
from rloo_cli.training.inputs import TrainingInputs
from rloo_cli.training.loop import run_loop
from rloo_cli.training.moving_reference import MovingReference
from rloo_cli.training.optimizer import build_optimizer
from rloo_cli.training.policy import Policy, Scorer, has_dropout
from rloo_cli.training.recorder import Recorder
from rloo_cli.training.setup import decide, load, load_shared, make_policy, prepare_device
from rloo_cli.training.state import RunPosition, load_position, with_images
from rloo_cli.training.strategy import Strategy
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
    with ExitStack() as stack:
        with inputs.progress.phase("load model"), inputs.stop.at_once():
            run = assemble(inputs, stack)
            stack.callback(run.close)
        run_loop(run)


def evaluate_model(inputs: TrainingInputs) -> tuple[Experience, dict[str, float]]:
    """The completions and `eval/…` metrics of the recipe's model, or of the checkpoint to resume from; writes nothing."""
    assert inputs.eval_prompts is not None
    with ExitStack() as stack:
        device = prepare_device(inputs, stack)
        inputs.rewards.load_models()
        model, step = load(inputs), 0
        if (checkpoint := inputs.resume_from) is not None:
            _load_weights(model, checkpoint.saved_tensors("model"))
            step = checkpoint.step
        torch.set_num_threads(auto.decide_threads(inputs.recipe.training))
        engine = device.maker.make(model.to(device.accelerator.device))
        with inputs.progress.phase("evaluate"):
            give_weights(engine, plain_tensors(model), step, device.ranks)
            collector = _collector(inputs, engine, device.ranks)
            return evaluate(collector, inputs.eval_prompts, inputs.recipe, inputs.rewards.names, step, inputs.stop.check)


def assemble(inputs: TrainingInputs, stack: ExitStack) -> TrainingRun:
    """The run with all its collaborators, before its first step or at the checkpoint's; what is open goes with the stack."""
    seed_everything(inputs.recipe.training.seed, "start")
    device = prepare_device(inputs, stack)
    accelerator, low = device.accelerator, device.low_precision
    inputs.rewards.load_models()
    model = load_shared(inputs, device)
    # It reads the whole model: once is enough.
    origin = device.ranks.broadcast(fingerprint(model, leave_out=new_adapter_names(model)) if device.ranks.is_main else "")
    _refuse_other_model(inputs, origin)
    strategy = device.strategy
    strategy.distribute(
        make_policy(inputs, model),
        lambda policy: build_optimizer(policy, inputs.recipe.training, total_steps=inputs.total_steps, accelerator=accelerator),
    )
    recipe = decide(inputs, strategy.policy, device)
    inputs = replace(inputs, recipe=recipe)
    inputs.progress.note(auto.decisions_told(recipe, accelerator.device))
    if device.ranks.is_main:
        write_file(inputs.folder.recipe, dump_recipe(recipe))
    algorithm = recipe.algorithm
    reference = strategy.make_reference(low_precision=None if algorithm.sync_ref_model else low) if algorithm.beta > 0 else None
    moving = _moving(strategy, reference, algorithm) if algorithm.sync_ref_model else None
    if recipe.training.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    position, offset = device.ranks.together(lambda: _take_up(inputs, strategy, recipe, device.ranks, moving))
    engine = device.maker.make(strategy.decoding_model())
    give_weights(engine, strategy.named_tensors(), position.step, device.ranks)
    updater = Updater(
        accelerator=accelerator,
        reference=reference,
        moving=moving,
        algorithm=algorithm,
        settings=_settings(inputs, model),
        strategy=strategy,
        ranks=device.ranks,
        stop=inputs.stop,
    )
    return TrainingRun(
        inputs,
        collector=_collector(inputs, engine, device.generating_ranks),
        engine=engine,
        updater=updater,
        recorder=_recorder(inputs, offset, position.step) if device.ranks.is_main else None,
        position=position,
        ranks=device.ranks,
        model_fingerprint=origin,
    )


def _refuse_other_model(inputs: TrainingInputs, origin: str) -> None:
    """Raise RefusedError where the model to start from is not the one that the checkpoint's run began with; it is the reference."""
    checkpoint = inputs.resume_from
    if checkpoint is None:
        return
    if checkpoint.origin().get("base_model") in (None, origin):
        return
    raise RefusedError(
        f"{inputs.recipe.model.model_name_or_path} is not the model that {checkpoint.path} was trained from: its weights or its "
        "configuration have changed. Bring it back, or start a new run."
    )


def _moving(strategy: Strategy, reference: Scorer | None, algorithm: AlgorithmSection) -> MovingReference:
    assert isinstance(reference, Policy)  # the recipe's rules refuse it with adapters
    return MovingReference(reference, strategy.policy, alpha=algorithm.ref_model_mixup_alpha, every=algorithm.ref_model_sync_steps)


def _take_up(
    inputs: TrainingInputs, strategy: Strategy, recipe: Recipe, ranks: Ranks, moving: MovingReference | None
) -> tuple[RunPosition, int]:
    """(the position, bytes of metrics.jsonl) to go on from, with the state of that position in place."""
    position, offset = RunPosition(), 0
    if (checkpoint := inputs.resume_from) is not None:
        position = with_images(load_position(checkpoint, [entry.weight for entry in recipe.rewards]), inputs.prompts)
        with checkpoint.understood("metrics"):
            offset = int(checkpoint.load_document("metrics")["offset"])
        with checkpoint.understood("optimizer"):
            strategy.load_state(checkpoint.saved_state())
        if moving is not None:
            moving.load(checkpoint)
        with checkpoint.understood("random"):
            restore_random_state(checkpoint.load_document("random"), checkpoint.load_tensors("random"))
    if ranks.is_main:
        set_aside_newer(inputs.folder.checkpoints, position.step)
    return position, offset


def _load_weights(model: PreTrainedModel, saved: SavedTensors) -> None:
    """Put a checkpoint's tensors into the model; those of tied names are there once."""
    with torch.no_grad():
        own = model.state_dict()
        for name in saved.names:
            own[name].copy_(saved.whole(name))


def _collector(inputs: TrainingInputs, engine: Engine, ranks: Ranks) -> Collector:
    return Collector(engine, inputs.rewards, inputs.tokenizer, max_steps=inputs.total_steps, ranks=ranks)


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


__all__ = ["assemble", "evaluate_model", "train"]
