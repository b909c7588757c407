"""A run in a sentence or two, and in a few figures."""

from __future__ import annotations

from collections.abc import Sequence

from rloo_cli.inspect.series import Series, end_length
from rloo_cli.inspect.words import plural, seconds
from rloo_cli.report.health import Finding, Level
from rloo_cli.report.measures import FEWEST_STEPS, reward_rise
from rloo_cli.report.run_view import RunView
from rloo_cli.report.wording import number
from rloo_cli.run.visible import visible

TRAIN_TIME = "perf/seconds/step"
EVALUATION_TIME = "perf/seconds/evaluate"


def verdict(view: RunView, findings: Sequence[Finding]) -> list[str]:
    """The sentences: how far it came, reward, evaluation, how many warnings."""
    return [sentence for sentence in (_progress(view), _reward(view), _evaluation(view), _warnings(view, findings)) if sentence]


def figures(view: RunView) -> list[tuple[str, str]]:
    """(name, value) of what one wants to know first."""
    metrics = view.metrics
    of = f" of {view.total_steps:,}" if view.total_steps else ""
    found = [("steps", f"{metrics.last_step:,}{of}")]
    found += [(name, _ends(metrics.series(key), key)) for name, key in (("reward", "reward"), ("evaluation", "eval/reward"))]
    found.append(("tokens a completion", _ends(metrics.series("completions/mean_length"), "")))
    time = metrics.total(TRAIN_TIME) + metrics.total(EVALUATION_TIME)
    found.append(("time in steps and evaluations", seconds(time) if time else ""))
    tokens = metrics.series("num_tokens")
    found.append(("tokens in all", number(tokens.values[-1]) if tokens else ""))
    speed = metrics.series("perf/tokens_per_second")
    found.append(("tokens a second", number(speed.tail) if speed else ""))
    return [(name, value) for name, value in found if value]


def _progress(view: RunView) -> str:
    step, total = view.metrics.last_step, view.total_steps
    if view.state == "finished":
        return ""
    where = f"at step {step:,} of {total:,}" if total else f"at step {step:,}"
    if view.state == "under way":
        return f"Still training, {where}."
    reason = visible(view.ending).rstrip(".")
    return f"Not finished: it ended {where}{f' ({reason})' if reason else ''}."


def _reward(view: RunView) -> str:
    series = view.metrics.series("reward")
    if not series:
        return ""
    count = len(series.values)
    if count < FEWEST_STEPS:
        return f"Reward {number(series.values[0])} at the first step, {number(series.values[-1])} at the last of {count}."
    ends = f"{number(series.head)} to {number(series.tail)}"
    averaged = f"(first and last {end_length(count)} of {count:,} steps)"
    rise = reward_rise(view)
    size = rise.value if rise is not None else 0.0
    if abs(size) < 1:
        return f"Reward hardly moved, {ends} {averaged}."
    return f"Reward {'rose' if size > 0 else 'fell'} from {ends} {averaged}."


def _evaluation(view: RunView) -> str:
    series = view.metrics.series("eval/reward")
    if not series:
        return ""
    prompts = view.metrics.evaluations[-1].get("eval/prompts")
    on = f" on {prompts:,.0f} prompts" if prompts else ""
    if len(series.values) == 1:
        return f"Evaluation: {number(series.values[0])}{on}."
    return f"Evaluation{on}: {number(series.values[0])} after step {series.steps[0]:.0f}, {number(series.values[-1])} after step {series.steps[-1]:.0f}."


def _warnings(view: RunView, findings: Sequence[Finding]) -> str:
    if not findings or len(view.metrics.train) < FEWEST_STEPS:
        return f"Fewer than {FEWEST_STEPS} steps: too few to judge its health." if view.metrics.train else ""
    warnings = [finding.check.title for finding in findings if finding.level is Level.WARNING]
    notes = sum(finding.level is Level.NOTE for finding in findings)
    also = f"{', and ' if warnings else ', '}{plural(notes, 'note')}" if notes else ""
    if not warnings:
        return f"No warnings{also}."
    return f"{plural(len(warnings), 'warning')} ({', '.join(warnings)}){also}."


def _ends(series: Series, key: str) -> str:
    if not series:
        return ""
    first, last = (series.values[0], series.values[-1]) if key.startswith("eval/") else (series.head, series.tail)
    return number(last) if len(series.values) == 1 else f"{number(first)} → {number(last)}"
