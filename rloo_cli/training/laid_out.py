"""What every strategy holds once it has laid a policy out."""

from __future__ import annotations

from rloo_cli.training.optimizer import OptimizerAndSchedule
from rloo_cli.training.policy import Policy


class LaidOut:
    """Policy and optimizer of a strategy; both are there after its `distribute`."""

    _policy: Policy | None = None
    _optimizer: OptimizerAndSchedule | None = None

    @property
    def policy(self) -> Policy:
        """What was laid out."""
        assert self._policy is not None
        return self._policy

    @property
    def optimizer(self) -> OptimizerAndSchedule:
        """What updates it."""
        assert self._optimizer is not None
        return self._optimizer
