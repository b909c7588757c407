from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rloo_cli.algorithm.advantages import leave_one_out_advantages
from rloo_cli.inspect.rescoring import correlation, leave_one_out, sign_change
from rloo_cli.inspect.step_summary import spread
from rloo_cli.run.visible import ESCAPED_KINDS, KEPT, on_one_line, visible

REWARDS = st.lists(st.none() | st.floats(-10, 10), min_size=1, max_size=9)


@given(REWARDS)
def test_advantages_are_those_of_training(rewards):
    values = torch.tensor([[math.nan if value is None else value for value in rewards]], dtype=torch.float64)
    is_scored = torch.tensor([[value is not None for value in rewards]])
    expected = leave_one_out_advantages(values.nan_to_num(), is_scored)[0]
    assert leave_one_out(rewards) == pytest.approx(expected.tolist(), abs=1e-9)


def test_equal_rewards_give_exact_zeros():
    assert leave_one_out([0.1, 0.1, 0.1]) == [0.0, 0.0, 0.0]


@given(st.lists(st.tuples(st.integers(-50, 50), st.integers(-50, 50)), min_size=2, max_size=20))
def test_the_correlation_is_numpys(pairs):
    pairs = [(float(a), float(b)) for a, b in pairs]
    found = correlation(pairs)
    if len({a for a, _ in pairs}) == 1 or len({b for _, b in pairs}) == 1:
        assert found is None
    else:
        assert found == pytest.approx(np.corrcoef(np.array(pairs).T)[0, 1], abs=1e-9)


@pytest.mark.parametrize(
    ("old", "new", "change"),
    [
        (1, 2, "same"),
        (0, 0, "same"),
        (-1, -2, "same"),
        (1, -1, "flipped"),
        (-1, 1, "flipped"),
        (0, 1, "gained"),
        (1, 0, "lost"),
        (-1, 0, "lost"),
    ],
)
def test_signs(old, new, change):
    assert sign_change(old, new) == change


def test_what_is_not_finite_is_left_out_of_means():
    found = spread([1.0, float("nan"), None, float("inf"), 3.0])
    assert (found.count, found.mean, found.least, found.most) == (2, 2.0, 1.0, 3.0)
    assert spread([None]).mean is None


@given(st.text(st.characters()))
def test_nothing_that_a_terminal_obeys_is_left(text):
    import unicodedata

    shown = visible(text)
    assert all(character in KEPT or unicodedata.category(character) not in ESCAPED_KINDS for character in shown)
    shown.encode()  # no lone surrogate
    assert "\n" not in on_one_line(text, 20)
    assert len(on_one_line(text, 20)) <= 20


def test_ordinary_text_of_any_script_stays():
    for text in ("naïve", "数学", "👩‍👩‍👧", "می‌خواهم", "a\nb", "x²"):
        assert visible(text) == text
