"""Every built-in reward against completions made to break it: in time, without side effect, a float or None."""

import math
import time
from pathlib import Path

import pytest

pytest.importorskip("math_verify")

from rloo_cli import rewards
from rloo_cli.rewards import math_judge

HOSTILE = {
    "code": "__import__('os').system('touch escaped')",
    "boxed code": r"\boxed{__import__('os').system('touch escaped')}",
    "dollar code": "The answer is $__import__('os').system('touch escaped')$",
    "million digits": "9" * 10**6,
    "boxed million digits": r"\boxed{" + "9" * 10**6 + "}",
    "boxed 8,000 digits": r"\boxed{" + "9" * 8000 + "}",
    "deep brackets": r"\boxed{" + "(" * 1000 + "1" + ")" * 1000 + "}",
    "deep fractions": r"\boxed{" + r"\frac{1}{" * 900 + "1" + "}" * 901,
    "nested boxes": r"\boxed{" * 1000 + "1" + "}" * 1000,
    "open boxes": r"\boxed{" * 100_000,
    "lone surrogate": "\ud800 \\boxed{\udfff}",
    "NUL": "\0\\boxed{\0}\0",
    "megabyte of dollars": "$ " * 500_000,
    "megabyte of answers": "answer is $" * 100_000,
    "megabyte of fences": "```python\n" * 100_000,
    "megabyte of spaces": " " * 10**6,
    "megabyte of think": "<think></think>" * 70_000,
    "tower": r"\boxed{9^{9^{9^{9^{9}}}}}",
    "power": r"\boxed{2^{10^{10}}}",
    "factorial": r"\boxed{(10^9)!}",
    "sum": r"\boxed{\sum_{n=1}^{10^{9}} \frac{1}{n^3}}",
    "empty": "",
}

ARGUMENTS = {
    "cosine_length_reward": {"max_len": 100},
    "python_tests_reward": {"seconds": 1.0},
    "regex_reward": {"pattern": r"<answer>.*</answer>"},
}

LONGEST_SECONDS = 20.0
"""What one item may take here, on a busy machine; the recipe's default timeout is 30."""


@pytest.fixture(autouse=True)
def _quick_judge(monkeypatch):
    monkeypatch.setattr(math_judge, "CPU_SECONDS", 0.3)
    math_judge._judge.cache_clear()
    yield
    math_judge._judge.cache_clear()


@pytest.mark.parametrize("name", rewards.__all__)
def test_hostile_completions(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    reward = getattr(rewards, name)
    directory = Path.cwd()
    for label, text in HOSTILE.items():
        for completion in (text, [{"role": "assistant", "content": text}]):
            begin = time.monotonic()
            values = reward(
                completions=[completion],
                completion_ids=[list(range(min(len(text), 100_000)))],
                answer=["4"],
                tests=[["assert f(1) == 2"]],
                **ARGUMENTS.get(name, {}),
            )
            assert time.monotonic() - begin < LONGEST_SECONDS, label
            assert len(values) == 1, label
            assert values[0] is None or (isinstance(values[0], float) and math.isfinite(values[0])), label
            if name in ("accuracy_reward", "reasoning_accuracy_reward", "python_tests_reward", "exact_match_reward"):
                assert values[0] == 0.0, label
    assert Path.cwd() == directory
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("gold", [r"9^{9^{9^{9}}}", "(" * 1000, "9" * 10**6, "\ud800", "\0", "$ " * 500_000])
def test_hostile_gold_answers_end_too(gold):
    [score] = rewards.accuracy_reward([rf"\boxed{{{gold[:100]}}}"], answer=[gold])
    assert score in (None, 0.0, 1.0)
    assert rewards.exact_match_reward(["x"], answer=[gold]) == [None if not gold.strip() else 0.0]
