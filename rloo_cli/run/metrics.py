"""metrics.jsonl: the one table of metric keys, and the writer that takes no other."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rloo_cli.errors import NonFiniteError
from rloo_cli.run import atomic

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MetricKey:
    """What a metric means."""

    description: str
    unit: str


METRICS: dict[str, MetricKey] = {
    "step": MetricKey("Optimizer step, from 1; an evaluation before training has 0.", "steps"),
    "epoch": MetricKey("Passes over the prompts so far.", "epochs"),
    "num_tokens": MetricKey("Prompt and completion tokens so far; a prompt counts once for each of its completions.", "tokens"),
    "reward": MetricKey("Mean over completions of the weighted reward sum, before clipping and the KL penalty.", "reward"),
    "reward_std": MetricKey("Standard deviation (n−1) of that sum within a group, averaged over groups.", "reward"),
    "rewards/<name>/mean": MetricKey("Mean of one reward function over the completions that it applied to, unweighted.", "reward"),
    "rewards/<name>/std": MetricKey("Standard deviation (n−1) of the same values.", "reward"),
    "rewards/<name>/unscored": MetricKey("Share of completions that the function gave no reward (None, or failed).", "share"),
    "rewards/failures": MetricKey("Completions on which a reward function failed under `on_error: unscored`.", "rows"),
    "custom/<name>": MetricKey("A value that a reward function gave to log_metric, averaged.", "its own"),
    "completions/mean_length": MetricKey("Mean length of completions, EOS included.", "tokens"),
    "completions/min_length": MetricKey("Shortest completion.", "tokens"),
    "completions/max_length": MetricKey("Longest completion.", "tokens"),
    "completions/clipped_ratio": MetricKey("Share of completions cut off at the length limit.", "share"),
    "completions/mean_terminated_length": MetricKey(
        "Mean length of the completions that ended by themselves; absent when none did.", "tokens"
    ),
    "completions/min_terminated_length": MetricKey("Shortest of those; absent when there are none.", "tokens"),
    "completions/max_terminated_length": MetricKey("Longest of those; absent when there are none.", "tokens"),
    "groups/zero_std": MetricKey("Share of groups whose raw rewards are all equal (before KL).", "share"),
    "groups/no_signal": MetricKey("Groups with fewer than two scored completions.", "groups"),
    "groups/dropped": MetricKey(
        "Groups that `dynamic_sampling` left out of the training: no two of their rewards differ. Rewards and lengths are those of all groups.",
        "groups",
    ),
    "groups/missing": MetricKey("Groups that the batch is short of, since nothing replaces those left out (any more).", "groups"),
    "rows/unscored": MetricKey("Completions without any reward: advantage 0, in nobody's baseline.", "rows"),
    "rows/skipped": MetricKey("Rows left out of the training pass because their advantage is 0; their gradient would be 0.", "rows"),
    "loss": MetricKey("The loss of the optimizer step.", "loss"),
    "aux_loss": MetricKey(
        "How unevenly a row's tokens are dealt out to the experts, mean over rows (`router_aux_loss_coef`); even = experts of a token.",
        "loss",
    ),
    "grad_norm": MetricKey("Norm of the gradient before clipping.", "norm"),
    "learning_rate": MetricKey("Learning rate of the step.", "rate"),
    "entropy": MetricKey("Mean entropy of the next-token distribution over completion tokens.", "nats"),
    "kl": MetricKey("KL estimate (k1) to the reference model, mean over completion tokens; it may be negative.", "nats/token"),
    "kl/sequence": MetricKey("The same, summed over a completion and averaged over completions: what beta multiplies.", "nats"),
    "clip_ratio/region_mean": MetricKey("Share of rows whose sequence ratio was clipped; 0 on-policy.", "share"),
    "sampling/logp_diff_mean": MetricKey(
        "Mean over tokens of the absolute difference between the trainer's and the sampler's log-prob.", "nats"
    ),
    "sampling/logp_diff_max": MetricKey("Largest of those.", "nats"),
    "sampling/ess": MetricKey(
        "Effective sample size of the sequence ratios trainer/sampler, as a share of the rows; 1 = the same policy.", "share"
    ),
    "sampling/staleness": MetricKey(
        "Optimizer steps between the weights that sampled the batch and those that it first trains: 0, or 1 with async_steps.", "steps"
    ),
    "eval/<key>": MetricKey("The same quantity on the evaluation split, in a row of its own.", "that of <key>"),
    "eval/rewards/<name>/pass@k": MetricKey(
        "Share of prompts of which at least one of the k = num_generations_eval completions has a reward of 1 or more.", "share"
    ),
    "eval/prompts": MetricKey("Prompts evaluated.", "prompts"),
    "perf/seconds/generate": MetricKey("Wall time of sampling.", "s"),
    "perf/seconds/reward": MetricKey("Wall time spent waiting for rewards after sampling.", "s"),
    "perf/seconds/reference": MetricKey("Wall time of the reference model's forward passes.", "s"),
    "perf/seconds/train": MetricKey("Wall time of forward, backward and optimizer.", "s"),
    "perf/seconds/sync": MetricKey("Wall time of handing new weights to the engine.", "s"),
    "perf/seconds/wait": MetricKey("Wall time spent waiting for the batch that is generated ahead, with async_steps.", "s"),
    "perf/seconds/save": MetricKey("Wall time of writing the checkpoint before this step.", "s"),
    "perf/seconds/evaluate": MetricKey("Wall time of the evaluation.", "s"),
    "perf/seconds/step": MetricKey("Wall time of the whole step.", "s"),
    "perf/tokens_per_second": MetricKey("Completion tokens of the step by its wall time.", "tokens/s"),
    "perf/peak_memory_mb": MetricKey("Peak memory so far: of the device, or of the process on a CPU.", "MB"),
}
"""Every key of metrics.jsonl. `<name>` stands for a reward's or metric's own name, `<key>` for another key of this table."""


def _pattern(key: str) -> re.Pattern[str]:
    return re.compile(re.escape(key).replace("<name>", ".+").replace("pass@k", r"pass@\d+"))


_PATTERNS = [(_pattern(key), meaning) for key, meaning in METRICS.items() if "<key>" not in key]


def find_metric(key: str) -> MetricKey | None:
    """What a concrete key means (`rewards/accuracy/mean`), or None where the table has no such key."""
    for pattern, meaning in _PATTERNS:
        if pattern.fullmatch(key):
            return meaning
    return find_metric(key.removeprefix("eval/")) if key.startswith("eval/") else None


EVALUATION_PREFIX = "eval/"
_NOT_EVALUATED = {"reward_std"}
_EVALUATED = ("reward", "completions/", "rows/unscored")


def evaluation_key(name: str) -> str:
    """`reward`, `eval_reward` or `eval/reward` → `eval/reward`."""
    return EVALUATION_PREFIX + name.removeprefix(EVALUATION_PREFIX).removeprefix("eval_")


def evaluation_keys(rewards: Sequence[str], num_generations: int) -> list[str]:
    """The keys that an evaluation with these reward functions may have, but for what the functions log themselves (`eval/custom/…`)."""
    keys: list[str] = []
    for key in METRICS:
        if key.startswith(_EVALUATED) and key not in _NOT_EVALUATED:
            keys += [key.replace("<name>", name) for name in (rewards if "<name>" in key else [""])]
    keys += [f"rewards/{name}/pass@{num_generations}" for name in rewards if num_generations > 1]
    return [EVALUATION_PREFIX + key for key in keys]


class MetricsWriter:
    """Appends rows to metrics.jsonl, each with a single write.

    Args:
        path: the file; created with the first row.
        offset: size in bytes that a checkpoint remembers; what came after it is cut off. None = a new file or as it is.
    """

    def __init__(self, path: Path, *, offset: int | None = None) -> None:
        self._path = path
        if offset is not None:
            self._cut_back(offset)
        self.offset = path.stat().st_size if path.exists() else 0
        """Size of the file in bytes: what a checkpoint has to remember."""

    def write(self, row: Mapping[str, float | int | None]) -> None:
        """Append a row; values that are None are left out.

        Raises:
            KeyError: a key is not in the table: a bug of the caller.
            NonFiniteError: a value is NaN or infinite.
            StorageError: the row could not be written; the file still ends with a whole line.
        """
        present = {key: value for key, value in row.items() if value is not None}
        for key, value in present.items():
            if find_metric(key) is None:
                raise KeyError(f"{key} is not in the table of metrics (rloo_cli/run/metrics.py)")
            if not math.isfinite(value):
                raise NonFiniteError(f"step {row.get('step')}: metric {key} is {value}.")
        self.offset = atomic.append_line(self._path, json.dumps(present, allow_nan=False))

    def sync(self) -> None:
        """Make all rows durable: to be called before a checkpoint that remembers `offset` is saved."""
        if self.offset:
            atomic.sync_file(self._path)

    def _cut_back(self, offset: int) -> None:
        data = self._path.read_bytes() if self._path.exists() else b""
        kept = data[:offset]
        whole = kept[: kept.rfind(b"\n") + 1]
        if len(whole) != offset:
            logger.warning(
                "%s holds %d whole bytes of the %d that the checkpoint knew of: rows are missing", self._path, len(whole), offset
            )
        atomic.truncate_file(self._path, len(whole))


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The rows of a metrics.jsonl, in order."""
    return [json.loads(line) for line in path.read_text().splitlines()]
