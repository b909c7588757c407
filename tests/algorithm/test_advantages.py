import torch
from hypothesis import given
from hypothesis import strategies as st

from rloo_cli.algorithm.advantages import (
    combine_rewards,
    has_signal,
    leave_one_out_advantages,
    normalize_advantages,
    penalised_rewards,
)

ALL = lambda reward: torch.ones_like(reward, dtype=torch.bool)  # noqa: E731
groups = st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=8).map(lambda r: torch.tensor([r], dtype=torch.float64))


def loo(reward):
    return leave_one_out_advantages(reward, ALL(reward))


def test_golden_vector_three_of_eight_correct():
    advantage = loo(torch.tensor([[1.0, 0, 0, 1, 0, 0, 1, 0]], dtype=torch.float64))[0]
    assert torch.allclose(advantage[[0, 3, 6]], torch.tensor(0.714286, dtype=torch.float64), atol=5e-7)
    assert torch.allclose(advantage[[1, 2, 4, 5, 7]], torch.tensor(-0.428571, dtype=torch.float64), atol=5e-7)


@given(groups)
def test_it_is_the_scaled_deviation_from_the_mean_and_sums_to_zero(reward):
    n = reward.shape[1]
    assert torch.allclose(loo(reward), n / (n - 1) * (reward - reward.mean()), atol=1e-9)
    assert abs(loo(reward).sum()) < 1e-8


@given(groups, st.floats(-1e3, 1e3), st.floats(0.1, 10))
def test_a_shift_changes_nothing_and_a_scale_scales(reward, shift, scale):
    assert torch.allclose(loo(reward + shift), loo(reward), atol=1e-9)
    assert torch.allclose(loo(reward * scale), scale * loo(reward), atol=1e-8)


@given(groups, st.randoms())
def test_it_permutes_with_the_rewards(reward, random):
    order = list(range(reward.shape[1]))
    random.shuffle(order)
    assert torch.allclose(loo(reward[:, order]), loo(reward)[:, order], atol=1e-9)


@given(st.floats(-1e6, 1e6), st.integers(2, 9))
def test_equal_rewards_give_exact_zeros(value, size):
    assert (loo(torch.full((1, size), value, dtype=torch.float64)) == 0).all()


def test_unscored_rows_stand_in_nobodys_baseline():
    reward = torch.tensor([[1.0, float("nan"), 0.0, 0.0]], dtype=torch.float64)
    scored = torch.tensor([[True, False, True, True]])
    assert leave_one_out_advantages(reward, scored).tolist() == [[1.0, 0.0, -0.5, -0.5]]


def test_a_group_with_one_scored_row_has_no_signal():
    reward, scored = torch.tensor([[1.0, 5.0]]), torch.tensor([[True, False]])
    assert leave_one_out_advantages(reward, scored).tolist() == [[0.0, 0.0]]
    assert has_signal(scored).tolist() == [False]


def test_a_none_of_one_function_does_not_become_zero_in_anothers_place():
    nan = float("nan")
    values = torch.tensor([[[1.0, nan, nan]], [[0.5, 0.5, nan]]], dtype=torch.float64)
    reward, scored = combine_rewards(values, ~values.isnan(), torch.tensor([2.0, 1.0], dtype=torch.float64))
    assert reward.tolist() == [[2.5, 0.5, 0.0]]
    assert scored.tolist() == [[True, True, False]]


def test_clip_comes_before_the_kl_penalty():
    reward, kl = torch.tensor([[3.0, -3.0]]), torch.tensor([[2.0, -1.0]])
    assert penalised_rewards(reward, kl, clip_range=(-1, 1), beta=0.5).tolist() == [[0.0, -0.5]]
    assert penalised_rewards(reward, kl, clip_range=None, beta=0.0).tolist() == [[3.0, -3.0]]


def test_normalising_uses_scored_and_unmasked_rows_of_the_whole_batch():
    advantage = torch.tensor([[1.0, -1.0, 0.0], [3.0, -3.0, 9.0], [0.0, 0.0, 0.0]])
    scored = torch.tensor([[True, True, True], [True, True, True], [True, False, False]])
    masked = torch.tensor([[False, False, False], [False, False, True], [False, False, False]])
    sample = torch.tensor([1.0, -1.0, 0.0, 3.0, -3.0, 0.0])
    expected = (advantage - sample.mean()) / (sample.std() + 1e-4)
    result = normalize_advantages(advantage, scored, masked)
    assert torch.allclose(result[:2], expected[:2])
    assert (result[2] == 0).all()
