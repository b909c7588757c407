"""What a plan says of groups without signal, as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

DRAWS = {
    "off": "`algorithm.dynamic_sampling: resample`",
    "filter": "`algorithm.dynamic_sampling: resample`, and not `filter`,",
    "resample": "`resample`, as this recipe says,",
}
"""Who draws further prompts, by the recipe's dynamic_sampling."""


def signal_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """The share of groups with differing rewards by pass rate, and what to change where it is small."""
    signal = document["signal"]
    yield f"Groups with signal, for a reward of two values: of {signal['prompts_per_step']} a step, where each completion is right"
    for entry in signal["rates"]:
        yield f"  {100 * entry['pass_rate']:>4g} % of the time: {_percent(entry['share']):>6} of the groups, {entry['groups']:.1f} a step"
    for entry in signal["rates"]:
        if entry["generations_for_a_tenth"] is not None:
            yield f"  at {100 * entry['pass_rate']:g} % that is under a tenth: num_generations {entry['generations_for_a_tenth']} reaches it, so do easier prompts;"
            yield f"      {DRAWS[signal['mode']]} draws further prompts in place of groups without signal"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
