import pytest

from rloo_cli.rewards import exact_match_reward


@pytest.mark.parametrize(
    ("completion", "gold", "arguments", "score"),
    [
        ("Paris", "Paris", {}, 1.0),
        (" Paris\n", "Paris", {}, 1.0),
        (" Paris", "Paris", {"strip": False}, 0.0),
        ("paris", "Paris", {}, 0.0),
        ("paris", "Paris", {"ignore_case": True}, 1.0),
        ("Paris.", "Paris", {}, 0.0),
        ("Paris.", "Paris", {"ignore_punctuation": True}, 1.0),
        ("<t>x</t> 12", 12, {"after": "</t>"}, 1.0),
        ("12", 12, {"after": "</t>"}, 0.0),
        ("a</t>b</t>c", "c", {"after": "</t>"}, 1.0),
        ("None", None, {}, None),
        ("", "", {}, None),
        ("x", ["x"], {}, None),
    ],
)
def test_score(completion, gold, arguments, score):
    assert exact_match_reward([completion], answer=[gold], **arguments) == [score]
    assert exact_match_reward([[{"role": "assistant", "content": completion}]], gold=[gold], column="gold", **arguments) == [score]


def test_check_rows_counts_rows_without_an_answer():
    assert exact_match_reward.check_rows({"answer": ["a", "b"]}) == []
    with pytest.raises(ValueError, match="1 of 2 gold answers"):
        exact_match_reward.check_rows({"label": ["a", None]}, column="label")
