"""The kwargs of built-in rewards are looked at with the recipe, before data or model are touched."""

import pytest

from rloo_cli.errors import RecipeError
from rloo_cli.plan.prepare import check_recipe

HEAD = "model: {model_name_or_path: m/m}\ndata: {dataset_name: d/d}\nrewards:\n"

WRONG = {
    "function: regex_reward\n    kwargs: {pattern: '(['}": "pattern: `rloo_cli.rewards.regex_reward`: pattern '([' is no regular expression: unterminated",
    "function: regex_reward\n    kwargs: {pattern: 5}": "pattern: `rloo_cli.rewards.regex_reward`: input should be a valid string, got 5",
    "function: rloo_cli.rewards.regex.regex_reward\n    kwargs: {pattern: '('}": "pattern: `rloo_cli.rewards.regex.regex_reward`: pattern '('",
    "function: regex_reward\n    kwargs: {pattern: a, match: all}": "match: `rloo_cli.rewards.regex_reward`: input should be 'partial' or 'full', got 'all'",
    "function: regex_reward\n    kwargs: {pattern: a, flags: i}": "flags: `rloo_cli.rewards.regex_reward` takes no `flags`.",
    "function: repetition_penalty_reward\n    kwargs: {ngram_size: 0}": "ngram_size: `rloo_cli.rewards.repetition_penalty_reward`: ngram_size (0) must",
    "function: repetition_penalty_reward\n    kwargs: {max_penalty: 1}": "max_penalty: `rloo_cli.rewards.repetition_penalty_reward`: max_penalty (1) must not be",
    "function: soft_overlong_punishment_reward\n    kwargs: {soft_punish_cache: -1}": "soft_punish_cache: `rloo_cli.rewards.soft_overlong_punishment_reward`: soft_punish",
    "function: cosine_length_reward\n    kwargs: {max_len: 0}": "max_len: `rloo_cli.rewards.cosine_length_reward`: max_len (0) must be at least 1",
    "function: accuracy_reward\n    kwargs: {column: 3}": "column: `rloo_cli.rewards.accuracy_reward`: input should be a valid string, got 3",
    "function: python_tests_reward\n    kwargs: {seconds: 0}": "seconds: `rloo_cli.rewards.python_tests_reward`: seconds (0) must be positive",
    "function: python_tests_reward\n    kwargs: {memory_mb: 1}": "memory_mb: `rloo_cli.rewards.python_tests_reward`: memory_mb (1) must be at least 64",
    "function: exact_match_reward\n    kwargs: {strip: 'yes please'}": "strip: `rloo_cli.rewards.exact_match_reward`: input should be a valid boolean",
}


@pytest.mark.parametrize(("entry", "message"), WRONG.items(), ids=lambda text: text[:60])
def test_a_senseless_parameter_is_one_line_at_its_place(tmp_path, entry, message):
    if "accuracy" in entry or "cosine" in entry:
        pytest.importorskip("math_verify")
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"{HEAD}  - {entry}\n")
    with pytest.raises(RecipeError) as caught:
        check_recipe(recipe)
    (line,) = caught.value.message.splitlines()
    column = 1 + (f"    {entry.splitlines()[1].strip()}").index(message.split(":")[0]) + len(message.split(":")[0]) + 2
    assert line.startswith(f"{recipe}:5:{column}: rewards[0].kwargs.{message}")


RIGHT = [
    "{function: regex_reward, kwargs: {pattern: '(?s)a.+', match: full}}",
    "{function: repetition_penalty_reward, kwargs: {ngram_size: 4, max_penalty: -1}}",
    "{function: get_soft_overlong_punishment, kwargs: {max_completion_len: 512}}",
    "{function: python_tests_reward, kwargs: {score: all, seconds: 2, memory_mb: 512}}",
    "{function: exact_match_reward, kwargs: {column: null, after: x, ignore_case: true}}",
    "{function: reasoning_accuracy_reward, kwargs: {reasoning_delimiters: ['</think>', '</r>']}}",
    "{function: reasoning_accuracy_reward, kwargs: {reasoning_delimiters: '</r>'}}",
    "{function: cosine_length_reward, kwargs: {max_len: 100, min_value_wrong: -2}}",
]


@pytest.mark.parametrize("entry", RIGHT)
def test_parameters_that_make_sense_pass(tmp_path, entry):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"{HEAD}  - {entry}\n")
    check_recipe(recipe)


def test_several_faults_are_told_at_once(tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"{HEAD}  - {{function: regex_reward, kwargs: {{pattern: '('}}}}\n  - {{function: no_reward}}\n")
    with pytest.raises(RecipeError) as caught:
        check_recipe(recipe)
    first, second, last = caught.value.message.splitlines()
    assert ": rewards[0].kwargs.pattern: " in first
    assert ": rewards[1].function: there is no built-in reward `no_reward`." in second
    assert "Its public functions: accuracy_reward, " in second
    assert last.startswith("2 errors.")
