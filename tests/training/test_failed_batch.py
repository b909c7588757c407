"""The batch that training stopped at: what is kept of it, and what the error says."""

import json
import math
from dataclasses import replace

import fakes
import pyarrow.parquet as pq
import pytest
import rig
import tiny
import torch

from rloo_cli.errors import EngineError, NonFiniteError, StorageError
from rloo_cli.rollout.engine import RandomKey, SamplingParams
from rloo_cli.run import atomic
from rloo_cli.run.folder import RunFolder
from rloo_cli.training.collector import Collector
from rloo_cli.training.failed_batch import keep_failed_batch
from rloo_cli.training.non_finite import check_completions
from rloo_cli.training.recorder import rollout_rows
from rloo_cli.types import FinishReason

PARAMS = SamplingParams(max_new_tokens=9)
KEY = RandomKey(seed=0, step=5)


class FailingEngine(fakes.FakeEngine):
    """Ends the first group, and fails at the second row of the second after two tokens."""

    def generate(self, requests, params, key, *, on_group=None, check_stop=None):
        super().generate(requests[:1], params, key, on_group=on_group)
        row = requests[1].first_row + 1
        raise NonFiniteError("the logits are not finite", place="logits", value=math.nan, row=row, token=2, token_ids=[65, 66])


def collector(engine):
    return Collector(engine, fakes.FakeRewards(), tiny.byte_tokenizer(), max_steps=9)


def failed_collection(first_prompt=0):
    made = collector(FailingEngine())
    with pytest.raises(NonFiniteError) as caught:
        made.collect(fakes.make_prompts(3), PARAMS, KEY, step=5, num_generations=2, first_prompt=first_prompt, check_stop=lambda: None)
    return made, caught.value


def test_a_failure_while_sampling_names_step_prompt_completion_and_token():
    _, error = failed_collection()
    expected = "step 5: the logits is nan in completion 1 of prompt 1 (row 3, token 2); nothing was updated."
    assert error.message.startswith(expected)
    assert (error.row, error.token, error.token_ids) == (3, 2, (65, 66))


def test_of_an_unfinished_batch_whole_groups_and_the_failed_row_are_kept(tmp_path):
    made, error = failed_collection()
    kept = keep_failed_batch(RunFolder(tmp_path), error, made.rows_in_hand(error), step=5, weights_version=4)
    path = tmp_path / "failed" / "step-000005.parquet"
    assert kept.message.endswith(f"look at it: rloo rollouts show {path}")
    table = pq.read_table(path).to_pydict()
    assert table["prompt_row"] == [0, 0, 1, 1, 2, 2]
    assert [text is not None for text in table["completion"]] == [True, True, False, True, False, False]
    assert table["completion"][3] == "AB"
    assert table["completion_ids"][3] == [65, 66]
    assert table["rewards/even"] == table["reward"] == [None] * 6
    facts = json.loads(path.with_suffix(".json").read_text())
    wanted = {"step": 5, "row": 3, "prompt": 1, "token": 2, "place": "logits", "value": "nan", "weights_version": 4}
    assert {key: facts[key] for key in wanted} == wanted
    assert "torch" in facts["packages"]


def test_rows_count_on_over_the_parts_of_an_evaluation():
    made, error = failed_collection(first_prompt=10)
    assert "completion 1 of prompt 1 (row 23, token 2)" in error.message
    assert [row.completion_ids for row in made.rows_in_hand(error)][3] == (65, 66)


def test_of_a_failed_update_what_was_known_by_then_is_kept():
    model = tiny.qwen2()
    updater = rig.make_updater(model, rig.drifted(model), max_tokens=64)
    experience = rig.make_experience(seed=11)
    loss_of, calls = updater._loss_of, []

    def third_fails(*arguments, **options):
        calls.append(1)
        if len(calls) == 3:
            raise NonFiniteError("step 7: the loss is nan", place="loss", value=math.nan)
        return loss_of(*arguments, **options)

    updater._loss_of = third_fails
    with pytest.raises(NonFiniteError):
        updater.update(experience, 0, step=7)
    rows = rollout_rows(updater.experience_in_hand(), ["even"])
    known = [row.kl is not None for row in rows]
    assert any(known)
    assert not all(known)
    assert [row.advantage is not None for row in rows] == known
    assert all(row.reward is not None for row in rows)


def test_without_a_reference_advantages_are_known_before_the_pass():
    model = tiny.qwen2()
    updater = rig.make_updater(model)
    model.model.norm.weight.data.fill_(math.inf)
    with pytest.raises(NonFiniteError) as caught:
        updater.update(rig.make_experience(), 0, step=7)
    assert caught.value.place == "log-prob of the policy"
    assert caught.value.row is not None
    assert all(row.advantage is not None for row in rollout_rows(updater.experience_in_hand(), ["even"]))


def test_a_loss_that_is_not_finite_names_the_row_to_blame():
    updater = rig.make_updater(tiny.qwen2())
    experience = rig.make_experience(seed=1)
    reward_PG = experience.reward_PG.clone()
    reward_PG[2, 1] = 1e39  # finite in float64, infinite as a loss in float32
    with pytest.raises(NonFiniteError, match=r"step 3: the loss is (inf|-inf|nan), first in completion \d of prompt 2 \(row \d+\)"):
        updater.update(replace(experience, reward_PG=reward_PG), 0, step=3)


def test_a_metric_that_cannot_be_recorded_stops_before_the_weights_move():
    model = tiny.qwen2()
    updater = rig.make_updater(model)
    before, forward = rig.flat(model).clone(), updater.policy.forward

    def forward_without_entropy(batch):
        logp_N, entropy_N = forward(batch)
        return logp_N, entropy_N * math.nan

    updater.policy.forward = forward_without_entropy
    with pytest.raises(NonFiniteError, match="step 4: entropy, .* is nan; nothing was updated"):
        updater.update(rig.make_experience(), 0, step=4)
    assert torch.equal(rig.flat(model), before)


def test_a_batch_that_cannot_be_kept_does_not_hide_the_error(tmp_path, monkeypatch):
    def full(path):
        raise StorageError(f"cannot create the folder {path}: No space left on device")

    made, error = failed_collection()
    monkeypatch.setattr(atomic, "make_folder", full)
    kept = keep_failed_batch(RunFolder(tmp_path), error, made.rows_in_hand(error), step=5, weights_version=4)
    assert kept.message.startswith(error.message)
    assert "could not be kept (cannot create the folder" in kept.message
    assert "rloo rollouts" not in kept.message
    assert not (tmp_path / "failed").exists()


GROUP = rig.make_groups(prompts=1, generations=3)[0]


def spoiled(**changes):
    completions = (*GROUP.completions[:2], replace(GROUP.completions[2], **changes))
    check_completions(GROUP.prompt, completions, step=8, first_row=6, num_generations=3)


@pytest.mark.parametrize(
    ("error", "changes", "says"),
    [
        (EngineError, {"logprobs": None}, "token 0: the engine returned 0 log-probs for 2 tokens"),
        (EngineError, {"logprobs": (-1.0,)}, "token 1: the engine returned 1 log-probs for 2 tokens"),
        (EngineError, {"logprobs": (-1.0, -1.0, -1.0)}, "token 2: the engine returned 3 log-probs for 2 tokens"),
        (EngineError, {"logprobs": (-1.0, None)}, "token 1: the engine returned None"),
        (EngineError, {"logprobs": ("-1", -1.0)}, "token 0: the engine returned '-1'"),
        (EngineError, {"token_ids": (), "logprobs": ()}, "no tokens"),
        (NonFiniteError, {"logprobs": (-1.0, math.nan)}, "(row 8, token 1)"),
        (NonFiniteError, {"logprobs": (-math.inf, -1.0)}, "sampled with is -inf"),
    ],
)
def test_sampled_log_probs_that_cannot_be_used_are_refused(error, changes, says):
    with pytest.raises(error) as caught:
        spoiled(**{"token_ids": (5, 6), **changes})
    assert says in caught.value.message
    assert caught.value.message.startswith("step 8: ")
    assert "completion 2 of prompt 0" in caught.value.message


def test_sound_completions_pass_and_a_partial_group_does_not():
    spoiled()
    with pytest.raises(EngineError, match="step 8: the engine returned 2 completions of prompt 0 instead of 3"):
        check_completions(GROUP.prompt, GROUP.completions[:2], step=8, first_row=0, num_generations=3)


class OtherTokens(fakes.FakeEngine):
    """Says of its rows that a stop string ended them."""

    def generate(self, requests, params, key, *, on_group=None, check_stop=None):
        rows = [
            replace(self._completion(key, r.first_row), token_ids=(65, 66), logprobs=(-1.0, -1.0), finish_reason=FinishReason.STOP_STRING)
            for r in requests
        ]
        for index, row in enumerate(rows):
            on_group(index, (row,) * requests[index].num_generations)


@pytest.mark.parametrize(("stop", "fits"), [("B", True), ("1", False)])
def test_a_row_that_a_stop_string_ended_has_it(stop, fits):
    made, params = collector(OtherTokens()), replace(PARAMS, stop=(stop,))
    collect = lambda: made.collect(fakes.make_prompts(2), params, KEY, step=5, num_generations=2, check_stop=lambda: None)  # noqa: E731
    if fits:
        assert len(collect()[0]) == 2
        return
    with pytest.raises(EngineError, match="of prompt 0 by a stop string that is not in it .'AB'.: it reads tokens otherwise"):
        collect()
