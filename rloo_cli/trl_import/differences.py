"""What a training means otherwise here than in TRL: for the page docs/from-trl.md, and for who imports a script."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rloo_cli.recipe.fields import LEAVES
from rloo_cli.recipe.trl_keys import TRL_KEYS, different_defaults

Fields = Mapping[str, Any]

SAME_EFFECT = frozenset(
    {
        "model_revision",
        "min_p",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "optim",
        "bf16",
        "report_to",
        "vllm_server_host",
    }
)
"""Fields whose default is written otherwise and comes to the same."""
KEPT = ("max_completion_length", "disable_dropout")
"""Fields that an import writes with TRL's default where a script leaves them out, since a number hangs on it."""
NEEDS: Mapping[str, str] = {"dataset_test_split": "eval_strategy", "num_generations_eval": "eval_strategy", "lora_dropout": "use_peft"}
"""Field with another default → the field without which it is not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """One thing that is not the same although it has the same name."""

    what: str
    trl: str
    here: str
    applies: Callable[[Fields], bool]
    """Whether a training with these fields meets it."""


def _always(fields: Fields) -> bool:
    return True


MEANINGS: tuple[Meaning, ...] = (
    Meaning(
        what="calls of reward functions",
        trl="one, with the whole batch of the process",
        here="one a group, as soon as its completions are there; `call: batch` in an entry makes it one",
        applies=_always,
    ),
    Meaning(
        what="what a reward function returns",
        trl="True counts as 1, and nan as None",
        here="a float or None for each completion; True and nan are errors that name the function and the value",
        applies=_always,
    ),
    Meaning(
        what="rows cut off at `max_completion_length`, with `mask_truncated_completions`",
        trl="their tokens are masked: loss and KL penalty of the row are 0, and the mean still divides by it",
        here="the row is left out of the loss and of the number that it is divided by; its reward, KL penalty included, stays in its siblings' baseline",
        applies=lambda fields: bool(fields.get("mask_truncated_completions")),
    ),
    Meaning(
        what="`normalize_advantages`",
        trl="mean and deviation over every scored row",
        here="masked rows, and groups that carry no signal, are left out of both",
        applies=lambda fields: bool(fields.get("normalize_advantages")),
    ),
    Meaning(
        what="the loss of the first update",
        trl="a ratio that is 1, clipped: the logged value is −mean(A)",
        here="−mean(A · log-prob) without a ratio: the same gradient, another value of `loss`",
        applies=lambda fields: int(fields.get("num_iterations") or 1) == 1 and not fields.get("steps_per_generation"),
    ),
    Meaning(
        what="groups whose rewards are all equal",
        trl="`frac_reward_zero_std`: after clipping and the KL penalty, hence near 0 where beta > 0",
        here="`groups/zero_std`: of the rewards themselves",
        applies=_always,
    ),
    Meaning(
        what="evaluation",
        trl="`num_generations` samples a prompt at the training temperature",
        here="one greedy completion a prompt: `eval_temperature`, `num_generations_eval`",
        applies=lambda fields: fields.get("eval_strategy", "no") != "no",
    ),
    Meaning(
        what="metrics over `logging_steps`",
        trl="means over the steps since the last line",
        here="metrics.jsonl has every step; terminal and trackers show every n-th",
        applies=_always,
    ),
    Meaning(
        what="the order of prompts and the random numbers of sampling",
        trl="the Trainer's sampler and torch's generator",
        here="pure functions of seed, epoch, position and row: the same seed gives other prompts first",
        applies=_always,
    ),
    Meaning(
        what="`output_dir`",
        trl="written into, whatever is there",
        here="one run: a folder that holds one is refused, `--resume` goes on with it",
        applies=lambda fields: bool(fields.get("output_dir")),
    ),
)
"""The KL penalty is the same: k1, summed over the completion, taken off the reward with no gradient through it; so are baselines of rows
without a reward, and clipping before the penalty."""

METRIC_NAMES: Mapping[str, tuple[str, str]] = {
    "reward": ("reward", "the same: before clipping and the KL penalty"),
    "reward_std": ("reward_std", "TRL: over all rows; here: within groups, averaged over them"),
    "rewards/NAME/mean": ("rewards/<name>/mean", "the same"),
    "rewards/NAME/std": ("rewards/<name>/std", "the same"),
    "frac_reward_zero_std": ("groups/zero_std", "see above"),
    "kl": ("kl", "the same: k1, mean over completion tokens; `kl/sequence` is what beta multiplies"),
    "entropy": ("entropy", "the same"),
    "aux_loss": ("aux_loss", "the same, with `router_aux_loss_coef`"),
    "clip_ratio/region_mean": ("clip_ratio/region_mean", "the same; its parts low and high are not reported"),
    "completions/mean_length": ("completions/mean_length", "the same"),
    "completions/clipped_ratio": ("completions/clipped_ratio", "a completion that a stop string ended is not clipped here"),
    "completions/mean_terminated_length": ("completions/mean_terminated_length", "absent instead of 0 where none ended by itself"),
    "num_tokens": ("num_tokens", "the same"),
    "loss": ("loss", "see above"),
    "grad_norm": ("grad_norm", "the same"),
    "learning_rate": ("learning_rate", "the same"),
    "step_time": ("perf/seconds/step", "the same; all times are below perf/"),
    "eval_reward": ("eval/<key>", "a row of its own, `eval/reward`"),
}
"""TRL's key → ours, and what is to be said of it."""


def default_rows() -> list[tuple[str, str, str, str]]:
    """(field, TRL's default, ours, remark) of each that comes to something else."""
    return [
        (name, _shown(theirs), _shown(ours), remark)
        for name, (theirs, ours, remark) in different_defaults().items()
        if not _is_same(name, theirs, ours)
    ]


def default_lines(fields: Fields) -> list[str]:
    """A line for each such default of the fields that were left out and that would be read."""
    return [
        f"{name}: left out, which is {theirs} in TRL and {ours} here{f' ({remark})' if remark else ''}"
        for name, theirs, ours, remark in default_rows()
        if name not in fields and name not in KEPT and _is_read(name, fields)
    ]


def _is_same(name: str, theirs: Any, ours: Any) -> bool:
    return name in SAME_EFFECT or (theirs is None and ours in ([], {}))


def kept_defaults(fields: Fields) -> dict[str, Any]:
    """TRL's defaults that an import writes, for the fields that were left out."""
    return {name: TRL_KEYS[name].default for name in KEPT if name not in fields and name in LEAVES}


def meaning_lines(fields: Fields) -> list[str]:
    """A line for each difference in meaning that a training with these fields meets."""
    return [f"{meaning.what}: in TRL, {meaning.trl}; here, {meaning.here}" for meaning in MEANINGS if meaning.applies(fields)]


def _is_read(name: str, fields: Fields) -> bool:
    switch = NEEDS.get(name)
    return switch is None or fields.get(switch) not in (None, False, "no")


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
