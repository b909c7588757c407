"""Rules between fields. Each reads a complete recipe; `load.py` skips those that read a field which is already wrong.

A finding is an error, or a notice: something that works, and that its author may not expect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rloo_cli.recipe.accelerate_keys import StrategyName
from rloo_cli.recipe.batch import batch_faults, plan_batches
from rloo_cli.recipe.fields import LEAVES
from rloo_cli.recipe.schema import Recipe


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule found, and the field whose place is shown."""

    field: str
    message: str
    is_notice: bool = False


@dataclass(frozen=True, slots=True)
class Context:
    """What rules may read."""

    recipe: Recipe
    num_processes: int
    given: frozenset[str]
    """Dotted fields that the recipe's author wrote; a field at the top level also by its bare name."""
    strategy: StrategyName = "ddp"
    """How the model lies over the processes, whoever says so."""

    def is_changed(self, field: str) -> bool:
        """Whether the author wrote the field, and something other than its default (a resolved recipe writes everything out)."""
        section, _, name = field.partition(".")
        default = LEAVES[name].info.get_default(call_default_factory=True)
        return field in self.given and getattr(getattr(self.recipe, section), name) != default

    def first_changed(self, fields: tuple[str, ...]) -> str:
        """The first of the fields that the author changed, else the first."""
        return next((name for name in fields if self.is_changed(name)), fields[0])


@dataclass(frozen=True, slots=True)
class Rule:
    """A check and the fields that it reads."""

    reads: frozenset[str]
    check: Callable[[Context], Iterator[Finding]]


RULES: list[Rule] = []


def _rule(*reads: str) -> Callable[[Callable[[Context], Iterator[Finding]]], Callable[[Context], Iterator[Finding]]]:
    def register(check: Callable[[Context], Iterator[Finding]]) -> Callable[[Context], Iterator[Finding]]:
        RULES.append(Rule(frozenset(reads), check))
        return check

    return register


_BATCH_FIELDS = (
    "generation.num_generations",
    "training.prompts_per_step",
    "training.per_device_train_batch_size",
    "training.gradient_accumulation_steps",
    "training.steps_per_generation",
    "training.generation_batch_size",
)


@_rule(*_BATCH_FIELDS)
def _batch(context: Context) -> Iterator[Finding]:
    for fault in batch_faults(context.recipe, context.num_processes):
        yield Finding(context.first_changed(fault.fields), fault.message)


@_rule(*_BATCH_FIELDS, "algorithm.beta")
def _cut_groups(context: Context) -> Iterator[Finding]:
    rows, group = context.recipe.training.per_device_train_batch_size, context.recipe.generation.num_generations
    if rows is not None and rows < group and context.recipe.algorithm.beta > 0 and not batch_faults(context.recipe, context.num_processes):
        yield Finding(
            "training.per_device_train_batch_size",
            f"{rows} rows a micro-batch cut each group of {group}; with beta above 0 that costs one more scoring pass a step.",
            is_notice=True,
        )


@_rule(*_BATCH_FIELDS, "algorithm.num_iterations", "algorithm.epsilon", "algorithm.epsilon_high", "training.async_steps")
def _clip_range(context: Context) -> Iterator[Finding]:
    algorithm = context.recipe.algorithm
    if context.recipe.training.async_steps:  # told with the overlap
        return
    if not batch_faults(context.recipe, context.num_processes) and not plan_batches(context.recipe, context.num_processes).off_policy:
        for name in ("algorithm.epsilon", "algorithm.epsilon_high"):
            if context.is_changed(name):
                yield Finding(name, "not read: every generation batch serves one optimizer step, so nothing is clipped.", is_notice=True)
    if algorithm.epsilon_high is not None and algorithm.epsilon_high < algorithm.epsilon:
        low, high = 1 - algorithm.epsilon, 1 + algorithm.epsilon_high
        yield Finding("algorithm.epsilon_high", f"the ratio is clipped to [{low:g}, {high:g}]: less room above than below.", is_notice=True)


@_rule("algorithm.reward_clip_range")
def _reward_clip_range(context: Context) -> Iterator[Finding]:
    bounds = context.recipe.algorithm.reward_clip_range
    if bounds is None or bounds[0] < bounds[1]:
        return
    low, high = bounds
    if low > high:
        yield Finding("algorithm.reward_clip_range", f"inverted: write [{high:g}, {low:g}].")
    else:
        yield Finding("algorithm.reward_clip_range", f"low and high are both {low:g}: every reward would be the same.")


@_rule("algorithm.importance_sampling_correction", "algorithm.importance_sampling_cap", "training.async_steps")
def _sampling_cap(context: Context) -> Iterator[Finding]:
    is_read = context.recipe.algorithm.importance_sampling_correction != "none" or context.recipe.training.async_steps
    if context.is_changed("algorithm.importance_sampling_cap") and not is_read:
        yield Finding("algorithm.importance_sampling_cap", "not read: importance_sampling_correction is none.", is_notice=True)


@_rule(
    "algorithm.sync_ref_model",
    "algorithm.ref_model_mixup_alpha",
    "algorithm.ref_model_sync_steps",
    "algorithm.beta",
    "model.use_peft",
    "run.accelerate_config",
)
def _moving_reference(context: Context) -> Iterator[Finding]:
    field, recipe = "algorithm.sync_ref_model", context.recipe
    if not recipe.algorithm.sync_ref_model:
        for name in ("algorithm.ref_model_mixup_alpha", "algorithm.ref_model_sync_steps"):
            if context.is_changed(name):
                yield Finding(name, "not read: sync_ref_model is false.", is_notice=True)
    elif recipe.algorithm.beta == 0:
        yield Finding(field, "with beta 0 there is no reference model that could follow; write `beta: 0.05`, or remove sync_ref_model.")
    elif recipe.model.use_peft:
        yield Finding(field, "with use_peft the reference is the model without its adapter, which nothing moves; remove one of the two.")
    elif context.strategy != "ddp":
        yield Finding(
            field,
            f"only a reference that each process has whole can follow, and {context.strategy} lays it out otherwise: write "
            "`accelerate_config: ddp`, or remove sync_ref_model.",
        )


@_rule("algorithm.router_aux_loss_coef", "run.accelerate_config")
def _router_loss(context: Context) -> Iterator[Finding]:
    if context.recipe.algorithm.router_aux_loss_coef > 0 and context.strategy != "ddp":
        yield Finding(
            "algorithm.router_aux_loss_coef",
            f"the routers' gradient is not taken apart from their layer's, as {context.strategy} would need: write `accelerate_config: ddp`, or 0.",
        )


@_rule("algorithm.dynamic_sampling", "algorithm.dynamic_sampling_max_batches")
def _dynamic_sampling(context: Context) -> Iterator[Finding]:
    mode = context.recipe.algorithm.dynamic_sampling
    if mode != "resample" and context.is_changed("algorithm.dynamic_sampling_max_batches"):
        yield Finding("algorithm.dynamic_sampling_max_batches", f"not read: dynamic_sampling is {mode}.", is_notice=True)


@_rule("data.dataset_name", "data.datasets", "data.max_train_samples")
def _sets(context: Context) -> Iterator[Finding]:
    data = context.recipe.data
    if data.datasets and data.dataset_name is not None:
        yield Finding("data.datasets", "`dataset_name` is given as well; write it as an entry `- path:`, or leave one of them out.")
    if not data.datasets:
        return
    for name in ("dataset_config", "dataset_train_split"):
        if context.is_changed(f"data.{name}"):
            yield Finding(f"data.{name}", "not of a mixture: each entry of `datasets` has its own `name` and `split`.")
    for name in ("weight", "fraction"):
        lacking = [i for i, entry in enumerate(data.datasets) if getattr(entry, name) is None]
        if 0 < len(lacking) < len(data.datasets):
            yield Finding(f"data.datasets[{lacking[0]}]", f"has no `{name}`, and another set has one; give it to all sets or to none.")
    if any(entry.weight is not None for entry in data.datasets) and any(entry.fraction is not None for entry in data.datasets):
        yield Finding("data.datasets", "`weight` and `fraction` are two ways to mix; keep one of them.")
    for i, entry in enumerate(data.datasets):
        column = entry.prompt_column or data.prompt_column
        if entry.columns is not None and column not in entry.columns:
            yield Finding(f"data.datasets[{i}].columns", f"the prompts' column `{column}` is not among them.")


@_rule(
    "data.dataset_streaming",
    "data.shuffle_buffer_size",
    "data.datasets",
    "training.max_steps",
    "evaluation.eval_strategy",
    "run.save_strategy",
)
def _streaming(context: Context) -> Iterator[Finding]:
    recipe = context.recipe
    if not recipe.data.dataset_streaming:
        if context.is_changed("data.shuffle_buffer_size"):
            yield Finding(
                "data.shuffle_buffer_size", "not read: dataset_streaming is false, and all prompts are shuffled together.", is_notice=True
            )
        return
    if recipe.training.max_steps < 0:
        yield Finding(
            "training.max_steps", "a stream's prompts are not counted beforehand: write how many steps, such as `max_steps: 1000`."
        )
    for field, value in (("evaluation.eval_strategy", recipe.evaluation.eval_strategy), ("run.save_strategy", recipe.run.save_strategy)):
        if value == "epoch":
            yield Finding(field, "a stream's prompts are not counted beforehand, so nobody knows when an epoch ends: write `steps`.")
    if any(entry.fraction is not None for entry in recipe.data.datasets):
        yield Finding("data.datasets", "a `fraction` needs the number of rows, which a stream does not know: write `weight`.")


@_rule("evaluation.eval_strategy", "evaluation.eval_on_start", "data.dataset_test_split", "data.datasets")
def _evaluation_split(context: Context) -> Iterator[Finding]:
    evaluation = context.recipe.evaluation
    if context.recipe.data.has_test_split or not (evaluation.eval_on_start or evaluation.eval_strategy != "no"):
        return
    by_strategy = evaluation.eval_strategy != "no"
    asks = f"eval_strategy: {evaluation.eval_strategy}" if by_strategy else "eval_on_start: true"
    yield Finding(
        "evaluation.eval_strategy" if by_strategy else "evaluation.eval_on_start",
        f"`{asks}` needs a split to evaluate on: write `dataset_test_split: test` (or its name) below `data:`.",
    )


@_rule("evaluation.num_generations_eval", "evaluation.eval_temperature")
def _sampled_evaluation(context: Context) -> Iterator[Finding]:
    evaluation = context.recipe.evaluation
    if evaluation.num_generations_eval > 1 and evaluation.eval_temperature == 0:
        yield Finding(
            "evaluation.num_generations_eval",
            f"{evaluation.num_generations_eval} greedy completions of a prompt are the same one: write `eval_temperature: 1.0` as well.",
        )


@_rule("evaluation.eval_strategy", "evaluation.eval_steps")
def _eval_steps(context: Context) -> Iterator[Finding]:
    evaluation = context.recipe.evaluation
    if evaluation.eval_steps is not None and evaluation.eval_strategy != "steps":
        yield Finding("evaluation.eval_steps", f"not read: eval_strategy is {evaluation.eval_strategy}.", is_notice=True)


@_rule("run.save_strategy", "run.save_steps", "run.save_total_limit", "training.max_steps")
def _saving(context: Context) -> Iterator[Finding]:
    run, max_steps = context.recipe.run, context.recipe.training.max_steps
    if run.save_strategy != "steps" and context.is_changed("run.save_steps"):
        yield Finding("run.save_steps", f"not read: save_strategy is {run.save_strategy}.", is_notice=True)
    if run.save_strategy == "no" and run.save_total_limit is not None:
        yield Finding("run.save_total_limit", "not read: save_strategy is no.", is_notice=True)
    if run.save_strategy == "steps" and context.is_changed("run.save_steps") and 0 < max_steps < run.save_steps:
        yield Finding("run.save_steps", f"{run.save_steps} is beyond max_steps {max_steps}: no checkpoint before the end.", is_notice=True)


@_rule(
    "run.metric_for_best_model",
    "run.greater_is_better",
    "run.save_strategy",
    "run.save_steps",
    "run.logging_steps",
    "evaluation.eval_strategy",
    "evaluation.eval_steps",
)
def _best_checkpoint(context: Context) -> Iterator[Finding]:
    run, evaluation = context.recipe.run, context.recipe.evaluation
    if run.metric_for_best_model is None:
        if run.greater_is_better is not None:
            yield Finding("run.greater_is_better", "not read: metric_for_best_model is not given.", is_notice=True)
        return
    every = evaluation.eval_steps or run.logging_steps
    if evaluation.eval_strategy == "no":
        yield Finding(
            "run.metric_for_best_model", "the best is told by evaluations: write `eval_strategy: steps` and a `dataset_test_split`."
        )
    elif run.save_strategy == "no":
        yield Finding("run.metric_for_best_model", "there are no checkpoints to choose among: save_strategy is no.")
    elif run.save_strategy != evaluation.eval_strategy:
        yield Finding(
            "run.metric_for_best_model",
            f"a checkpoint is judged by the evaluation of its own step: write save_strategy {run.save_strategy} and eval_strategy "
            f"{evaluation.eval_strategy} alike.",
        )
    elif run.save_strategy == "steps" and run.save_steps % every:
        yield Finding(
            "run.metric_for_best_model",
            f"a checkpoint is judged by the evaluation of its own step, and save_steps {run.save_steps} is no multiple of the {every} steps "
            f"between evaluations: write `eval_steps: {run.save_steps}`, or another that divides it.",
        )


@_rule("training.max_steps", "training.num_train_epochs", "training.warmup_steps")
def _steps(context: Context) -> Iterator[Finding]:
    training = context.recipe.training
    if training.max_steps == 0:
        yield Finding("training.max_steps", "0 steps train nothing; -1 = as many as num_train_epochs needs.")
    if training.max_steps > 0 and context.is_changed("training.num_train_epochs"):
        yield Finding("training.num_train_epochs", f"not read: max_steps {training.max_steps} decides.", is_notice=True)
    if training.warmup_steps >= 1 and not float(training.warmup_steps).is_integer():
        yield Finding("training.warmup_steps", f"{training.warmup_steps:g}: a whole number of steps, or a share of all steps below 1.")
    if 0 < training.max_steps < training.warmup_steps:
        yield Finding(
            "training.warmup_steps",
            f"{training.warmup_steps:g} is beyond max_steps {training.max_steps}: learning_rate is never reached.",
            is_notice=True,
        )


_SCHEDULE_ARGUMENTS: dict[str, frozenset[str]] = {
    "cosine": frozenset({"num_cycles"}),
    "cosine_with_restarts": frozenset({"num_cycles"}),
    "polynomial": frozenset({"lr_end", "power"}),
    "inverse_sqrt": frozenset({"timescale"}),
    "cosine_with_min_lr": frozenset({"num_cycles", "min_lr", "min_lr_rate"}),
    "warmup_stable_decay": frozenset({"num_decay_steps", "num_stable_steps", "warmup_type", "decay_type", "min_lr_ratio", "num_cycles"}),
}
_SCHEDULE_NEEDS = {"cosine_with_min_lr": ("min_lr", "min_lr_rate"), "warmup_stable_decay": ("num_decay_steps",)}


@_rule("training.lr_scheduler_type", "training.lr_scheduler_kwargs", "training.warmup_steps")
def _schedule(context: Context) -> Iterator[Finding]:
    training = context.recipe.training
    kind, arguments = training.lr_scheduler_type, training.lr_scheduler_kwargs
    takes = _SCHEDULE_ARGUMENTS.get(kind, frozenset())
    for name in arguments:
        if name not in takes:
            offers = f"it takes {', '.join(sorted(takes))}" if takes else "it takes none"
            yield Finding(f"training.lr_scheduler_kwargs.{name}", f"no argument of the schedule `{kind}`; {offers}.")
    needs = _SCHEDULE_NEEDS.get(kind, ())
    if needs and not any(name in arguments for name in needs):
        yield Finding(
            "training.lr_scheduler_type", f"`{kind}` needs lr_scheduler_kwargs: {{{needs[-1]}: …}}{' (or min_lr)' * (len(needs) > 1)}."
        )
    if kind == "constant" and training.warmup_steps > 0:
        yield Finding("training.warmup_steps", "not read: `constant` has no warm-up; `constant_with_warmup` has one.", is_notice=True)


BFLOAT16_SAFE_RATE = 1e-5
"""Below it most updates are smaller than half of a bfloat16 weight's last bit and are lost."""


@_rule("training.optim", "run.accelerate_config")
def _parts_suffice(context: Context) -> Iterator[Finding]:
    if context.recipe.training.optim == "adafactor" and context.strategy != "ddp":
        yield Finding(
            "training.optim",
            f"adafactor looks at whole matrices, of which a process has a part only under {context.strategy}: write `optim: adamw_torch`, or "
            "`accelerate_config: ddp`.",
        )


@_rule("model.dtype", "training.learning_rate", "model.use_peft", "model.lora_modules_to_save")
def _small_updates(context: Context) -> Iterator[Finding]:
    rate, model = context.recipe.training.learning_rate, context.recipe.model
    if model.use_peft and not model.lora_modules_to_save:  # an adapter is float32 in any case
        return
    if model.dtype == "bfloat16" and 0 < rate < BFLOAT16_SAFE_RATE:
        yield Finding(
            "model.dtype",
            f"bfloat16 weights have no master copy: at learning_rate {rate:g} most updates round to nothing. float32 keeps them.",
            is_notice=True,
        )


@_rule("training.cast_lm_head_to_fp32", "training.bf16", "model.dtype")
def _wide_head(context: Context) -> Iterator[Finding]:
    training, dtype = context.recipe.training, context.recipe.model.dtype
    if training.cast_lm_head_to_fp32 and not training.bf16 and dtype == "float32":
        yield Finding("training.cast_lm_head_to_fp32", "not read: with bf16 false all is computed in float32.", is_notice=True)


@_rule("model.attn_implementation", "training.layout")
def _attention(context: Context) -> Iterator[Finding]:
    if context.recipe.model.attn_implementation is not None and context.recipe.training.layout == "packed":
        yield Finding("model.attn_implementation", "not read: `layout: packed` has an attention of its own.", is_notice=True)


@_rule("data.max_prompt_length", "data.overlong_prompts")
def _prompts_are_never_cut(context: Context) -> Iterator[Finding]:
    if {"max_prompt_length", "data.overlong_prompts"} & context.given == {"max_prompt_length"} and context.recipe.data.max_prompt_length:
        yield Finding(
            "data.max_prompt_length",
            "older trainers cut longer prompts; here they are an error, or with `overlong_prompts: drop` left out and counted.",
            is_notice=True,
        )


@_rule("generation.stop")
def _stop_strings(context: Context) -> Iterator[Finding]:
    for i, text in enumerate(context.recipe.generation.stop):
        if not text:
            yield Finding(f"generation.stop[{i}]", "an empty stop string would end every completion at once.")


# --- rewards ---------------------------------------------------------------------------------------------------------------------
