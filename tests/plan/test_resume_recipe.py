from __future__ import annotations

from pathlib import Path

import pytest

from rloo_cli.errors import RefusedError
from rloo_cli.plan import resume
from rloo_cli.recipe.schema import Recipe


def recipe(**sections) -> Recipe:
    document = {
        "model": {"model_name_or_path": "m"},
        "data": {"dataset_name": "d"},
        "rewards": [{"function": "exact_match_reward"}],
        "training": {"prompts_per_step": 2, "max_steps": 10},
    }
    for name, values in sections.items():
        document[name] = values if name == "rewards" else {**document.get(name, {}), **values}
    return Recipe.model_validate(document)


def recipe_for_resume(new, old):
    return resume.recipe_for_resume(new, old, run=Path("runs/mine"))


def test_the_same_recipe_goes_on_without_a_word():
    assert recipe_for_resume(recipe(), recipe()) == (recipe(), [])


def test_what_auto_decided_at_the_start_stays():
    old = recipe(training={"bf16": False, "threads": 2, "layout": "packed", "head_chunk": None, "max_tokens_per_micro_batch": 4096})
    assert recipe_for_resume(recipe(), old) == (old, [])


@pytest.mark.parametrize(("field", "asked", "was"), [("bf16", True, False), ("max_tokens_per_micro_batch", "auto", 4096)])
def test_what_was_asked_for_and_stays_otherwise_is_said(field, asked, was):
    old = recipe(training={field: was})
    merged, changes = recipe_for_resume(recipe(training={field: asked}), old)
    assert merged == old
    assert [line.partition(", as")[0] for line in changes] == [f"training.{field}: stays {was!r}"]
    assert recipe_for_resume(recipe(training={field: was}), old) == (old, [])


def test_a_refusal_names_the_run():
    with pytest.raises(RefusedError, match="differs from that of runs/mine in"):
        recipe_for_resume(recipe(training={"learning_rate": 1e-3}), recipe())


def test_safe_fields_are_taken_over_and_named():
    merged, changes = recipe_for_resume(
        recipe(run={"save_steps": 5}, evaluation={"max_eval_samples": 3}, rewards=[{"function": "exact_match_reward", "timeout": 99.0}]),
        recipe(),
    )
    assert (merged.run.save_steps, merged.evaluation.max_eval_samples, merged.rewards[0].timeout) == (5, 3, 99.0)
    assert len(changes) == 3
    assert "run.save_steps: 5 from here on (was 500)" in changes


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"training": {"learning_rate": 1e-3}}, "training.learning_rate"),
        ({"algorithm": {"beta": 0.5}}, "algorithm.beta"),
        ({"training": {"threads": 3}}, "training.threads"),
        ({"rewards": [{"function": "exact_match_reward", "weight": 2.0}]}, r"rewards\[0\].weight"),
        ({"rewards": [{"function": "exact_match_reward"}, {"function": "regex_reward"}]}, r"rewards\[1\].function"),
        ({"training": {"max_steps": 20}}, "training.max_steps.*every learning rate"),
    ],
)
def test_what_changes_the_numbers_is_refused_by_name(changed, named):
    with pytest.raises(RefusedError, match=named):
        recipe_for_resume(recipe(**changed), recipe(training={"threads": 2}))


def test_a_reward_that_is_gone_is_refused():
    with pytest.raises(RefusedError, match=r"rewards\[1\].function.*gone"):
        recipe_for_resume(recipe(), recipe(rewards=[{"function": "exact_match_reward"}, {"function": "regex_reward"}]))


def test_a_constant_schedule_may_be_longer():
    old = recipe(training={"lr_scheduler_type": "constant"})
    merged, changes = recipe_for_resume(recipe(training={"lr_scheduler_type": "constant", "max_steps": 20}), old)
    assert merged.training.max_steps == 20
    assert len(changes) == 1
