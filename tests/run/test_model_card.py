from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rloo_cli.recipe.load import load_recipe
from rloo_cli.recipe.schema import Recipe
from rloo_cli.run.model_card import CardFacts, model_card

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = load_recipe(ROOT / "recipes" / "quickstart.yaml").recipe
HUB = {
    "model": {"model_name_or_path": "Qwen/Qwen2-0.5B-Instruct"},
    "data": {"dataset_name": "trl-lib/DeepMath-103K", "dataset_test_split": "test"},
    "rewards": [{"function": "rloo_cli.rewards.accuracy_reward"}],
}
ROWS = [
    {"step": 0, "eval/reward": 0.07, "eval/completions/mean_length": 7.9, "eval/prompts": 512.0},
    *({"step": n, "reward": n / 100, "completions/mean_length": 10.0 + n, "loss": 0.1} for n in range(1, 41)),
    {"step": 40, "eval/reward": 0.85, "eval/completions/mean_length": 28.0, "eval/prompts": 512.0},
]


def facts(recipe=QUICKSTART, *, rows=ROWS, name="my-run", **options):
    return CardFacts(name=name, recipe=recipe, step=40, rows=rows, versions={"rloo": "0.1", "torch": "2.9"}, **options)


def recipe_of(**sections):
    return Recipe.model_validate(
        {name: {**HUB[name], **sections.get(name, {})} if name != "rewards" else sections.get(name, HUB[name]) for name in HUB}
    )


def front(card):
    """The YAML in front, as the hub reads it."""
    match = re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)
    return yaml.safe_load(match[1])


def test_the_front_names_what_is_on_the_hub():
    assert front(model_card(facts(recipe_of()))) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["rloo", "reinforcement-learning"],
        "base_model": "Qwen/Qwen2-0.5B-Instruct",
        "base_model_relation": "finetune",
        "datasets": ["trl-lib/DeepMath-103K"],
    }


def test_an_adapter_and_a_model_that_sees_say_so():
    adapter = front(model_card(facts(recipe_of(model={"use_peft": True}), sees_images=True)))
    assert adapter["library_name"] == "peft"
    assert adapter["base_model_relation"] == "adapter"
    assert adapter["pipeline_tag"] == "image-text-to-text"
    assert "lora" in adapter["tags"]


def test_local_folders_are_no_hub_ids_and_their_way_is_not_told():
    card = model_card(
        facts(recipe_of(model={"model_name_or_path": "/home/jane/secret-project/model"}, data={"dataset_name": "~/data/set.jsonl"}))
    )
    assert "base_model" not in front(card)
    assert "datasets" not in front(card)
    assert "jane" not in card
    assert "Trained from `model`: 40 optimizer steps of [RLOO](https://arxiv.org/abs/2402.14740)" in card
    assert "on prompts of `set.jsonl`, for the rewards `rloo_cli.rewards.accuracy_reward`" in card


def test_the_evaluation_before_and_after_stands_side_by_side():
    card = model_card(facts(recipe_of()))
    assert "Split `test`, 1 completion a prompt." in card
    assert "| metric | before training | after 40 steps |\n|---|---|---|\n| `reward` | 0.07 | 0.85 |\n" in card


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (ROWS[:-1], "| metric | before training |\n"),
        (ROWS[1:], "| metric | after 40 steps |\n"),
        (ROWS[1:-1], "## Evaluation\n\nThe run made none.\n"),
    ],
)
def test_what_was_not_evaluated_is_not_told(rows, text):
    assert text in model_card(facts(rows=rows))


def test_of_training_the_first_and_the_last_steps_are_told():
    assert "| metric, mean of 10 steps | first | last |\n|---|---|---|\n| `reward` | 0.055 | 0.355 |\n" in model_card(facts())
    assert "No step was recorded." in model_card(facts(rows=[]))


def test_the_recipe_is_told_without_the_place_where_it_ran():
    run = {"run": {"output_dir": "/secret/runs", "push_to_hub": True}}
    recipe = Recipe.model_validate({**HUB, **run, "generation": {"temperature": 0.8, "vllm_server_base_url": "http://gpu17:8000"}})
    card = model_card(facts(recipe))
    assert "- `generation.temperature`: `0.8`\n" in card
    for hidden in ("output_dir", "gpu17", "push_to_hub"):
        assert hidden not in card


def test_secrets_are_masked():
    recipe = recipe_of(rewards=[{"function": "my.reward", "kwargs": {"key": "very-secret-value"}}])
    assert "very-secret-value" in model_card(facts(recipe))
    assert "very-secret-value" not in model_card(facts(recipe), secrets=["very-secret-value"])


def test_the_paper_is_cited():
    card = model_card(facts())
    assert "Back to Basics" in card
    assert "2402.14740" in card


HOSTILE = st.text(min_size=1, max_size=60) | st.sampled_from(
    [
        "---\nlicense: mit\n---",
        "a: b\n- c",
        "```\n# title",
        "x` <script>alert(1)</script> `",
        "| a | b |",
        "\x1b[2J",
        "!!python/object",
        "{{x}}",
        "`",
        "'\"",
        "no",
    ]
)


@given(model=HOSTILE, dataset=HOSTILE, name=HOSTILE, reward=HOSTILE, metric=HOSTILE)
@settings(max_examples=150, deadline=None)
def test_strange_names_stay_names(model, dataset, name, reward, metric):
    recipe = recipe_of(
        model={"model_name_or_path": model},
        data={"dataset_name": dataset, "system_prompt": reward},
        rewards=[{"function": "my.f", "name": reward}],
    )
    rows = [{"step": 1, "reward": 0.5}, {"step": 1, f"eval/custom/{metric}": 1.0, "eval/reward": 0.5}]
    card = model_card(facts(recipe, rows=rows, name=name))
    document = front(card)
    assert set(document) <= {"library_name", "pipeline_tag", "tags", "base_model", "base_model_relation", "datasets"}
    assert document.get("base_model", model) == model
    assert document.get("datasets", [dataset]) == [dataset]
    body = card.split("\n---\n", 1)[1]
    headings = [line for line in body.splitlines() if line.startswith("#")]
    assert [line.split()[:2] for line in headings[1:]] == [
        ["##", word] for word in ("Evaluation", "Training", "Recipe", "Versions", "Citation")
    ]
    assert headings[0].startswith("# `")
    table = [line for line in body.splitlines() if line.startswith("|")]
    assert all(len(re.findall(r"(?<!\\)\|", line)) == len(re.findall(r"(?<!\\)\|", table[0])) for line in table[:4])
    outside = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", body.partition("## Citation")[0], flags=re.DOTALL)
    assert "<script>" not in outside
