from __future__ import annotations

import json

from recipe_texts import VALID, load

from rloo_cli.recipe.fields import LEAVES, REWARD_LEAVES
from rloo_cli.recipe.flat import flat_values, with_values

TWO_REWARDS = VALID + "  - function: think_format_reward\n    env: [A_TOKEN]\nreward_clip_range: [-1, 1]\n"


def test_every_field_stands_there_once_as_plain_data():
    flat = flat_values(load(TWO_REWARDS).recipe)
    rewards = {f"rewards[{i}].{name}" for i in (0, 1) for name in REWARD_LEAVES}
    assert flat.keys() == {leaf.path for leaf in LEAVES.values()} | rewards
    assert json.loads(json.dumps(flat)) == flat
    assert (flat["algorithm.reward_clip_range"], flat["rewards[1].env"]) == ([-1, 1], ["A_TOKEN"])


def test_changed_values_are_read_back():
    recipe = load(TWO_REWARDS).recipe
    values = {"rewards[1].env": ["B"], "run.report_to": ["tensorboard"], "algorithm.reward_clip_range": [0, 2], "training.seed": 7}
    changed = with_values(recipe, values)
    assert {name: value for name, value in flat_values(changed).items() if value != flat_values(recipe)[name]} == values
    assert with_values(changed, {name: flat_values(recipe)[name] for name in values}) == recipe
