import pytest

from rloo_cli.rewards import regex_reward


@pytest.mark.parametrize(
    ("pattern", "match", "scores"),
    [
        (r"\d+", "partial", [1.0, 0.0, 1.0]),
        (r"\d+", "full", [0.0, 0.0, 1.0]),
        (r"(?i)THE", "partial", [1.0, 0.0, 0.0]),
        (r"", "partial", [1.0, 1.0, 1.0]),
        (r"", "full", [0.0, 1.0, 0.0]),
    ],
)
def test_score(pattern, match, scores):
    completions = ["the 1st", "", [{"role": "assistant", "content": "42"}]]
    assert regex_reward(completions, pattern=pattern, match=match) == scores


def test_a_broken_pattern_is_told():
    with pytest.raises(ValueError, match="'\\(' is no regular expression: missing \\)"):
        regex_reward(["x"], pattern="(")


def test_an_unknown_kind_of_match_is_told():
    with pytest.raises(ValueError, match="partial or full"):
        regex_reward(["x"], pattern="x", match="fullmatch")
