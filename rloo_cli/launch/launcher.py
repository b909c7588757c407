"""Who trains: this process alone, several that it starts, or the processes that a launcher or several machines have."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rloo_cli.launch.local import train_here
from rloo_cli.launch.processes import train_in_processes
from rloo_cli.plan.prepare import CheckedRecipe

if TYPE_CHECKING:
    from rloo_cli.launch.given import Place
    from rloo_cli.launch.machines import Lead


def launcher_of(checked: CheckedRecipe, others: Place | Lead | None) -> Callable[..., None]:
    """What is called with (checked, target, trust_remote_code=, quiet=) to train, with the others where there are some."""
    if others is not None:
        return others.train
    return train_here if checked.loaded.num_processes == 1 else train_in_processes
