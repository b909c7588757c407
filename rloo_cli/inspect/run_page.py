"""What `rloo runs show` and `compare` tell of runs beyond a line: checkpoints, warnings, how to go on, numbers side by side."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rloo_cli.errors import RlooError
from rloo_cli.inspect.metric_rows import MetricRows
from rloo_cli.inspect.run_state import RunFacts, StateName, metric_key
from rloo_cli.inspect.series import Series, mean
from rloo_cli.run.checkpoint import CHECKPOINT_FORMAT, list_steps, step_name
from rloo_cli.run.folder import RunFolder
from rloo_cli.run.manifest import DamagedError, Manifest

CURVES = (
    "reward",
    "reward_std",
    "eval/reward",
    "completions/mean_length",
    "completions/clipped_ratio",
    "groups/zero_std",
    "entropy",
    "kl",
    "loss",
    "grad_norm",
    "learning_rate",
    "sampling/logp_diff_mean",
    "perf/tokens_per_second",
)
"""Drawn where the run has them and they are not the same throughout."""
OWN_REWARD = "rewards/"
WITH_VALUE = ("-o", "--output-dir", "--resume")
"""Options of the old command that the new one says anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedStep:
    """A checkpoint, or the final model, and whether it can be used."""

    name: str
    """`000040`, or `final`."""
    step: int | None
    size: int
    """Bytes, as its manifest says."""
    damage: str
    """What is wrong with it; empty where nothing was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A quantity over the run."""

    key: str
    values: tuple[float, ...]
    last: float
    low: float
    high: float


def saved_steps(folder: RunFolder, *, contents: bool) -> list[SavedStep]:
    """The checkpoints in order, then the final model; with `contents` every byte is held against its hash, else sizes alone."""
    try:
        steps = list_steps(folder.checkpoints)
    except RlooError:
        steps = []
    saved = [_saved(folder.checkpoints / step_name(step), step, contents=contents) for step in steps]
    return [*saved, *([_saved(folder.final, None, contents=contents)] if folder.final.exists() else [])]


def _saved(path: Path, step: int | None, *, contents: bool) -> SavedStep:
    size, damage = 0, ""
    try:
        manifest = Manifest.read(path)
        size = sum(entry.size for entry in manifest.files.values())
        found = manifest.info.get("step")
        version = manifest.info.get("format")
        if step is not None and version != CHECKPOINT_FORMAT:
            damage = f"format {version}, which this version of rloo does not read"
        elif step is None and isinstance(found, int):
            step = found
        manifest.verify(path, contents=contents)
    except DamagedError as error:
        damage = f"{error.path.name}: {error.reason}"
    except (TypeError, AttributeError, ValueError):  # values of the wrong kind, behind a right hash
        damage = "manifest.json: not as this version of rloo writes it"
    return SavedStep(name=path.name, step=step, size=size, damage=damage)


def curves(metrics: MetricRows) -> list[Curve]:
    """The quantities worth drawing: the known ones, and each reward function's mean where there are several."""
    own = [key for key in metrics.names() if key.startswith(OWN_REWARD) and key.endswith("/mean")]
    wanted = [*CURVES[:3], *(own if len(own) > 1 else []), *CURVES[3:]]
    found = [(key, metrics.series(key).values) for key in wanted]
    return [
        Curve(key=key, values=values, last=values[-1], low=min(values), high=max(values))
        for key, values in found
        if values and (min(values) != max(values) or key in ("reward", "eval/reward"))
    ]


def next_commands(facts: RunFacts) -> list[tuple[str, str]]:
    """(what for, command) of what makes sense next, the likeliest first."""
    run = shlex.quote(str(facts.folder.path))
    look = [("look at completions", f"rloo rollouts show {run} --worst")] if facts.metrics.train else []
    if facts.summary.state is StateName.RUNNING:
        return [("follow it", f"tail -f {run}/metrics.jsonl"), *look]
    if facts.summary.state is StateName.FINISHED:
        has_split = facts.recipe is not None and facts.recipe.data.dataset_test_split is not None
        score = [("score it", f"rloo eval {run}")] if has_split else []
        return [("try it", f'rloo generate {run} "…"'), *score, *look]
    command = resume_command(facts.environment, facts.folder.path)
    return [*([("go on", command)] if command else []), *look]


def resume_command(environment: Mapping[str, Any], run: Path) -> str:
    """The command that goes on with a run, made of the one that began it; empty where that is not known."""
    words = environment.get("command")
    if not isinstance(words, list) or len(words) < 2 or not all(isinstance(word, str) for word in words) or "train" not in words:
        return ""
    kept, rest = ["rloo", "train"], words[words.index("train") + 1 :]
    while rest:
        word = rest.pop(0)
        name = word.partition("=")[0]
        if name not in WITH_VALUE:
            kept.append(word)
        elif "=" not in word and rest and (name != "--resume" or rest[0].isdecimal() or rest[0] in ("latest", "auto")):
            rest.pop(0)
    folder = environment.get("working_folder")
    moved = f"cd {shlex.quote(folder)} && " if isinstance(folder, str) and folder != str(Path.cwd()) else ""
    return moved + shlex.join([*kept, "--output-dir", str(run.absolute() if moved else run), "--resume"])


def side_by_side(runs: Sequence[RunFacts]) -> list[tuple[str, tuple[Any, ...]]]:
    """(quantity, one value a run) of what runs are compared by; rows that no run has are left out."""
    rows = [(name, tuple(values[name] for values in map(_numbers, runs))) for name in _numbers(runs[0])]
    return [(name, values) for name, values in rows if any(value is not None for value in values)]


def _numbers(facts: RunFacts) -> dict[str, Any]:
    summary, series = facts.summary, facts.metrics.series
    return {
        "state": str(summary.state),
        "steps": summary.step,
        "reward, first step": next(iter(series("reward").values), None),
        "reward, last tenth": _tail(series("reward")),
        "evaluation, first": next(iter(series(metric_key(facts.recipe)).values), None),
        "evaluation, last": summary.evaluation,
        "evaluation, best": summary.best,
        "best at step": summary.best_step,
        "length, last tenth": _tail(series("completions/mean_length")),
        "cut off, last tenth": _tail(series("completions/clipped_ratio")),
        "entropy, last tenth": _tail(series("entropy")),
        "kl, last tenth": _tail(series("kl")),
        "grad_norm, last tenth": _tail(series("grad_norm")),
        "completions a step": facts.environment.get("completions_per_step"),
        "processes": facts.environment.get("num_processes"),
        "seconds a step": _mean(series("perf/seconds/step")),
        "tokens a second": _mean(series("perf/tokens_per_second")),
        "peak memory, MB": max(series("perf/peak_memory_mb").values, default=None),
        "seconds in all": summary.seconds,
    }


def _mean(series: Series) -> float | None:
    return mean(series.values) if series else None


def _tail(series: Series) -> float | None:
    return series.tail if series else None
