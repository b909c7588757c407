import random

import pytest

from rloo_cli.rewards import repetition_penalty_reward


@pytest.mark.parametrize(
    ("ids", "size", "reward"),
    [([1, 2, 3, 4], 2, 0.0), ([5] * 5, 2, -0.75), ([5] * 5, 1, -0.8), ([1, 2], 3, 0.0), ([], 3, 0.0), ([1, 2, 1, 2, 1], 2, -0.5)],
)
def test_share_of_repeated_ngrams(ids, size, reward):
    assert repetition_penalty_reward([ids], ngram_size=size) == [pytest.approx(reward)]


def test_max_penalty_scales():
    assert repetition_penalty_reward([[5] * 5], ngram_size=2, max_penalty=-0.5) == [-0.375]


def test_no_reward_is_negative_zero():
    assert str(repetition_penalty_reward([[1, 2, 3, 4]])[0]) == "0.0"


@pytest.mark.parametrize("arguments", [{"max_penalty": 0.1}, {"ngram_size": 0}])
def test_senseless_arguments_are_refused(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        repetition_penalty_reward([[1]], **arguments)
    with pytest.raises(ValueError, match=next(iter(arguments))):
        repetition_penalty_reward.check_values(**arguments)


def test_agrees_with_trl():
    trl = pytest.importorskip("trl.rewards")
    random_ = random.Random(0)
    ids = [[random_.randrange(4) for _ in range(random_.randrange(40))] for _ in range(50)]
    assert repetition_penalty_reward(ids, ngram_size=3, max_penalty=-0.7) == trl.get_repetition_penalty_reward(3, -0.7)(ids)
