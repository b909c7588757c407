"""A reference model that follows the policy (`sync_ref_model`): π_ref ← α π_θ + (1 − α) π_ref every so many optimizer steps.

The KL penalty then holds the policy near where it was lately, not near where it began. After Gorbatovski et al. 2024, "Learn your
reference model for real good alignment", arXiv 2404.09656 (TR-DPO), whose soft update this is; α = 1 is the hard one.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rloo_cli.errors import StorageError
from rloo_cli.run.checkpoint import Checkpoint
from rloo_cli.training.parts import unique_names
from rloo_cli.training.policy import Policy

SAVED_AS = "reference"


class MovingReference:
    """Mixes the policy's weights into the reference's; both whole, as every rank has them, so all ranks mix the same.

    Args:
        reference: in the dtype of the policy's weights: what is mixed is not what a lower precision holds exactly.
        policy: what it follows.
        alpha: the policy's share of the new reference.
        every: optimizer steps between two updates.
    """

    def __init__(self, reference: Policy, policy: Policy, *, alpha: float, every: int) -> None:
        self._reference = reference
        self._policy = policy
        self._alpha = alpha
        self._every = every

    def follow(self, step: int) -> None:
        """Take in the policy as it is after `step`, where that is a step to do so."""
        if step % self._every:
            return
        with torch.no_grad():
            for (_, theirs), (_, own) in zip(self._tensors(), unique_names(self._policy.model), strict=True):
                if theirs.is_floating_point():
                    theirs.copy_(torch.lerp(theirs, own.to(theirs), self._alpha))

    def state(self) -> dict[str, torch.Tensor]:
        """The reference's weights, for a checkpoint."""
        return {name: tensor.detach() for name, tensor in self._tensors()}

    def load(self, checkpoint: Checkpoint) -> None:
        """Take up the weights that the checkpoint has; StorageError where it has none that fit."""
        saved = checkpoint.saved_tensors(SAVED_AS)
        with torch.no_grad():
            for name, tensor in self._tensors():
                if name not in saved.names or saved.shape(name) != tuple(tensor.shape):
                    raise StorageError(f"checkpoint {checkpoint.path} cannot be used: its {SAVED_AS} has no {name} as this model has it.")
                tensor.copy_(saved.whole(name))

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from unique_names(self._reference.model)
