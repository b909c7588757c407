import pytest

pytest.importorskip("math_verify")

from rloo_cli.rewards import cosine_length_reward

LENGTHS = [1, 25, 50, 99, 100, 101, 200]


@pytest.mark.parametrize(
    ("completion", "length", "reward"),
    [
        (r"\boxed{3}", 0, 1.0),
        (r"\boxed{3}", 50, 0.75),
        (r"\boxed{3}", 100, 0.5),
        (r"\boxed{3}", 150, 0.5),
        (r"\boxed{2}", 0, -1.0),
        (r"\boxed{2}", 50, -0.75),
        (r"\boxed{2}", 100, -0.5),
    ],
)
def test_short_when_right_long_when_wrong(completion, length, reward):
    assert cosine_length_reward([completion], [[1] * length], max_len=100, answer=["3"]) == [pytest.approx(reward)]


def test_agrees_with_trl():
    trl = pytest.importorskip("trl.rewards")
    completions = [[{"content": text}] for text in (r"\boxed{3}", r"\boxed{2}") for _ in LENGTHS]
    ids = [[1] * length for length in LENGTHS] * 2
    solution = ["3"] * len(ids)
    bounds = {"min_value_wrong": -2.0, "max_value_wrong": -0.1, "min_value_correct": 0.2, "max_value_correct": 3.0}
    ours = cosine_length_reward(completions, ids, max_len=100, solution=solution, **bounds)
    assert ours == pytest.approx(trl.get_cosine_scaled_reward(100, **bounds)(completions, solution, ids))


def test_an_unreadable_gold_scores_nothing():
    assert cosine_length_reward(["3"], [[1]], max_len=10, answer=[""]) == [None]


def test_max_len_has_to_be_a_length():
    with pytest.raises(ValueError, match="max_len"):
        cosine_length_reward(["3"], [[1]], max_len=0, answer=["3"])
    with pytest.raises(ValueError, match="max_len"):
        cosine_length_reward.check_values(max_len=0)


def test_gold_answers_are_checked_as_for_accuracy():
    assert cosine_length_reward.check_rows({"gold": ["3"]}, column="gold", max_len=10) == []
    with pytest.raises(ValueError, match="more than 1 %"):
        cosine_length_reward.check_rows({"answer": [None]}, max_len=10)
