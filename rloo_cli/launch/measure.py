"""`rloo plan --measure` in this very process: a few steps of the recipe, timed. Leaves nothing behind."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rloo_cli.errors import RefusedError
from rloo_cli.launch.trial import trial
from rloo_cli.plan.prepare import Prepared
from rloo_cli.recipe.load import LoadedRecipe

if TYPE_CHECKING:
    from rloo_cli.training.measure import Measurement


def check_measurable(loaded: LoadedRecipe) -> None:
    """Raise RefusedError where the run is one of several processes, which a look in one process cannot time."""
    if loaded.num_processes > 1:
        raise RefusedError(
            f"--measure takes its steps in this one process, and the run has {loaded.num_processes}: add --num-processes 1 to measure one of them; "
            "docs/scaling-out.md says what several gain."
        )


def measure_here(prepared: Prepared, *, trust_remote_code: bool) -> Measurement:
    """What a few steps took, from the recipe's own model, data and reward functions.

    Raises:
        RlooError: as these steps of training would.
    """
    from rloo_cli.training.measure import measure

    run = prepared.recipe.run.model_copy(update={"report_to": [], "save_strategy": "no"})
    prepared = replace(prepared, recipe=prepared.recipe.model_copy(update={"run": run}))
    with trial(prepared, what="measure", trust_remote_code=trust_remote_code) as inputs:
        inputs.folder.prepare()
        return measure(inputs)
