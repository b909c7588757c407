"""Entries of `rewards` that are models, and TRL's ways to name one."""

from pathlib import Path

import pytest
from recipe_texts import VALID, faults_of, lines_of, load

from rloo_cli.recipe.reward_rules import reward_name

HEAD = VALID.partition("rewards:")[0]


def rewards_of(text, *overrides):
    return [(e.function, e.model, e.weight, reward_name(e)) for e in load(HEAD + text, *overrides).recipe.rewards]


def folder(name="rm"):
    Path(name).mkdir()
    (Path(name) / "config.json").write_text("{}")
    return str(Path(name).absolute())


def test_a_model_stands_beside_functions_with_fields_of_its_own():
    here = folder()
    text = "rewards:\n- {model: rm, weight: 2, max_length: 512, batch_size: 4, device: cpu, dtype: bfloat16}\n- model: owner/Skywork-RM\n  revision: v1\n- function: accuracy_reward\n"
    assert rewards_of(text) == [
        (None, here, 2.0, "rm"),
        (None, "owner/Skywork-RM", 1.0, "Skywork-RM"),
        ("rloo_cli.rewards.accuracy_reward", None, 1.0, "accuracy_reward"),
    ]
    first, second, _ = load(HEAD + text).recipe.rewards
    assert (first.max_length, first.batch_size, first.device, first.dtype) == (512, 4, "cpu", "bfloat16")
    assert second.revision == "v1"


def test_a_models_folder_is_looked_for_beside_the_recipe_and_variables_are_replaced():
    here = folder("models")
    loaded = load(HEAD + "rewards: [{model: '${MODELS}'}]\n", environ={"MODELS": "models"})
    assert loaded.recipe.rewards[0].model == here


@pytest.mark.parametrize(
    ("key", "kinds"),
    {
        "reward_funcs: [accuracy_reward, owner/other, rm, my.lib.f]\nreward_weights: [1, 2, 3, 4]": [
            "function",
            "model",
            "model",
            "function",
        ],
        "reward_model_name_or_path: owner/rm\nreward_funcs: [accuracy_reward]\nreward_weights: [1, 2]": ["model", "function"],
        "reward_model_name_or_path: owner/rm\nreward_funcs: null": ["model"],
        "reward_model_path: owner/rm": ["model"],
        "reward_model_name_or_path: null\nreward_funcs: [accuracy_reward]": ["function"],
    }.items(),
)
def test_the_ways_of_trl_to_name_a_reward_model(key, kinds):
    folder()
    found = rewards_of(key + "\n")
    assert ["function" if function else "model" for function, *_ in found] == kinds
    assert [weight for *_, weight, _ in found] == ([float(i + 1) for i in range(len(kinds))] if "weights" in key else [1.0] * len(kinds))


def test_an_older_name_is_told():
    (notice,) = load(HEAD + "reward_model_path: owner/rm\n").notices
    assert notice == "r.yaml:5:1: reward_model_path: an older name of `reward_model_name_or_path`; read as that."


FAULTS = {
    "rewards: [{model: a/b, function: accuracy_reward}]": "5:12: rewards[0].model: `function` is given as well; an entry has one of them.",
    "rewards: [{}]": "5:11: rewards[0].function: required: the dotted import path of the function, or a `model:`.",
    "rewards: [{model: null}]": "5:11: rewards[0].function: required: the dotted import path of the function, or a `model:`.",
    "rewards: [{model: a/b, kwargs: {x: 1}}]": "5:32: rewards[0].kwargs: this entry is a model, and `kwargs` is for functions; remove it.",
    "rewards: [{model: a/b, timeout: 5}]": "5:33: rewards[0].timeout: this entry is a model, and `timeout` is for functions; remove it.",
    "rewards: [{model: a/b, call: batch}]": "5:30: rewards[0].call: this entry is a model, and `call` is for functions; remove it.",
    "rewards: [{function: a.b, max_length: 5}]": "5:39: rewards[0].max_length: this entry is a function, and `max_length` is for models; remove it.",
    "rewards: [{function: a.b, device: cpu}]": "5:35: rewards[0].device: this entry is a function, and `device` is for models; remove it.",
    "rewards: [{model: ./none}]": "5:19: rewards[0].model: './none': no such file or folder in `.`; a hub id is NAME or OWNER/NAME.",
    "rewards: [{model: a/b}, {model: c/b}]": "5:25: rewards[1]: its name `b` is that of rewards[0]; give one of them a `name:`.",
    "reward_funcs: [./none]": "5:16: rewards[0].model: './none': no such file or folder in `.`; a hub id is NAME or OWNER/NAME.",
    "rewards: [{function: a.b}]\nreward_model_name_or_path: c/d": "6:1: reward_model_name_or_path: `rewards` is given as well; write it as an entry `- model:` there.",
}


@pytest.mark.parametrize(("text", "fault"), FAULTS.items(), ids=FAULTS)
def test_faults_of_reward_models(text, fault):
    assert fault in faults_of(HEAD + text + "\n")


def test_a_folder_whose_name_is_no_word_needs_a_name():
    folder("my rm")
    assert faults_of(HEAD + "rewards: [{model: my rm}]\n") == [
        "5:19: rewards[0].model: its name is no word, as metrics need it: write a `name:` beside it."
    ]
    assert rewards_of("rewards: [{model: my rm, name: rm}]\n")[0][3] == "rm"


def test_a_model_can_be_set_on_the_command_line():
    assert rewards_of("rewards: [{model: a/b}]\n", "rewards[0].weight=3")[0][2] == 3.0
    assert lines_of(HEAD + "rewards: [{model: a/b}]\n", "rewards[0].function=x.y")[0].endswith("an entry has one of them.")
