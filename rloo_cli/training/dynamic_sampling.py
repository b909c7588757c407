"""Which groups of a generation batch are trained on, and how many prompts are drawn for it (`dynamic_sampling`).

A group without two different rewards teaches nothing (beta 0): each reward is its own baseline. `filter` leaves such groups out of the
optimizer step, so that its N, and with it the mean that the gradient is, is over the others; `resample` also draws further prompts in
their place. After Yu et al. 2025, "DAPO", arXiv 2503.14476, section 3.2 (dynamic sampling).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from rloo_cli.algorithm.advantages import has_spread
from rloo_cli.training.ahead import Collected
from rloo_cli.training.experience import weighted_rewards
from rloo_cli.types import Group, GroupRewards

Mode = Literal["off", "filter", "resample"]
Draw = Callable[[int, int], tuple[Sequence[Group], Sequence[GroupRewards], Mapping[str, float]]]
"""(index of the first among the batch's prompts, how many) → their groups and rewards, and the seconds of each phase."""


def collect_batch(draw: Draw, *, mode: Mode, wanted: int, most: int, weights: Sequence[float]) -> Collected:
    """A generation batch of `wanted` groups; which are kept follows from their rewards alone, so all ranks agree.

    Each further draw is of as many prompts as groups are missing, so none is sampled in vain.

    Args:
        draw: makes groups; called once unless `mode` is `resample`.
        mode: the recipe's `dynamic_sampling`.
        wanted: P, groups of a full batch.
        most: prompts that may be drawn for it, at least P.
        weights: of the reward functions.
    """
    groups: list[Group] = []
    rewards: list[GroupRewards] = []
    kept: list[int] = []
    seconds: Counter[str] = Counter()
    while True:
        first = len(groups)
        part, scores, spent = draw(first, min(wanted - len(kept), most - first))
        groups += part
        rewards += scores
        seconds.update(spent)
        kept += [first + i for i in _worth_training(scores, mode, weights)]
        if mode != "resample" or len(kept) == wanted or len(groups) == most:
            return Collected(groups=groups, rewards=rewards, kept=kept, seconds=dict(seconds))


def _worth_training(rewards: Sequence[GroupRewards], mode: Mode, weights: Sequence[float]) -> Sequence[int]:
    if mode == "off":
        return range(len(rewards))
    return has_spread(*weighted_rewards(rewards, weights)).nonzero().flatten().tolist()


def sampling_metrics(drawn: int, kept: int, wanted: int, mode: Mode) -> dict[str, float]:
    """How many groups were left out, and how many the batch is short of; nothing where dynamic sampling is off."""
    return {} if mode == "off" else {"groups/dropped": float(drawn - kept), "groups/missing": float(wanted - kept)}
