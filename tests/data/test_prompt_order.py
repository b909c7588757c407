from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rloo_cli.data.order import prompt_row


@given(st.integers(1, 60), st.integers(0, 2**63 - 1), st.integers(0, 5))
def test_every_epoch_is_a_permutation(num_prompts, seed, epoch):
    rows = [prompt_row(epoch * num_prompts + i, num_prompts=num_prompts, seed=seed, shuffle=True) for i in range(num_prompts)]
    assert sorted(rows) == list(range(num_prompts))


def test_the_order_is_the_same_however_it_is_asked_for():
    def rows(positions):
        return {p: prompt_row(p, num_prompts=7, seed=3, shuffle=True) for p in positions}

    assert rows(range(70)) == rows(reversed(range(70)))


def test_epochs_and_seeds_differ():
    def order(seed, epoch):
        return tuple(prompt_row(epoch * 50 + i, num_prompts=50, seed=seed, shuffle=True) for i in range(50))

    assert len({order(seed, epoch) for seed in (0, 1, 42) for epoch in range(3)}) == 9


def test_the_order_is_pinned_for_good():
    """A resumed run of an older version has to find this order again."""
    assert [prompt_row(i, num_prompts=10, seed=42, shuffle=True) for i in range(12)] == PINNED


def test_without_shuffling_the_rows_follow_one_another():
    assert [prompt_row(i, num_prompts=3, seed=9, shuffle=False) for i in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_positions_that_do_not_exist():
    for position, num_prompts in ((-1, 3), (0, 0)):
        with pytest.raises(ValueError):
            prompt_row(position, num_prompts=num_prompts, seed=0, shuffle=True)


def test_the_first_place_is_taken_by_every_row_about_equally_often():
    counts = [0] * 5
    for seed in range(2000):
        counts[prompt_row(0, num_prompts=5, seed=seed, shuffle=True)] += 1
    assert all(320 < count < 480 for count in counts), counts


PINNED = [2, 0, 6, 5, 4, 3, 1, 7, 8, 9, 2, 5]
