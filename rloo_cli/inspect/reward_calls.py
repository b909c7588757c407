"""Calling reward functions outside of a run: the workers of training, over prompts and completions from anywhere."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rloo_cli.errors import RecipeError
from rloo_cli.recipe.nodes import Fields, Problems
from rloo_cli.recipe.scalars import plain_data
from rloo_cli.recipe.schema import RewardEntry
from rloo_cli.recipe.yaml_source import parse
from rloo_cli.rewards.models import OpenModel
from rloo_cli.rewards.runner import RewardRunner
from rloo_cli.types import Completion, FinishReason, Group, Prompt, PromptContent

STAND_IN_ID = 0
"""An empty completion has one token in training, its EOS."""


@contextlib.contextmanager
def reward_workers(
    entry: RewardEntry, *, code_dir: Path, log_dir: Path | None = None, num_workers: int = 1, open_model: OpenModel | None = None
) -> Iterator[RewardRunner]:
    """Started workers for one function, or its model loaded; what fails in it is counted, not raised, and nothing reaches the terminal by logging.

    Raises:
        RecipeError: there is no such function, or it cannot be imported.
    """
    logger, handler = logging.getLogger("rloo_cli"), logging.NullHandler()
    lenient = entry.model_copy(update={"on_error": "unscored"})
    logger.addHandler(handler)
    try:
        with RewardRunner([lenient], code_dir=code_dir, num_workers=num_workers, log_dir=log_dir) as runner:
            runner.start(open_model=open_model)
            runner.load_models()
            yield runner
    finally:
        logger.removeHandler(handler)


def parse_kwargs(text: str | None) -> dict[str, Any]:
    """The mapping that `--kwargs` was given, read as YAML as in a recipe.

    Raises:
        RecipeError: it is no mapping, or holds what recipes refuse.
    """
    if text is None:
        return {}
    problems = Problems()
    node = parse(text, "--kwargs", problems, positions=False)
    value = plain_data(node, lambda place, message: problems.add(place, "", message)) if isinstance(node, Fields) else None
    if problems.count:
        raise RecipeError(problems.lines()[0])
    if not isinstance(value, dict):
        raise RecipeError(f"--kwargs {text}: expected a mapping, such as --kwargs '{{limit: 200}}'")
    return value


def made_up_group(
    *, row: int, content: PromptContent, columns: Mapping[str, Any], texts: Sequence[str], ids: Sequence[Sequence[int]]
) -> Group:
    """A group as reward functions get it; `ids`: the tokens of each text."""
    prompt = Prompt(row=row, content=content, text="", token_ids=(STAND_IN_ID,), columns=columns)
    completions = tuple(
        Completion(
            token_ids=tuple(tokens) or (STAND_IN_ID,),
            logprobs=(0.0,) * max(1, len(tokens)),
            finish_reason=FinishReason.STOPPED,
            weights_version=0,
        )
        for tokens in ids
    )
    return Group(prompt=prompt, completions=completions, texts=tuple(texts))


def failed_items(failures: Sequence[str], name: str, row: int) -> dict[int, str]:
    """Position of the completion → why it failed, from the lines that the runner gives for a group."""
    found = {}
    for line in failures:
        place, _, reason = line.removeprefix(f"{name}: prompt row {row}, completion ").partition(": ")
        if place.isdecimal():
            found[int(place)] = reason
    return found
