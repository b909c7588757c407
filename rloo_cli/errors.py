"""Every error that `rloo` raises on purpose, and the exit code of each.

    RlooError                     1   (never raised itself)
    ├── RecipeError               2   the recipe is wrong, or names something that does not exist
    ├── RefusedError              2   the request is clear, and declined: the reason is in the message
    ├── DataError                 3   the content of a data set is wrong
    ├── RewardError               4   a reward function failed or returned nonsense
    ├── EngineError               5   the generation engine or its server failed
    ├── StorageError              6   disk full, unreadable checkpoint, locked run folder
    ├── NonFiniteError            7   NaN or infinity in our own numbers; no update was made
    ├── DeviceMemoryError         8   one row does not fit into the device's memory
    ├── LostRankError             1   a process of the run died without a word, or all lost each other
    ├── NeighbourError            9   another process of the run failed; its own error is the command's
    ├── StoppedError             75   stopped by a signal, checkpoint saved, `--resume` goes on
    └── InterruptedTwiceError   130   second Ctrl-C

A message is one line or a few: what is wrong, where (file:line, field, step, prompt id), what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar


class RlooError(Exception):
    """An error with a place, a remedy and a stable exit code."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class RecipeError(RlooError):
    """The recipe is wrong. `message` holds one `file:line:column: field: …` line an error."""

    exit_code = 2

    def __init__(self, message: str, *, field: str | None = None) -> None:
        """`field`: what is wrong in an entry of `rewards`, such as `kwargs.pattern`, for whoever puts the place before the message."""
        super().__init__(message)
        self.field = field


class RefusedError(RlooError):
    """What was asked for is declined; nothing was touched."""

    exit_code = 2


class DataError(RlooError):
    """A row, column or file of a data set cannot be used."""

    exit_code = 3


class RewardError(RlooError):
    """A reward function raised, hung, died or returned something that is not a finite float or None."""

    exit_code = 4


class EngineError(RlooError):
    """The generation engine failed."""

    exit_code = 5


class StorageError(RlooError):
    """Something could not be written, read or locked."""

    exit_code = 6


class NonFiniteError(RlooError):
    """A logit, log-prob, loss or gradient is NaN or infinite; the optimizer was not stepped."""

    exit_code = 7

    def __init__(
        self,
        message: str,
        *,
        place: str = "",
        value: float | None = None,
        row: int | None = None,
        token: int | None = None,
        token_ids: Sequence[int] = (),
    ) -> None:
        """The message, and what it says as values, for whoever keeps the batch.

        Args:
            message: one line.
            place: what is not finite, such as `log-prob of the policy`.
            value: NaN or an infinity.
            row: of the generation batch, from 0; None = no single row can be named.
            token: of that row's completion, from 0.
            token_ids: what the row had sampled before, where it failed while sampling.
        """
        super().__init__(message)
        self.place = place
        self.value = value
        self.row = row
        self.token = token
        self.token_ids = tuple(token_ids)


class DeviceMemoryError(RlooError):
    """Out of memory with the smallest possible micro-batch."""

    exit_code = 8


class LostRankError(RlooError):
    """A process of the run was killed or ended without a word, or had a bug; its log is named."""


class NeighbourError(RlooError):
    """Another process of the run failed: what it said; its own code is the command's."""

    exit_code = 9

    def __init__(self, message: str, *, kind: str = "") -> None:
        """`kind`: the class of the other's error, `EngineError`."""
        super().__init__(message)
        self.kind = kind


class StoppedError(RlooError):
    """A signal asked the run to stop; the state after the last optimizer step is saved."""

    exit_code = 75


class InterruptedTwiceError(RlooError):
    """A second Ctrl-C: leave at once; the checkpoint before stays valid."""

    exit_code = 130
