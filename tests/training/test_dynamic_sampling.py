"""Groups without a difference in reward: left out or replaced, counted, at no cost, and to the same bits after a stop."""

import fakes
import pytest
import rig
import tiny
import torch
from processes import run_ranks
from test_ranks_run import close
from test_run import STEPS, gold, start

from rloo_cli.errors import StoppedError
from rloo_cli.run.checkpoint import find_checkpoint, list_steps
from rloo_cli.run.folder import RunFolder
from rloo_cli.run.metrics import read_metrics
from rloo_cli.training.dynamic_sampling import collect_batch
from rloo_cli.training.experience import put_back, select_groups
from rloo_cli.training.policy import Policy
from rloo_cli.types import GroupRewards

FLAT_ROWS = (0, 3)


class SomeFlat(fakes.FakeRewards):
    """As FakeRewards, but every completion of the prompts FLAT_ROWS gets the same."""

    def submit(self, key, group, state):
        super().submit(key, group, state)
        if group.prompt.row in FLAT_ROWS:
            self.waiting[key] = GroupRewards(values=((0.25,) * len(group.completions),))


class AllFlat(fakes.FakeRewards):
    """Every completion gets the same."""

    def submit(self, key, group, state):
        self.waiting[key] = GroupRewards(values=((1.0,) * len(group.completions),))


def run(path, monkeypatch, mode, *, rewards=SomeFlat, **options):
    monkeypatch.setattr(fakes, "FakeRewards", rewards)
    return start(path, monkeypatch, algorithm__dynamic_sampling=mode, data__shuffle_dataset=False, **options)


def prompts_of(folder, step):
    """(prompt row, whether it was trained on) of each group drawn for the step, in order."""
    import pyarrow.parquet as pq

    table = pq.read_table(folder.rollout_file(step), columns=["prompt_row", "advantage"]).to_pylist()[::3]
    return [(row["prompt_row"], row["advantage"] is not None) for row in table]


# --- which groups, and how many prompts ------------------------------------------------------------------------------------------


def test_filter_leaves_flat_groups_out_and_counts_them(tmp_path, monkeypatch):
    folder = run(tmp_path / "run", monkeypatch, "filter")
    rows = read_metrics(folder.metrics)
    assert [prompts_of(folder, step) for step in (1, 2, 3)] == [
        [(0, False), (1, True)],
        [(2, True), (3, False)],
        [(4, True), (0, False)],
    ]
    assert [(row["groups/dropped"], row["groups/missing"]) for row in rows[:3]] == [(1, 1)] * 3
    assert rows[0]["groups/zero_std"] == 0.5
    assert rows[0]["rows/skipped"] == 0
    assert [row["epoch"] for row in rows] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0, 2.4])


def test_resample_draws_further_prompts_until_the_batch_is_full(tmp_path, monkeypatch):
    folder = run(tmp_path / "run", monkeypatch, "resample")
    rows = read_metrics(folder.metrics)
    assert [prompts_of(folder, step) for step in (1, 2, 3)] == [
        [(0, False), (1, True), (2, True)],
        [(3, False), (4, True), (0, False), (1, True)],
        [(2, True), (3, False), (4, True)],
    ]
    assert [(row["groups/dropped"], row["groups/missing"]) for row in rows[:3]] == [(1, 0), (2, 0), (1, 0)]
    assert [row["epoch"] for row in rows[:3]] == pytest.approx([3 / 5, 7 / 5, 10 / 5])


def test_resample_goes_on_with_what_it_has_at_the_cap(tmp_path, monkeypatch):
    folder = run(tmp_path / "run", monkeypatch, "resample", rewards=AllFlat, algorithm__dynamic_sampling_max_batches=3)
    rows = read_metrics(folder.metrics)
    assert len(rows) == STEPS
    assert all((row["groups/dropped"], row["groups/missing"], row["grad_norm"]) == (6, 2, 0) for row in rows)
    assert [row["epoch"] for row in rows] == pytest.approx([6 / 5 * step for step in range(1, STEPS + 1)])
    assert len(prompts_of(folder, 1)) == 6


def test_every_completion_drawn_is_counted_and_has_a_row_of_its_own(tmp_path, monkeypatch):
    import pyarrow.parquet as pq

    folder = run(tmp_path / "run", monkeypatch, "resample")
    table = pq.read_table(folder.rollout_file(1)).to_pylist()
    assert len(table) == 9
    assert len({tuple(row["completion_ids"]) for row in table}) == 9  # random numbers of their own, in every draw
    prompts = {prompt.row: len(prompt.token_ids) for prompt in fakes.make_prompts()}
    tokens = sum(prompts[row["prompt_row"]] + len(row["completion_ids"]) for row in table)
    assert read_metrics(folder.metrics)[0]["num_tokens"] == tokens


def test_draws_ask_for_exactly_what_is_missing():
    asked = []

    def draw(first, count):
        asked.append((first, count))
        values = [(1.0, 1.0) if p % 3 else (0.0, 1.0) for p in range(first, first + count)]
        return [None] * count, [GroupRewards(values=(row,)) for row in values], {"perf/seconds/generate": 1.0}

    batch = collect_batch(draw, mode="resample", wanted=4, most=100, weights=[1.0])
    assert asked == [(0, 4), (4, 2), (6, 2), (8, 1), (9, 1)]
    assert list(batch.kept) == [0, 3, 6, 9]
    assert batch.seconds == {"perf/seconds/generate": 5.0}


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ([[1.0, 1.0, 1.0]], False),
        ([[1.0, None, 1.0]], False),
        ([[1.0, None, None]], False),  # one scored row: nobody to be compared with
        ([[None, None, None]], False),
        ([[1.0, None, 0.0]], True),
        ([[1.0, 0.0, 1.0], [-1.0, 1.0, -1.0]], True),
        ([[1.0, 0.0, 1.0], [-0.5, 0.5, -0.5]], False),  # weighted, they cancel
        ([[0.1 + 0.2, 0.3, 0.3]], True),  # raw rewards, compared exactly
    ],
)
def test_a_group_is_kept_where_two_of_its_weighted_sums_differ(values, kept):
    rewards = GroupRewards(values=tuple(tuple(row) for row in values))
    batch = collect_batch(lambda first, count: ([None], [rewards], {}), mode="filter", wanted=1, most=1, weights=[1.0, 1.0][: len(values)])
    assert list(batch.kept) == [0] * kept


# --- what it optimises -----------------------------------------------------------------------------------------------------------

FLAT_BATCH = [[1.0, 0.0, 0.5], [0.5, 0.5, 0.5], [0.0, 1.0, 1.0], [0.0, 0.0, 0.0]]


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_the_gradient_is_the_mean_over_the_groups_that_are_kept(beta):
    model = tiny.qwen2()
    reference = rig.drifted(model) if beta else None
    kept = select_groups(rig.make_experience(rewards=FLAT_BATCH, generations=3), [0, 2])
    updater = rig.make_updater(tiny.qwen2(), reference, **({"beta": beta} if beta else {}))
    gradient, after, _ = rig.gradient_of_update(updater, kept)
    expected = rig.naive_gradient(model, reference, kept, beta=beta, n=6)
    assert rig.relative(gradient, expected) < 1e-5
    assert after.advantage_PG.shape == (2, 3)


def test_without_a_penalty_only_the_length_of_the_gradient_changes():
    everything = rig.make_experience(rewards=FLAT_BATCH, generations=3)
    whole, _, _ = rig.gradient_of_update(rig.make_updater(tiny.qwen2()), everything)
    kept, _, _ = rig.gradient_of_update(rig.make_updater(tiny.qwen2()), select_groups(everything, [0, 2]))
    assert rig.relative(kept, 2 * whole) < 1e-5  # N is 6 rows in place of 12


def test_with_a_penalty_the_gradient_of_flat_groups_is_what_is_lost():
    model, reference = tiny.qwen2(), rig.drifted(tiny.qwen2())
    everything = rig.make_experience(rewards=FLAT_BATCH, generations=3)
    whole, _, _ = rig.gradient_of_update(rig.make_updater(tiny.qwen2(), reference), everything)
    kept, _, _ = rig.gradient_of_update(rig.make_updater(tiny.qwen2(), reference), select_groups(everything, [0, 2]))
    flat = rig.naive_gradient(model, reference, select_groups(everything, [1, 3]), n=12)
    assert flat.norm() > 0
    assert rig.relative(kept / 2 + flat, whole) < 1e-5


def test_rows_left_out_cost_no_forward_pass(tmp_path, monkeypatch):
    seen = []
    forward = Policy.forward

    def counting(policy, batch):
        seen.append(len(batch.rows))
        return forward(policy, batch)

    monkeypatch.setattr(Policy, "forward", counting)
    folder = run(tmp_path / "run", monkeypatch, "filter", training__layout="plain")
    kept = [trained for step in range(1, STEPS + 1) for _, trained in prompts_of(folder, step)]
    assert (len(kept), sum(kept)) == (12, 7)
    assert sum(seen) == 7 * 3 * 2  # by policy and by reference


def test_slices_of_a_batch_that_does_not_divide_are_nearly_the_same():
    model, experience = tiny.qwen2(), select_groups(rig.make_experience(prompts=4), [0, 1, 3])
    for use, groups in ((0, [0]), (1, [1, 2])):
        updater = rig.make_updater(tiny.qwen2(), slices=2, epsilon=10.0)
        after = experience if use == 0 else updater.update(experience, 0, step=1)[0]
        updater = rig.make_updater(tiny.qwen2(), slices=2, epsilon=10.0)
        gradient, _, _ = rig.gradient_of_update(updater, after, use)
        expected = rig.naive_gradient(model, None, select_groups(experience, groups))
        assert rig.relative(gradient, expected) < 1e-5


def test_put_back_gives_each_group_its_own():
    everything = rig.make_experience(prompts=3, generations=2)
    part = select_groups(everything, [0, 2])
    _, after, _ = rig.gradient_of_update(rig.make_updater(tiny.qwen2()), part)
    whole = put_back(after, everything, [0, 2])
    assert torch.equal(whole.advantage_PG[[0, 2]], after.advantage_PG)
    assert whole.advantage_PG[1].isnan().all()
    assert everything.advantage_PG.isnan().all()


# --- going on after a stop -------------------------------------------------------------------------------------------------------

VARIANTS = {
    "filter": {"mode": "filter"},
    "filter, a batch for two steps, twice": {
        "mode": "filter",
        "training__steps_per_generation": 2,
        "algorithm__num_iterations": 2,
        "algorithm__normalize_advantages": True,
    },
    "resample": {"mode": "resample"},
    "resample, a batch for two steps": {"mode": "resample", "training__steps_per_generation": 2},
    "nothing left, a batch for two steps": {"mode": "resample", "rewards": AllFlat, "training__steps_per_generation": 2},
}


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_a_run_stopped_at_any_step_and_resumed_ends_as_one_never_stopped(variant, tmp_path, monkeypatch):
    options = VARIANTS[variant]
    expected = gold(run(tmp_path / "whole", monkeypatch, **options))
    for k in range(1, STEPS):
        path = tmp_path / f"stopped-{k}"
        with pytest.raises(StoppedError, match=f"SIGTERM: step {k} is saved"):
            run(path, monkeypatch, stop_at=k, **options)
        run(path, monkeypatch, resume=find_checkpoint(path / "checkpoints"), **options)
        assert gold(RunFolder(path)) == expected


def test_overlap_draws_the_same_prompts_as_without(tmp_path, monkeypatch):
    plain = run(tmp_path / "plain", monkeypatch, "resample")
    ahead = run(tmp_path / "ahead", monkeypatch, "resample", training__async_steps=1)
    for step in range(1, STEPS + 1):
        assert prompts_of(ahead, step) == prompts_of(plain, step)
    assert [row["epoch"] for row in read_metrics(ahead.metrics)] == [row["epoch"] for row in read_metrics(plain.metrics)]


def test_epoch_strategies_follow_the_prompts_that_were_drawn(tmp_path, monkeypatch):
    folder = run(tmp_path / "run", monkeypatch, "resample", run__save_strategy="epoch")
    ends = [row["epoch"] for row in read_metrics(folder.metrics)]
    crossed = [step for step, (a, b) in enumerate(zip([0.0, *ends], ends, strict=False), start=1) if int(b + 1e-9) > int(a + 1e-9)]
    assert list_steps(folder.checkpoints) == sorted({*crossed, STEPS})
    assert crossed[0] == 2


# --- over several processes ------------------------------------------------------------------------------------------------------


class Forever:
    """monkeypatch for a process that ends with the test."""

    setattr = staticmethod(setattr)


def run_on_rank(rank, path):
    for mode in ("filter", "resample"):
        run(path / mode, Forever, mode)
    return "done"


def test_two_processes_keep_the_same_groups_as_one(tmp_path, monkeypatch):
    (tmp_path / "two").mkdir()
    assert run_ranks(run_on_rank, 2, tmp_path, tmp_path / "two") == ["done"] * 2
    for mode in ("filter", "resample"):
        alone, together = run(tmp_path / "one" / mode, monkeypatch, mode), RunFolder(tmp_path / "two" / mode)
        close(read_metrics(together.metrics), read_metrics(alone.metrics))
        for step in range(1, STEPS + 1):
            assert prompts_of(together, step) == prompts_of(alone, step)
