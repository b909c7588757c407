"""Reward models as the runner sees them: an entry without a function, opened by whoever can read models. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rloo_cli.errors import RecipeError
from rloo_cli.recipe.reward_rules import reward_name
from rloo_cli.rewards.bindings import Parameters
from rloo_cli.rewards.calls import LoadedReward
from rloo_cli.rewards.resolve import RewardSource, check_arguments, find_reward

if TYPE_CHECKING:
    from rloo_cli.recipe.schema import RewardEntry

TAKEN = ("prompts", "completions", "log_metric")


class RewardModel(Protocol):
    """A sequence-classification model that scores conversations."""

    def load(self) -> None:
        """Read the weights, onto the device. Raises RecipeError where they cannot be read."""
        ...

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], log_metric: Callable[[str, float], None]) -> list[float]:
        """The score of each completion, called as a reward function is."""
        ...


OpenModel = Callable[["RewardEntry", str, str], RewardModel]
"""(entry, its name in metrics, its field in the recipe) → the model, its files looked at, no weights read. Raises RecipeError."""


def find_entry(entry: RewardEntry, *, code_dir: Path) -> RewardSource:
    """Where the function of an entry is and what it takes; of a model, the same in its terms.

    Raises:
        RecipeError: there is no such function.
    """
    if entry.function is not None:
        return find_reward(entry.function, code_dir=code_dir)
    assert entry.model is not None
    return RewardSource(
        function=entry.model,
        module="",
        name=reward_name(entry),
        file=entry.model,
        parameters=TAKEN,
        required=TAKEN[:2],
        takes_any_keyword=False,
        is_signature_known=True,
    )


def check_entry(entry: RewardEntry, source: RewardSource, *, columns: Sequence[str] | None) -> None:
    """As `check_arguments`, which a model always passes."""
    if entry.function is not None:
        check_arguments(source, columns=columns, kwargs=entry.kwargs)


def open_entry(entry: RewardEntry, name: str, field: str, open_model: OpenModel | None) -> LoadedReward:
    """The model of an entry as something that is called. Raises RecipeError where it cannot be opened, or nobody opens models."""
    if open_model is None:
        raise RecipeError(f"the reward `{name}` is a model, which is not offered here: name a function")
    parameters = Parameters(names=TAKEN, required=TAKEN[:2])
    kwargs: Mapping[str, Any] = {}
    return LoadedReward(
        function=open_model(entry, name, field), parameters=parameters, is_async=False, kwargs=kwargs, timeout=entry.timeout
    )
