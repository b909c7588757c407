"""`rloo rewards check`: what is checked, on which data, with which tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rloo_cli.cli.rescoring import recorded_code_dir
from rloo_cli.errors import RecipeError
from rloo_cli.inspect.probes import ProbeData, read_probe_data
from rloo_cli.inspect.reward_calls import parse_kwargs
from rloo_cli.inspect.reward_check import CheckedReward, Encode, check_reward
from rloo_cli.inspect.token_text import TokenText, model_tokenizer
from rloo_cli.recipe.schema import DataSection, ModelSection, RewardEntry
from rloo_cli.rewards.models import OpenModel
from rloo_cli.rewards.resolve import find_reward
from rloo_cli.run.folder import RunFolder

YAML = (".yaml", ".yml")
LONGEST_CALL = 5.0
"""Seconds a completion: someone waits for the answer."""
GOLD_PARAMETER = "column"
"""The argument by which built-in rewards are told where the gold answers are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenRewards:
    """Reward functions and what they are tried on."""

    entries: tuple[RewardEntry, ...]
    data: ProbeData
    code_dir: Path
    encode: Encode
    open_model: OpenModel | None = None

    def check(self, entry: RewardEntry) -> CheckedReward:
        """What was found out about one of them. Raises as `check_reward`."""
        from rich.console import Console

        with Console(stderr=True).status(f"trying {entry.name or entry.function or entry.model}"):
            return check_reward(entry, self.data, code_dir=self.code_dir, encode=self.encode, open_model=self.open_model)


def means_recipe(subject: str) -> bool:
    """Whether a recipe is meant, by its path, a shipped one's name or a run's folder, and not a function."""
    from rloo_cli.plan.shipped import find_recipe

    if subject.endswith(".py"):
        return False  # said better where functions are looked for
    return subject.endswith(YAML) or "/" in subject or find_recipe(subject).is_file() or RunFolder(Path(subject)).recipe.is_file()


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRequest:
    """What the command line said; None = nothing."""

    subject: str
    data: str | None
    prompt_column: str | None
    split: str | None
    column: str | None
    kwargs: str | None
    code_dir: str | None
    timeout: float | None
    count: int
    completions: str | None


def chosen_rewards(request: CheckRequest) -> ChosenRewards:
    """What `rloo rewards check SUBJECT` means.

    Raises:
        RecipeError, DataError: there is no such function, recipe or data.
    """
    return _of_recipe(request) if means_recipe(request.subject) else _of_function(request)


def _of_function(request: CheckRequest) -> ChosenRewards:
    folder = Path(request.code_dir) if request.code_dir is not None else Path()
    if not folder.is_dir():
        raise RecipeError(f"--code-dir {folder}: no such folder")
    source = find_reward(request.subject, code_dir=folder)
    kwargs = parse_kwargs(request.kwargs)
    if request.column is not None and GOLD_PARAMETER in source.parameters:
        kwargs = {GOLD_PARAMETER: request.column} | kwargs
    entry = RewardEntry(function=request.subject, kwargs=kwargs, timeout=request.timeout or LONGEST_CALL)
    data = _probe_data(request, DataSection(dataset_name=request.data or ""), [entry], prompt_option="--prompt-column")
    return ChosenRewards(entries=(entry,), data=data, code_dir=folder, encode=utf8_ids)


def _of_recipe(request: CheckRequest) -> ChosenRewards:
    from rloo_cli.plan.prepare import check_recipe, model_opener

    run = RunFolder(Path(request.subject))
    if run.recipe.is_file():
        checked = check_recipe(run.recipe, code_dir=request.code_dir or recorded_code_dir(run))
    else:
        checked = check_recipe(request.subject, code_dir=request.code_dir)
    recipe = checked.loaded.recipe
    entries = [entry if request.timeout is None else entry.model_copy(update={"timeout": request.timeout}) for entry in recipe.rewards]
    data = _probe_data(request, recipe.data, entries, prompt_option="data.prompt_column")
    return ChosenRewards(
        entries=tuple(entries),
        data=data,
        code_dir=checked.code_dir,
        encode=_encoder(recipe.model),
        open_model=model_opener(recipe.data, trust_remote_code=False),
    )


def _probe_data(request: CheckRequest, data: DataSection, entries: Sequence[RewardEntry], *, prompt_option: str) -> ProbeData:
    named = next((entry.kwargs[GOLD_PARAMETER] for entry in entries if isinstance(entry.kwargs.get(GOLD_PARAMETER), str)), None)
    if request.prompt_column is not None:
        data = data.model_copy(update={"prompt_column": request.prompt_column})
    return read_probe_data(
        data,
        request.split or data.dataset_train_split,
        count=request.count,
        gold_column=request.column or named,
        completions=Path(request.completions) if request.completions is not None else None,
        prompt_option=prompt_option,
    )


def _encoder(model: ModelSection) -> Encode:
    """The model's tokenizer where it is at hand, else UTF-8 bytes."""
    path = model_tokenizer(model.model_name_or_path, model.model_revision)
    return TokenText(path).encode if path is not None and path.is_file() else utf8_ids


def utf8_ids(text: str) -> tuple[int, ...]:
    """The bytes of a text: stand-ins for token ids where no tokenizer is named."""
    return tuple(text.encode("utf-8", "replace"))
