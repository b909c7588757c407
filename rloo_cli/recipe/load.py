"""A recipe file in, a validated `LoadedRecipe` out, or one RecipeError that holds every fault with its place.

text → tree → settings (canonical keys, extends, --set) → values (types, bounds, paths) → Recipe → rules between fields
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rloo_cli.errors import RecipeError
from rloo_cli.recipe.accelerate_config import agreed_distribution, refuse_other_precision
from rloo_cli.recipe.accelerate_environment import distribution_of_environment
from rloo_cli.recipe.batch import BatchPlan, plan_batches
from rloo_cli.recipe.distribution import Distribution
from rloo_cli.recipe.draft import Draft, recipe_error
from rloo_cli.recipe.fields import shown
from rloo_cli.recipe.generation_kwargs import gather_generation_kwargs
from rloo_cli.recipe.nodes import Fields, Node, Place, Problems, printable
from rloo_cli.recipe.overrides import apply_override, read_chain
from rloo_cli.recipe.processes import process_count
from rloo_cli.recipe.scalars import is_null
from rloo_cli.recipe.schema import Recipe, RewardEntry
from rloo_cli.recipe.settings import gather_rewards, gather_streaming
from rloo_cli.recipe.yaml_source import parse, read_text


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedRecipe:
    """A valid recipe and where each part of it was written."""

    recipe: Recipe
    path: Path
    """The file, as it was named."""
    source_text: str
    """The file's text (not that of the recipes it extends)."""
    notices: tuple[str, ...]
    """Lines about what works and may not be expected; nothing was printed."""
    num_processes: int
    """That train, on all machines: as asked for, or what `run.num_processes: auto` is here."""
    num_machines: int
    distribution: Distribution
    """How the model lies over the processes; whole in each where nothing is to be trained."""
    batch: BatchPlan
    locate: Callable[[str], str]
    """`rewards[0].function` → `recipes/my.yaml:9:5`; the nearest place above it for what was left out."""


def load_recipe(
    path: str | Path,
    *,
    text: str | None = None,
    overrides: Sequence[str] = (),
    num_processes: int | None = None,
    num_machines: int | None = None,
    is_training: bool = False,
    environ: Mapping[str, str] | None = None,
    check_reward: Callable[[RewardEntry], None] | None = None,
) -> LoadedRecipe:
    """The recipe in the file, or in `text`, with every default filled in, local paths absolute, and its batch arithmetic on `num_processes`
    (None = as the recipe says) and `num_machines` (None = as a file of `accelerate config` says, else one).

    `text` is a recipe that stands in no file: `path` is what errors call it, and in whose folder relative paths begin.
    `overrides` are texts of `--set`. `environ` (os.environ) is read for `${VAR}` in path-like fields, and where it `is_training` for what
    `accelerate launch` says; the recipe's `accelerate_config` is read then too. `check_reward` raises a RecipeError for an entry whose
    function cannot be found, which is reported with all other faults. Imports no torch.

    Raises:
        RecipeError: a line `file:line:column: section.field: message` for every fault, and a last line that counts them.
    """
    name = os.fspath(path)
    problems = Problems()
    is_file = text is None
    text = read_text(name, problems) if text is None else text
    if text is None:
        raise RecipeError(problems.lines()[0])
    origin = Place(printable(name, 300), 1, 1) if is_file else Place(Path(name).name)
    problems.rank(origin.origin)
    root = _root_of(parse(text, origin.origin, problems, positions=is_file), origin, problems)
    settings = read_chain(name, root, problems, os.environ if environ is None else environ)
    if any(name == "extends" for _, name, _ in problems.found):  # what it would have inherited is not known
        raise recipe_error(problems)
    for override in overrides:
        apply_override(settings, override, Path(name).parent, problems)
    gather_rewards(settings, problems)
    gather_streaming(settings)
    gather_generation_kwargs(settings, problems)
    environ = os.environ if environ is None else environ
    draft = Draft(settings, origin, [Path(name).parent, Path()], environ, problems)
    recipe = draft.recipe()
    distribution = _distribution(draft, recipe, environ) if is_training else Distribution()
    if is_training and "accelerate_config" not in recipe.run.model_fields_set:  # a launcher may have said it
        recipe = recipe.model_copy(update={"run": recipe.run.model_copy(update={"accelerate_config": distribution.strategy})})
    num_machines = num_machines or distribution.num_machines or 1
    if num_processes is None:
        num_processes = process_count(
            recipe.run.num_processes,
            environ,
            filed=distribution.num_processes,
            num_machines=num_machines,
        )
    if check_reward is not None:
        draft.check_rewards(recipe, check_reward)
    notices = [
        *settings.notices,
        *distribution.notes,
        *_told_of_one_process(distribution, num_processes),
        *draft.check_other_keys(),
        *draft.check_rules(recipe, num_processes, distribution.strategy),
    ]
    if problems.count:
        raise recipe_error(problems)
    return LoadedRecipe(
        recipe=recipe,
        path=Path(name),
        source_text=text,
        notices=tuple(notices),
        num_processes=num_processes,
        num_machines=num_machines,
        distribution=distribution,
        batch=plan_batches(recipe, num_processes),
        locate=lambda field_path: str(draft.locate(field_path)),
    )


def _told_of_one_process(distribution: Distribution, num_processes: int) -> tuple[str, ...]:
    """A notice where a strategy that cuts the model into parts has one process; offloading is a reason of its own."""
    if distribution.strategy == "ddp" or num_processes > 1 or distribution.cpu_offload:
        return ()
    return (
        f"run.accelerate_config: {distribution.strategy} cuts the model into as many parts as there are processes; there is one, which holds "
        "everything, as with ddp (run.num_processes, --num-processes).",
    )


def _distribution(draft: Draft, recipe: Recipe, environ: Mapping[str, str]) -> Distribution:
    """What the recipe's file or the launcher says; a fault is noted among the others."""
    field = "run.accelerate_config"
    try:
        launched = distribution_of_environment(environ)
    except RecipeError as error:
        draft.problems.add(Place(""), "", error.message)  # which names the variable
        return Distribution()
    try:
        is_written = "accelerate_config" in recipe.run.model_fields_set
        distribution = agreed_distribution(recipe.run.accelerate_config, launched, is_written=is_written)
        refuse_other_precision(distribution, is_low=recipe.training.bf16)
    except RecipeError as error:
        for line in error.message.splitlines():
            draft.problems.add(draft.locate(field), field, line)
        return Distribution()
    return distribution


def _root_of(tree: Node | None, origin: Place, problems: Problems) -> Fields:
    """The file's mapping; problems are raised at once where there is none to go on with."""
    if isinstance(tree, Fields):
        return tree
    if not problems.count:
        if tree is None or is_null(tree):
            raise RecipeError(f"{origin.origin}: the recipe is empty; it needs at least model, data and rewards.")
        problems.add(tree.place, "", f"expected a mapping of sections (`model:`, `data:`, …), got {shown(tree)}.")
    raise recipe_error(problems)
