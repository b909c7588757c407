"""Everything that is known before training, found in the order of its price. `plan` and `train` both go through here.

check_recipe      the recipe and its reward functions, read, not run; no torch
prepare           reward workers, tokenizer, prompts, lengths and columns; torch is imported on the way, after the workers started
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rloo_cli.errors import DataError, RecipeError
from rloo_cli.plan.extras import check_deepspeed, check_peft, check_server_key, check_vllm
from rloo_cli.plan.shipped import find_recipe, why_missing
from rloo_cli.plan.vision import check_engine_of_images, check_vision
from rloo_cli.recipe.batch import total_steps
from rloo_cli.recipe.load import LoadedRecipe, load_recipe
from rloo_cli.recipe.reward_rules import reward_name
from rloo_cli.recipe.schema import DataSection, ModelSection, Recipe, RewardEntry
from rloo_cli.rewards.models import OpenModel, RewardModel, check_entry, find_entry
from rloo_cli.rewards.resolve import RewardSource
from rloo_cli.run.environment import usable_cores
from rloo_cli.run.metrics import evaluation_key, evaluation_keys
from rloo_cli.run.trackers import check_trackers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rloo_cli.data.mixture import Mixture
    from rloo_cli.data.prompt_set import PromptSet
    from rloo_cli.data.prompt_source import PromptSource
    from rloo_cli.rewards.runner import RewardRunner

FIELD_AT_START = re.compile(r"([a-z]+(?:\[\d+\])?(?:\.[a-z_0-9]+(?:\[\d+\])?)+): ")
MOST_AUTO_WORKERS = 2
"""Reward workers beyond this number are asked for by name: most rewards cost less than a process."""
UNLIMITED = 1 << 30
"""Prompt tokens where neither recipe nor model names a limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRecipe:
    """A valid recipe whose reward functions exist."""

    loaded: LoadedRecipe
    code_dir: Path
    """Where reward functions are imported from, beside what is installed."""
    sources: tuple[RewardSource, ...]
    """One for each entry of `rewards`, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What training starts from."""

    checked: CheckedRecipe
    recipe: Recipe
    """As loaded; on resume, the run's own."""
    rewards: RewardRunner
    """Its workers run; whoever holds this closes it."""
    tokenizer: PreTrainedTokenizerBase
    prompts: PromptSource
    eval_prompts: PromptSet | Mixture | None
    context: int | None
    """Positions that the model was built for; None where its configuration does not say."""
    max_prompt_tokens: int
    total_steps: int
    processor_files: tuple[Path, ...]
    """Of a vision-language model: what it has beside its tokenizer."""
    notices: tuple[str, ...]
    """What was noticed in the data, a line each."""


def check_recipe(
    path: str | Path,
    *,
    text: str | None = None,
    overrides: Sequence[str] = (),
    code_dir: str | Path | None = None,
    num_processes: int | None = None,
    num_machines: int | None = None,
    is_training: bool = False,
) -> CheckedRecipe:
    """The recipe, valid by itself, with every reward function located. Imports no torch and runs no code of the recipe's.

    Args:
        path: the recipe's file, or the name of a shipped one.
        text: a recipe that stands in no file; `path` is then what errors call it, in a folder that is there.
        overrides: texts of `--set`.
        code_dir: where reward functions are imported from; None = the recipe's folder.
        num_processes: that a launcher has started; None = as the recipe says.
        num_machines: as the command line or the batch system says; None = as the recipe's `accelerate_config` says.
        is_training: whether the recipe is to be trained, and how the model lies over processes matters.

    Raises:
        RecipeError: a line for each fault, with its place.
    """
    file = find_recipe(path) if text is None else Path(path)
    if text is None and (why := why_missing(file)):
        raise RecipeError(why)
    folder = Path(code_dir) if code_dir is not None else file.parent
    if not folder.is_dir():
        raise RecipeError(f"--code-dir {folder}: no such folder" if code_dir is not None else f"{file}: no such file.")
    sources: list[RewardSource] = []

    def check_reward(entry: RewardEntry) -> None:
        source = find_entry(entry, code_dir=folder)
        check_entry(entry, source, columns=None)
        sources.append(source)

    loaded = load_recipe(
        file,
        text=text,
        overrides=overrides,
        num_processes=num_processes,
        num_machines=num_machines,
        is_training=is_training,
        check_reward=check_reward,
    )
    _check_best_metric(loaded)
    return CheckedRecipe(loaded=loaded, code_dir=folder, sources=tuple(sources))


def _check_best_metric(loaded: LoadedRecipe) -> None:
    recipe, field = loaded.recipe, "run.metric_for_best_model"
    wanted = recipe.run.metric_for_best_model
    keys = evaluation_keys([reward_name(entry) for entry in recipe.rewards], recipe.evaluation.num_generations_eval)
    if wanted is None or evaluation_key(wanted) in keys or evaluation_key(wanted).startswith("eval/custom/"):
        return
    there = ", ".join(key.removeprefix("eval/") for key in keys)
    raise RecipeError(f"{loaded.locate(field)}: {field}: no evaluation reports `{wanted}`; there are {there}, custom/<what a reward logs>.")


def prepare(
    checked: CheckedRecipe,
    rewards: RewardRunner,
    *,
    trust_remote_code: bool = False,
    evaluates: bool | None = None,
    needs_weights: bool = True,
) -> Prepared:
    """Tokenizer, prompts and steps, with the reward functions imported in their workers and their data looked at.

    Args:
        checked: the recipe.
        rewards: not started yet, so that its workers are forked before torch is imported here.
        trust_remote_code: from the command line.
        evaluates: whether the evaluation split is wanted; None = where the recipe evaluates during training.
        needs_weights: whether a model without any weights is refused; else it is a notice.

    Raises:
        RecipeError: the tokenizer, the data set or a reward function cannot be loaded.
        DataError: rows that cannot be used.
    """
    check_trackers(checked.loaded.recipe.run.report_to)
    check_vllm(checked.loaded.recipe)
    check_peft(checked.loaded.recipe)
    check_deepspeed(checked.loaded.distribution)
    check_server_key(checked.loaded.recipe)
    rewards.start(open_model=model_opener(checked.loaded.recipe.data, trust_remote_code=trust_remote_code))
    import transformers  # noqa: F401 - so that it can be told to be quiet

    from rloo_cli.data.chat import load_tokenizer
    from rloo_cli.data.processor import visual_processor
    from rloo_cli.data.prompt_loading import Reader, load_evaluation_prompts, load_training_prompts
    from rloo_cli.plan.context import context_length, load_config, vocabulary_size
    from rloo_cli.run.logs import quiet_libraries

    quiet_libraries()
    recipe, batch = checked.loaded.recipe, checked.loaded.batch
    tokenizer = load_tokenizer(recipe.model, trust_remote_code=trust_remote_code)
    weights = tuple(_weights_told(recipe.model, needs_weights=needs_weights))
    config = load_config(recipe.model, trust_remote_code=trust_remote_code)
    context = context_length(config)
    limit = max_prompt_tokens(recipe, context)
    visual = visual_processor(recipe.model, config, tokenizer, trust_remote_code=trust_remote_code)
    if visual is not None:
        check_vision(recipe, checked.loaded.distribution.strategy)

    reader = Reader(tokenizer=tokenizer, max_prompt_tokens=limit, is_bounded=limit < UNLIMITED, visual=visual)
    prompts = load_training_prompts(recipe.data, reader)
    check_engine_of_images(recipe, prompts)
    _check_columns(checked, prompts)
    _check_vocabulary(recipe, prompts, vocabulary_size(config))
    notices = check_reward_rows(rewards, prompts)
    eval_prompts = None
    if evaluates is None:
        evaluates = recipe.evaluation.eval_strategy != "no" or recipe.evaluation.eval_on_start
    if evaluates and recipe.data.has_test_split:
        eval_prompts = load_evaluation_prompts(recipe.data, reader, limit=recipe.evaluation.max_eval_samples)
    check_vllm_length(recipe, max(found.longest for found in (prompts, eval_prompts) if found is not None))
    return Prepared(
        checked=checked,
        recipe=recipe,
        rewards=rewards,
        tokenizer=tokenizer,
        prompts=prompts,
        eval_prompts=eval_prompts,
        context=context,
        max_prompt_tokens=limit,
        total_steps=total_steps(recipe, batch, prompts.size),
        processor_files=visual.files() if visual is not None else (),
        notices=(*weights, *_repeats_told(prompts), *notices),
    )


def max_prompt_tokens(recipe: Recipe, context: int | None) -> int:
    """The longest prompt that the recipe and the model's context leave room for.

    Raises:
        RecipeError: completions alone fill the context.
    """
    asked, completion = recipe.data.max_prompt_length, recipe.generation.max_completion_length
    if context is None:
        return asked or UNLIMITED
    room = context - (completion or 1)
    if room < 1:
        raise RecipeError(
            f"generation.max_completion_length: {completion} leaves no room for a prompt: the context of "
            f"{recipe.model.model_name_or_path} has {context} tokens."
        )
    return min(asked, room) if asked is not None else room


def check_vllm_length(recipe: Recipe, longest_prompt: int) -> None:
    """Raise RecipeError where vLLM in this process is given less room, in tokens, than the longest prompt with its completion needs."""
    generation = recipe.generation
    given, needed = generation.vllm_max_model_length, longest_prompt + (generation.max_completion_length or 1)
    if generation.use_vllm and generation.vllm_mode == "colocate" and given is not None and given < needed:
        raise RecipeError(
            f"generation.vllm_max_model_length: {given} is too small: the longest prompt has {longest_prompt:,} tokens, and with its "
            f"completion {needed} are needed; say that or more, or leave the field out."
        )


def _check_vocabulary(recipe: Recipe, prompts: PromptSource, size: int | None) -> None:
    """Raise RecipeError for prompts with tokens that the model has no embedding of."""
    largest = max(part.head.largest_token for part in prompts.parts())
    if size is not None and largest >= size:
        raise RecipeError(
            f"model.model_name_or_path: the tokenizer of {recipe.model.model_name_or_path} gives token id {largest:,}, and the "
            f"model has {size:,} tokens: they do not belong together."
        )


def _check_columns(checked: CheckedRecipe, prompts: PromptSource) -> None:
    faults = []
    for i, (entry, source) in enumerate(zip(checked.loaded.recipe.rewards, checked.sources, strict=True)):
        try:
            check_entry(entry, source, columns=prompts.columns)
        except RecipeError as error:
            faults.append(_placed(checked.loaded, i, error))
    if faults:
        raise RecipeError("\n".join(faults))


def check_reward_rows(rewards: RewardRunner, prompts: PromptSource) -> tuple[str, ...]:
    """What the reward functions' own checks notice in the rows; those of a stream are shown to them as they arrive.

    A set of a mixture that lacks columns which others have may be refused by a function that needs them: that is a notice.

    Raises:
        DataError: a function refuses the data.
    """
    from rloo_cli.data.mixture import columns_of
    from rloo_cli.data.streamed_prompts import StreamedPrompts

    notices: list[str] = []
    for part in prompts.parts():
        lacks = [name for name in prompts.columns if name not in part.head.columns]
        try:
            notices += rewards.check_rows(columns_of(part, prompts.columns))
        except DataError as error:
            if not lacks:
                raise
            notices.append(f"{part.source} (without {', '.join(lacks)}): {error.message}")
        if isinstance(part, StreamedPrompts) and not lacks:
            part.check_rows = rewards.check_rows
    return tuple(notices)


def _repeats_told(prompts: PromptSource) -> Iterator[str]:
    """For each set in memory that holds a prompt more than once."""
    from rloo_cli.data.prompt_set import PromptSet

    for part in prompts.parts():
        count, pair = part.repeats() if isinstance(part, PromptSet) else (0, None)
        if pair is not None:
            yield (
                f"{part.source}: {count:,} of {len(part):,} prompts repeat an earlier one ({part.place(pair[1])} that of "
                f"{part.place(pair[0])}); each row is trained on."
            )


def _weights_told(model: ModelSection, *, needs_weights: bool) -> Iterator[str]:
    from rloo_cli.data.adapter_folder import base_of
    from rloo_cli.data.model_folder import check_weights

    base = base_of(model)
    try:
        check_weights(base)
    except RecipeError as error:
        if needs_weights or any(Path(base.model_name_or_path).expanduser().glob("*.safetensors")):
            raise
        yield error.message


def _placed(loaded: LoadedRecipe, index: int, error: RecipeError) -> str:
    field = f"rewards[{index}].function"
    return f"{loaded.locate(field)}: {field}: {error.message}"


def model_opener(data: DataSection, *, trust_remote_code: bool) -> OpenModel:
    """What opens the recipe's reward models, once torch may be imported."""

    def open_model(entry: RewardEntry, name: str, field: str) -> RewardModel:
        import transformers  # noqa: F401 - so that it can be told to be quiet

        from rloo_cli.run.logs import quiet_libraries
        from rloo_cli.training.reward_models import open_reward_model

        quiet_libraries()
        return open_reward_model(entry, name, field, template_kwargs=data.chat_template_kwargs, trust_remote_code=trust_remote_code)

    return open_model


def reward_runner(checked: CheckedRecipe, *, log_dir: Path | None) -> RewardRunner:
    """The runner of the recipe's reward functions in one of the processes that train, not started."""
    from rloo_cli.rewards.memory import memory_share
    from rloo_cli.rewards.runner import RewardRunner

    recipe, processes = checked.loaded.recipe, max(1, checked.loaded.num_processes // checked.loaded.num_machines)
    workers = recipe.run.reward_workers
    count = min(MOST_AUTO_WORKERS, max(1, usable_cores() // processes - 1)) if workers == "auto" else workers
    memory = recipe.run.reward_memory_gb
    limit = round(memory * 2**30) if memory is not None else memory_share((count + 1) * processes - 1)
    return RewardRunner(recipe.rewards, code_dir=checked.code_dir, num_workers=count, log_dir=log_dir, memory_limit=limit)


@contextmanager
def errors_placed(loaded: LoadedRecipe) -> Iterator[None]:
    """Gives recipe errors that begin with a field (`model.dtype: …`) or a reward function their place in the file, for the block."""
    try:
        yield
    except RecipeError as error:
        field = _field_of(loaded.recipe, error.message)
        if field is None:
            raise
        raise RecipeError(f"{loaded.locate(field)}: {error.message}") from error


def _field_of(recipe: Recipe, message: str) -> str | None:
    match = FIELD_AT_START.match(message)
    if match is not None:
        return match[1]
    functions = {i: entry.function for i, entry in enumerate(recipe.rewards) if entry.function is not None}
    return next((f"rewards[{i}].function" for i, name in functions.items() if message.startswith(f"`{name}`")), None)
