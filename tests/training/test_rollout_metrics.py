import math
from dataclasses import replace

import fakes
import pytest
import rig
import torch

from rloo_cli.errors import RewardError
from rloo_cli.recipe.schema import Recipe
from rloo_cli.run.metrics import find_metric
from rloo_cli.training.collector import Collector
from rloo_cli.training.evaluation import evaluate
from rloo_cli.training.experience import build_experience
from rloo_cli.training.rollout_metrics import kl_metrics, rollout_metrics
from rloo_cli.types import FinishReason, GroupRewards


def metrics_of(values, names=("r",), **options):
    groups = rig.make_groups(prompts=len(values), generations=len(values[0][0]), **options)
    rewards = [GroupRewards(values=tuple(tuple(row) for row in group)) for group in values]
    return rollout_metrics(build_experience(1, groups, rewards, [1.0] * len(names)), names)


def test_rewards_spread_and_groups():
    row = metrics_of([[[1.0, 0.0]], [[0.5, 0.5]], [[None, 1.0]], [[None, None]]])
    assert row["reward"] == pytest.approx(3.0 / 5)
    assert row["rewards/r/mean"] == pytest.approx(3.0 / 5)
    assert row["rewards/r/unscored"] == pytest.approx(3 / 8)
    assert row["reward_std"] == pytest.approx(math.sqrt(0.5) / 2)
    assert row["groups/zero_std"] == 1 / 4
    assert row["groups/no_signal"] == 2
    assert row["rows/unscored"] == 3


def test_what_does_not_exist_is_absent():
    row = metrics_of([[[None, None]]], truncated={(0, 0), (0, 1)})
    assert not {"reward", "reward_std", "rewards/r/mean", "completions/mean_terminated_length"} & row.keys()
    assert row["completions/clipped_ratio"] == 1.0


def test_reward_std_is_exactly_zero_where_all_are_equal():
    assert metrics_of([[[0.1] * 7]])["reward_std"] == 0.0


def test_every_key_is_documented():
    row = metrics_of([[[1.0, 0.0], [None, 1.0]]], names=("r", "s"))
    assert [key for key in row if find_metric(key) is None] == []


def test_lengths_tell_truncated_from_terminated():
    experience = rig.make_experience(truncated={(0, 0)})
    row = rollout_metrics(experience, ("r",))
    ended = [len(c.token_ids) for g in experience.groups for c in g.completions if c.finish_reason is FinishReason.STOPPED]
    assert row["completions/clipped_ratio"] == 1 / 16
    assert row["completions/mean_terminated_length"] == sum(ended) / len(ended)
    assert row["completions/max_terminated_length"] == max(ended)


def test_kl_by_token_and_by_sequence_over_rows_that_have_one():
    experience = rig.make_experience()
    kl = torch.full_like(experience.kl_PG, float("nan"))
    kl[0, 0], kl[1, 2] = 2.0, -1.0
    tokens = len(experience.groups[0].completions[0].token_ids) + len(experience.groups[1].completions[2].token_ids)
    assert kl_metrics(replace(experience, kl_PG=kl)) == {"kl": 1.0 / tokens, "kl/sequence": 0.5}
    assert kl_metrics(experience) == {}


def eval_recipe(**evaluation):
    return Recipe.model_validate(
        {"model": {"model_name_or_path": "m"}, "data": {"dataset_name": "d"}, "rewards": [{"function": "even"}], "evaluation": evaluation}
    )


def test_evaluation_in_parts_gives_each_row_its_own_stream_and_pass_at_k(monkeypatch):
    from rloo_cli.training import evaluation

    recipe = eval_recipe(num_generations_eval=3, eval_temperature=1.0)
    collector = Collector(fakes.FakeEngine(), fakes.FakeRewards(), fakes.ByteTexts(), max_steps=1)
    prompts = fakes.make_prompts(7)
    whole_experience, whole = evaluate(collector, prompts, recipe, ("even",), step=4, check_stop=lambda: None)
    monkeypatch.setattr(evaluation, "ROWS_AT_ONCE", 6)
    parts_experience, parts = evaluate(collector, prompts, recipe, ("even",), step=4, check_stop=lambda: None)
    assert parts == whole
    assert parts_experience.groups == whole_experience.groups
    assert whole["eval/prompts"] == 7
    values = [scores.values[0] for scores in whole_experience.rewards]
    assert whole["eval/rewards/even/pass@3"] == pytest.approx(sum(max(v) >= 1 for v in values) / 7)
    assert [key for key in whole if find_metric(key) is None] == []


def test_a_reward_too_large_to_compute_with_names_its_row():
    with pytest.raises(RewardError, match=r"prompt row 1, completion 0 is 1e\+308"):
        metrics_of([[[1.0, 0.0]], [[1e308, 0.0]]])
