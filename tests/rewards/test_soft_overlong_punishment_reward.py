import pytest

from rloo_cli.rewards import get_soft_overlong_punishment, soft_overlong_punishment_reward

LENGTHS = [0, 1, 79, 80, 81, 90, 99, 100, 101, 1000]


@pytest.mark.parametrize(("length", "reward"), [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (101, -1.0)])
def test_punishment_falls_in_a_straight_line_over_the_cache(length, reward):
    assert soft_overlong_punishment_reward([[1] * length], max_completion_len=100, soft_punish_cache=20) == [reward]


@pytest.mark.parametrize("cache", [0, 20, 100])
def test_agrees_with_trl(cache):
    trl = pytest.importorskip("trl.rewards")
    ids = [[1] * length for length in LENGTHS]
    assert soft_overlong_punishment_reward(ids, 100, cache) == trl.get_soft_overlong_punishment(100, cache)(ids)


def test_trls_name_is_a_reward_and_a_factory():
    ids = [[1] * 1152]
    assert get_soft_overlong_punishment(completion_ids=ids, completions=["…"]) == [-0.5]
    reward = get_soft_overlong_punishment(max_completion_len=1152, soft_punish_cache=100)
    assert reward.__name__ == "soft_overlong_punishment_reward"
    assert reward(completion_ids=ids, completions=["…"]) == [-1.0]


def test_a_cache_longer_than_the_completion_is_refused():
    with pytest.raises(ValueError, match="soft_punish_cache"):
        soft_overlong_punishment_reward([[1]], max_completion_len=10, soft_punish_cache=11)
    with pytest.raises(ValueError, match="soft_punish_cache"):
        get_soft_overlong_punishment.check_values(max_completion_len=100)
    soft_overlong_punishment_reward.check_values()
