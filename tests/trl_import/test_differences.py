"""The tables of docs/from-trl.md: of what exists on both sides."""

import inspect
import re

import pytest

from rloo_cli.recipe.fields import LEAVES
from rloo_cli.recipe.trl_keys import TRL_KEYS, different_defaults
from rloo_cli.run.metrics import METRICS
from rloo_cli.trl_import.differences import KEPT, MEANINGS, METRIC_NAMES, NEEDS, SAME_EFFECT, default_rows, meaning_lines
from rloo_cli.trl_import.objects import INIT_FIELDS, LORA_DEFAULTS, LORA_FIELDS

OF_THE_TRAINER = ("loss", "grad_norm", "learning_rate")
"""Metrics that transformers' Trainer logs, not TRL's code."""


def test_metrics_have_their_names_on_both_sides():
    assert [ours for ours, _ in METRIC_NAMES.values() if ours not in METRICS] == []
    trl = pytest.importorskip("trl", reason="TRL is not installed; its metrics are looked for in its source where it is")
    source = inspect.getsource(trl.RLOOTrainer) + inspect.getsource(trl.RLOOTrainer.__mro__[1])
    for name in METRIC_NAMES.keys() - set(OF_THE_TRAINER):
        text = re.sub("NAME", r"{.*?}", name.removeprefix("eval_"))
        assert re.search(f'"{text}"', source), name


def test_what_is_said_of_defaults_is_said_of_defaults_that_differ():
    names = {name for name, *_ in default_rows()}
    assert names.isdisjoint(SAME_EFFECT)
    assert set(KEPT) <= names
    assert SAME_EFFECT <= different_defaults().keys()
    assert all(name in LEAVES and switch in LEAVES for name, switch in NEEDS.items())


def test_differences_are_told_where_they_are_met():
    plain, every = (
        meaning_lines({}),
        meaning_lines({"mask_truncated_completions": True, "normalize_advantages": True, "eval_strategy": "steps", "output_dir": "x"}),
    )
    assert len(plain) < len(every) == len(MEANINGS)
    assert meaning_lines({"num_iterations": 2}) == [line for line in plain if not line.startswith("the loss of the first update")]


def test_objects_say_keys_of_the_table():
    assert {field for field in (*INIT_FIELDS.values(), *LORA_FIELDS.values()) if field not in LEAVES} <= TRL_KEYS.keys()
    peft = pytest.importorskip("peft", reason="peft is not installed; its LoraConfig is compared with the table where it is")
    fresh = peft.LoraConfig().to_dict()
    assert {name: fresh[name] for name in LORA_DEFAULTS} == dict(LORA_DEFAULTS)
    assert LORA_FIELDS.keys() <= fresh.keys()
