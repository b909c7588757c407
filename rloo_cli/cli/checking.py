"""`rloo rewards check`: what is checked, on which data, with which tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rloo_cli.errors import RecipeError
from rloo_cli.inspect.probes import ProbeData, read_probe_data
from rloo_cli.inspect.reward_calls import parse_kwargs
from rloo_cli.inspect.reward_check import CheckedReward, Encode, check_reward
from rloo_cli.inspect.token_text import TokenText, model_tokenizer
from rloo_cli.recipe.schema import DataSection, ModelSection, RewardEntry
from rloo_cli.rewards.resolve import find_reward

YAML = (".yaml", ".yml")
GOLD_PARAMETER = "column"
"""The argument by which built-in rewards are told where the gold answers are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenRewards:
    """Reward functions and what they are tried on."""

    entries: tuple[RewardEntry, ...]
    data: ProbeData
    code_dir: Path
    encode: Encode

    def check(self, entry: RewardEntry) -> CheckedReward:
        """What was found out about one of them. Raises as `check_reward`."""
        from rich.console import Console

        with Console(stderr=True).status(f"trying {entry.name or entry.function}"):
            return check_reward(entry, self.data, code_dir=self.code_dir, encode=self.encode)


def means_recipe(subject: str) -> bool:
    """Whether a recipe is meant, by its path or a shipped one's name, and not a function."""
    from rloo_cli.plan.shipped import find_recipe

    if subject.endswith(".py"):
        return False  # said better where functions are looked for
    return subject.endswith(YAML) or "/" in subject or find_recipe(subject).is_file()


def chosen_rewards(
    subject: str,
    *,
    is_recipe: bool,
    data: str | None,
    prompt_column: str,
    split: str,
    column: str | None,
    kwargs: str | None,
    code_dir: str | None,
    timeout: float,
    count: int,
    completions: str | None,
) -> ChosenRewards:
    """What `rloo rewards check SUBJECT` means.

    Raises:
        RecipeError, DataError: there is no such function, recipe or data.
    """
    answers = Path(completions) if completions is not None else None
    if is_recipe:
        return _of_recipe(subject, column=column, code_dir=code_dir, count=count, completions=answers)
    folder = Path(code_dir) if code_dir is not None else Path()
    if not folder.is_dir():
        raise RecipeError(f"--code-dir {folder}: no such folder")
    source = find_reward(subject, code_dir=folder)
    given = parse_kwargs(kwargs)
    if column is not None and GOLD_PARAMETER in source.parameters:
        given = {GOLD_PARAMETER: column} | given
    entry = RewardEntry(function=subject, kwargs=given, timeout=timeout)
    section = DataSection(dataset_name=data or "", prompt_column=prompt_column)
    probes = read_probe_data(
        section, split, count=count, gold_column=column or given.get(GOLD_PARAMETER), completions=answers, prompt_option="--prompt-column"
    )
    return ChosenRewards(entries=(entry,), data=probes, code_dir=folder, encode=utf8_ids)


def _of_recipe(recipe: str, *, column: str | None, code_dir: str | None, count: int, completions: Path | None) -> ChosenRewards:
    from rloo_cli.plan.prepare import check_recipe

    checked = check_recipe(recipe, code_dir=code_dir)
    loaded = checked.loaded.recipe
    named = next((entry.kwargs[GOLD_PARAMETER] for entry in loaded.rewards if isinstance(entry.kwargs.get(GOLD_PARAMETER), str)), None)
    probes = read_probe_data(
        loaded.data,
        loaded.data.dataset_train_split,
        count=count,
        gold_column=column or named,
        completions=completions,
        prompt_option="data.prompt_column",
    )
    return ChosenRewards(entries=tuple(loaded.rewards), data=probes, code_dir=checked.code_dir, encode=_encoder(loaded.model))


def _encoder(model: ModelSection) -> Encode:
    """The model's tokenizer where it is at hand, else UTF-8 bytes."""
    path = model_tokenizer(model.model_name_or_path, model.model_revision)
    return TokenText(path).encode if path is not None and path.is_file() else utf8_ids


def utf8_ids(text: str) -> tuple[int, ...]:
    """The bytes of a text: stand-ins for token ids where no tokenizer is named."""
    return tuple(text.encode("utf-8", "replace"))
