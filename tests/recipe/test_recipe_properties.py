"""Whatever text a recipe has: a LoadedRecipe or a RecipeError, soon."""

import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recipe_texts import VALID, load

from rloo_cli.errors import RecipeError
from rloo_cli.recipe.dump import dump_recipe
from rloo_cli.recipe.fields import LEAVES
from rloo_cli.recipe.trl_keys import OTHER_KEYS, RENAMED, TRL_KEYS

RECIPES = Path(__file__).parents[2] / "recipes"
SEEDS = [VALID, *(path.read_text() for path in sorted(RECIPES.glob("*.yaml")))]
KEYS = [*LEAVES, *TRL_KEYS, *OTHER_KEYS, *RENAMED, "model", "data", "rewards", "extends", "reward_funcs", "reward_weights", "nonsense"]
VALUES = [
    *("no", "yes", "null", "~", "", "1e-6", "-1", "0", "1", "8", "010", "1:30", "1e999", ".nan", "-.inf", "9" * 30, "9" * 5000),
    *(
        "[]",
        "{}",
        "[1, 2]",
        "[2, 1]",
        "{a: 1}",
        "[[[[]]]]",
        "'x'",
        '"\\0"',
        '"\\ud800"',
        "&a x",
        "*a",
        "!!int 3",
        "!x",
        "<<",
        "|\n  a\n b",
        "steps",
    ),
    *(
        "${HOME}",
        "${",
        "~/x",
        "../../..",
        "/dev/zero",
        "/",
        ".",
        "r.yaml",
        "x" * 5000,
        "auto",
        "none",
        "all",
        "é",
        "\u2028",
        "\ufeff",
        "\t",
        "%",
    ),
]
settings_here = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]}


def assert_loads_or_says_why(text, *overrides):
    """The outcome is one of the two that are allowed, in bounded time."""
    started = time.monotonic()
    try:
        loaded = load(text, *overrides)
        assert load(dump_recipe(loaded.recipe)).recipe == loaded.recipe
        for name in ("rewards[0].function", "algorithm.beta", "nonsense", "", "rewards[99].x.y"):
            assert loaded.locate(name)
    except RecipeError as error:
        message = error.message
        assert message
        assert len(message) < 60_000
        assert message.replace("\n", "").isprintable()
    assert time.monotonic() - started < 10


lines = st.tuples(
    st.sampled_from(["", "  ", "    ", "\t", "- "]), st.sampled_from(KEYS), st.sampled_from([": ", ":", " "]), st.sampled_from(VALUES)
)


@st.composite
def mutated(draw):
    """A real recipe with lines added, dropped, doubled, moved or replaced, and a few characters changed."""
    rows = draw(st.sampled_from(SEEDS)).split("\n")
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(rows) - 1))
        match draw(st.sampled_from(["insert", "drop", "double", "value", "swap", "cut"])):
            case "insert":
                rows.insert(at, "".join(draw(lines)))
            case "drop":
                rows = rows[:at] + rows[at + 1 :] or [""]
            case "double":
                rows.insert(at, rows[at])
            case "value":
                rows[at] = f"{rows[at].partition(':')[0]}: {draw(st.sampled_from(VALUES))}"
            case "swap":
                other = draw(st.integers(0, len(rows) - 1))
                rows[at], rows[other] = rows[other], rows[at]
            case "cut":
                rows[at] = rows[at][: draw(st.integers(0, len(rows[at])))]
    text = "\n".join(rows)
    if draw(st.booleans()):
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=3)) + text[at:]
    return text


@given(text=mutated())
@settings(max_examples=200, **settings_here)
def test_a_mutated_recipe_loads_or_says_why(text):
    assert_loads_or_says_why(text)


@pytest.mark.slow
@given(text=mutated())
@settings(max_examples=20_000, **settings_here)
def test_twenty_thousand_mutated_recipes_load_or_say_why(text):
    assert_loads_or_says_why(text)


@given(text=st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass")))
@settings(max_examples=200, **settings_here)
def test_any_bytes_load_or_say_why(text):
    assert_loads_or_says_why(text)


names = st.sampled_from(KEYS) | st.sampled_from(
    ["rewards[0]", "rewards.0.weight", "rewards[9].name", "algorithm.beta", "a.b.c", "[0]", "data.stop"]
)


@given(overrides=st.lists(st.tuples(names, st.sampled_from(VALUES)) | st.tuples(st.text(max_size=8), st.text(max_size=8)), max_size=3))
@settings(max_examples=200, **settings_here)
def test_any_overrides_load_or_say_why(overrides):
    assert_loads_or_says_why(VALID, *(f"{name}={value}" for name, value in overrides))


def test_every_key_with_every_value_loads_or_says_why():
    for value in VALUES:
        assert_loads_or_says_why(VALID + "".join(f"{key}: {value}\n" for key in LEAVES))
    for key in [*TRL_KEYS, *OTHER_KEYS, *RENAMED]:
        assert_loads_or_says_why(VALID + f"{key}: 3\n")


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("x: y\n" * 200_000, id="doubled keys"),
        pytest.param("stop: [" + "a," * 500_000 + "]", id="long list"),
        pytest.param("".join(f"k{i}: &a{i} [*a{i}]\n" for i in range(40_000)), id="anchors"),
        pytest.param("rewards:\n" + "- {functon: a.b, wieght: 3}\n" * 30_000, id="rewards"),
        pytest.param("run_name: '" + "x" * 1_000_000 + "'", id="long text"),
        pytest.param("reward_funcs: [" + "a.b," * 200_000 + "]", id="reward names"),
        pytest.param("a: " + "{a: " * 200_000, id="deep mappings"),
        pytest.param("? " * 300_000, id="complex keys"),
        pytest.param("- " * 300_000, id="nested sequences"),
        pytest.param("chat_template_kwargs: '" + '{"a":' * 100_000 + "'", id="deep JSON"),
    ],
)
def test_a_megabyte_of_trouble_ends_soon(text):
    started = time.monotonic()
    try:
        load(VALID + text)
    except RecipeError as error:
        message = error.message
        assert len(message) < 60_000
    assert time.monotonic() - started < 20
