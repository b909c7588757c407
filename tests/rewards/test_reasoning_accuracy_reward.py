import pytest

pytest.importorskip("math_verify")

from rloo_cli.rewards import reasoning_accuracy_reward

ORDINARY = [
    (r"<think> Reasoning </think> The final answer is \boxed{\frac{1}{3}}", 1.0),
    (r"<think> Reasoning </think> The final answer is \boxed{\frac{1}{2}}", 0.0),
    (r"<think> Reasoning with \boxed{\frac{1}{3}} but no final answer", 0.0),
    (r"<think> \boxed{\frac{1}{3}} </think> I do not know", 0.0),
    (r"a</think>b</think>\boxed{\frac{1}{3}}", 1.0),
]


@pytest.mark.parametrize(("completion", "score"), ORDINARY)
def test_only_what_follows_the_reasoning_counts(completion, score):
    assert reasoning_accuracy_reward([completion], solution=[r"\frac{1}{3}"]) == [score]


@pytest.mark.parametrize(("completion", "score"), ORDINARY)
def test_agrees_with_trl(completion, score):
    trl = pytest.importorskip("trl.rewards")
    assert trl.reasoning_accuracy_reward([[{"role": "assistant", "content": completion}]], [r"\frac{1}{3}"]) == [score]


def test_the_last_of_several_delimiters_counts():
    completion = r"\boxed{1} </think> \boxed{2} </reason> \boxed{3}"
    delimiters = ["</think>", "</reason>"]
    assert reasoning_accuracy_reward([completion], answer=["3"], reasoning_delimiters=delimiters) == [1.0]
    assert reasoning_accuracy_reward([completion], answer=["3"], reasoning_delimiters="<end>") == [0.0]


def test_unfinished_reasoning_scores_zero_and_an_unreadable_gold_nothing():
    assert reasoning_accuracy_reward(["thinking", r"</think>\boxed{1}"], answer=[None, None]) == [0.0, None]


def test_gold_answers_are_checked_as_for_accuracy():
    with pytest.raises(ValueError, match="more than 1 %"):
        reasoning_accuracy_reward.check_rows({"answer": [None]})
