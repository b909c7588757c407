"""`rloo plan --engine` in this very process: the recipe's engine against the trainer. Leaves nothing behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rloo_cli.launch.trial import trial
from rloo_cli.plan.prepare import Prepared

if TYPE_CHECKING:
    from rloo_cli.training.engine_check import EngineCheck


def check_engine_here(prepared: Prepared, *, trust_remote_code: bool) -> EngineCheck:
    """What the engine's log-probs are against the trainer's.

    Raises:
        RlooError: as the first step of training would.
    """
    from rloo_cli.training.engine_check import check_engine

    with trial(prepared, what="engine-check", trust_remote_code=trust_remote_code) as inputs:
        return check_engine(inputs)
