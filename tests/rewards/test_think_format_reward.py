import pytest

from rloo_cli.rewards import think_format_reward

CASES = [
    ("<think>\nThis is my reasoning.\n</think>\nThis is my answer.", 1.0),
    ("<think>\nThis is my reasoning.\nThis is my answer.", 0.0),
    ("<think></think>", 1.0),
    (" <think>a</think>b", 0.0),
    ("<think>a<think>b</think>c", 0.0),
    ("<think>a</think>b<think>c</think>", 0.0),
    ("<think>a</think>b</think>c", 1.0),
    ("</think><think>", 0.0),
    ("<think>", 0.0),
    ("", 0.0),
]


@pytest.mark.parametrize(("text", "score"), CASES)
def test_format(text, score):
    assert think_format_reward([text]) == [score]
    assert think_format_reward([[{"role": "assistant", "content": text}]]) == [score]


@pytest.mark.parametrize(("text", "score"), CASES)
def test_agrees_with_trl(text, score):
    trl = pytest.importorskip("trl.rewards")
    assert trl.think_format_reward([[{"content": text}]]) == [score]
