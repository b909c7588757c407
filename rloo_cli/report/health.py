"""What looks unhealthy in a run: each check with its limits, its numbers and what to try. `CHECKS` is the one place of all limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from rloo_cli.report import measures
from rloo_cli.report.measures import Measured
from rloo_cli.report.run_view import RunView
from rloo_cli.report.wording import MINUS, number, percent


class Level(StrEnum):
    """How bad it is."""

    WARNING = "warning"
    """Look at it before you trust the run."""
    NOTE = "note"
    """Common, often harmless; worth knowing."""
    FINE = "fine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A quantity and the limits beyond which it is worth a word."""

    title: str
    """Of the trouble."""
    name: str
    """Of what is looked at, for where all is well."""
    quantity: str
    """What is held against the limits, in words."""
    side: Literal["above", "below"]
    """Where it is unhealthy: at or beyond the limit on this side."""
    note: float
    warning: float
    """±inf: never a warning."""
    shown: Callable[[float], str]
    """The quantity and its limits as text."""
    advice: str
    """What it means, and what to try."""
    measure: Callable[[RunView], Measured | None]
    """None where the run has not what it takes."""

    def level(self, value: float) -> Level:
        """How bad the value is."""
        sign = 1 if self.side == "above" else -1
        if sign * value >= sign * self.warning:
            return Level.WARNING
        return Level.NOTE if sign * value >= sign * self.note else Level.FINE


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A check of a run."""

    check: Check
    level: Level
    value: str
    detail: str
    """The numbers that it comes from."""


def examine(view: RunView) -> list[Finding]:
    """Every check that the run has the numbers for, the worst first, else in the order of `CHECKS`."""
    found = []
    for check in CHECKS:
        measured = check.measure(view)
        if measured is not None and not math.isnan(measured.value):
            level = check.level(measured.value)
            found.append(Finding(check=check, level=level, value=check.shown(measured.value), detail=measured.detail))
    return sorted(found, key=lambda finding: list(Level).index(finding.level))


def checks_table() -> list[tuple[str, str, str, str, str]]:
    """(title, quantity, limit of a note, limit of a warning, advice) of every check, for the docs."""
    return [(check.title, check.quantity, _limit(check, check.note), _limit(check, check.warning), check.advice) for check in CHECKS]


def _limit(check: Check, value: float) -> str:
    return "never" if math.isinf(value) else f"{'≥' if check.side == 'above' else '≤'} {check.shown(value)}"


def _times(value: float) -> str:
    return f"×{number(value)}"


def _signed(value: float) -> str:
    return f"{'+' if value >= 0 else MINUS}{number(abs(value), 2)} σ"


def _nats(value: float) -> str:
    return f"{number(value)} nats"


CHECKS: Sequence[Check] = (
    Check(
        title="reward does not rise",
        name="rise of the reward",
        quantity="`reward`, end minus beginning, in standard deviations of a single step's noise",
        side="below",
        note=1.0,
        warning=-1.0,
        shown=_signed,
        advice="The run is too short, the learning rate too small (or so large that it breaks the model), or groups have no signal. "
        "Does `rloo rewards check` tell good from bad?",
        measure=measures.reward_rise,
    ),
    Check(
        title="evaluation below its best",
        name="evaluation against its best",
        quantity="`eval/reward`, last minus best, in standard errors",
        side="below",
        note=-2.0,
        warning=-4.0,
        shown=_signed,
        advice="It was better before: overfitting, or a policy that breaks. Keep the best by `metric_for_best_model`, stop earlier, "
        "take a smaller `learning_rate` or a larger `beta`.",
        measure=measures.evaluation_drop,
    ),
    Check(
        title="entropy collapse",
        name="entropy",
        quantity="`entropy`, end as a share of the beginning",
        side="below",
        note=0.25,
        warning=0.1,
        shown=percent,
        advice="The policy hardly varies any more, and what is not sampled is not learnt. No harm where the reward is near its best; "
        "else a smaller `learning_rate`, a `beta` above 0, or a higher `temperature`.",
        measure=measures.entropy_share,
    ),
    Check(
        title="groups without signal",
        name="groups without signal",
        quantity="`groups/zero_std` at the end",
        side="above",
        note=0.5,
        warning=0.8,
        shown=percent,
        advice="All completions of these groups have the same reward, so they teach nothing: prompts too easy or too hard, or a reward too "
        "coarse. Drop such prompts, raise `num_generations`, or give partial credit.",
        measure=measures.dead_groups,
    ),
    Check(
        title="unscored completions",
        name="unscored completions",
        quantity="`rows/unscored` at the end, as a share of a step's completions",
        side="above",
        note=0.05,
        warning=0.25,
        shown=percent,
        advice="No reward function had a say, or it failed: the attempt's log and `rloo rewards check` tell why.",
        measure=measures.unscored_share,
    ),
    Check(
        title="truncation",
        name="truncation",
        quantity="`completions/clipped_ratio` at the end",
        side="above",
        note=0.1,
        warning=0.3,
        shown=percent,
        advice="Cut-off completions are judged before their answer. Raise `max_completion_length`, or use "
        "`soft_overlong_punishment_reward` or `mask_truncated_completions`.",
        measure=measures.truncated_share,
    ),
    Check(
        title="length drift",
        name="length",
        quantity="`completions/mean_length`, the larger of beginning and end over the smaller",
        side="above",
        note=2.0,
        warning=4.0,
        shown=_times,
        advice="Thinking, or padding that the reward pays for? Read the longest and the best-paid completions below. If they are hollow, "
        "the reward is being hacked: stop paying for length, or raise `beta`.",
        measure=measures.length_drift,
    ),
    Check(
        title="ratios clipped",
        name="clipped ratios",
        quantity="`clip_ratio/region_mean` at the end",
        side="above",
        note=0.2,
        warning=0.5,
        shown=percent,
        advice="Rows whose ratio is clipped have no gradient: the batch is used for too long. Fewer `num_iterations` or "
        "`steps_per_generation`, or a smaller `learning_rate`.",
        measure=measures.clipped_ratios,
    ),
    Check(
        title="gradients clipped",
        name="clipped gradients",
        quantity="share of steps whose `grad_norm` is above `max_grad_norm`",
        side="above",
        note=0.9,
        warning=math.inf,
        shown=percent,
        advice="Clipping is meant for outliers; here it sets the size of nearly every gradient. Adam makes up for a constant factor, so this "
        "alone does little harm; `max_grad_norm` near the usual norm tells outliers apart again.",
        measure=measures.clipped_gradients,
    ),
    Check(
        title="gradient spikes",
        name="largest gradient",
        quantity="largest `grad_norm` over its median",
        side="above",
        note=20.0,
        warning=100.0,
        shown=_times,
        advice="Look at the rollouts of that step for what is odd. A smaller `learning_rate`, some `warmup_steps`, or a lower "
        "`max_grad_norm` tame it.",
        measure=measures.gradient_spike,
    ),
    Check(
        title="far from the reference",
        name="distance from the reference",
        quantity="`kl` at the end, nats a token",
        side="above",
        note=0.2,
        warning=1.0,
        shown=_nats,
        advice="The policy writes what the model it came from would not; fluency often goes first. A larger `beta`, or a smaller "
        "`learning_rate`.",
        measure=measures.distance,
    ),
    Check(
        title="sampler and trainer differ",
        name="sampler against trainer",
        quantity="`sampling/logp_diff_mean` at the end, nats a token",
        side="above",
        note=0.03,
        warning=0.1,
        shown=_nats,
        advice="Completions are drawn from another policy than the one trained. `rloo plan --engine` compares the two; "
        "`importance_sampling_correction: truncate` corrects for it; float32 instead of bfloat16 narrows it.",
        measure=measures.mismatch,
    ),
    Check(
        title="mismatch grows",
        name="growth of that difference",
        quantity=f"`sampling/logp_diff_mean`, end over beginning, where it ends above {measures.MISMATCH_WORTH_A_LOOK} nats",
        side="above",
        note=2.0,
        warning=5.0,
        shown=_times,
        advice="Sampler and trainer drift apart: such runs often break later. Turn on `importance_sampling_correction`, lower the "
        "`learning_rate`, and look at `sampling/staleness`.",
        measure=measures.mismatch_growth,
    ),
    Check(
        title="few effective samples",
        name="effective samples",
        quantity="`sampling/ess` at the end",
        side="below",
        note=0.9,
        warning=0.5,
        shown=percent,
        advice="After correction few rows would carry the step: the mismatch is large over whole sequences. As above; shorter completions "
        "help too.",
        measure=measures.effective_samples,
    ),
)
"""In the order in which a reader should hear of them."""
