import hostile_rewards
import pytest


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_reward_that_fails_two_times_in_a_hundred_is_counted_and_learnt_from(tmp_path):
    figures = hostile_rewards.measure(tmp_path, 60)
    assert hostile_rewards.holds(figures), figures


def test_a_failure_that_is_not_counted_is_noticed():
    figures = {
        "exit code": 0,
        "asked steps": 3,
        "steps": 3,
        "failures by the function": 2,
        "steps where they differ": [],
        "rows with another reward than they deserve": 0,
        "reward of the first ten steps": 0.4,
        "reward of the last ten steps": 0.4,
    }
    assert hostile_rewards.holds(figures)
    for broken in (
        {"exit code": 4},
        {"steps where they differ": [2]},
        {"rows with another reward than they deserve": 1},
        {"asked steps": 40},
    ):
        assert not hostile_rewards.holds(figures | broken)
