import json

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recipe_texts import VALID, load

from rloo_cli.recipe.dump import dump_recipe
from rloo_cli.recipe.fields import LEAVES, REWARD_LEAVES, SECTIONS
from rloo_cli.recipe.json_schema import json_schema
from rloo_cli.recipe.schema import Recipe


def test_leaf_names_are_unique_and_described():
    assert len(LEAVES) == sum(len(model.model_fields) for model in SECTIONS.values())
    for leaf in [*LEAVES.values(), *REWARD_LEAVES.values()]:
        assert (leaf.info.description or "").endswith("."), leaf.path
    assert not LEAVES.keys() & SECTIONS.keys()


def test_dump_writes_every_default_and_loads_again():
    recipe = load(VALID + "learning_rate: 1e-6\nreward_clip_range: [-1, 1]\neval_strategy: no\n").recipe
    text = dump_recipe(recipe)
    assert load(text).recipe == recipe
    assert load(text).notices == ()
    written = yaml.safe_load(text)
    assert {name for section in SECTIONS for name in written[section]} == LEAVES.keys()
    assert dump_recipe(load(text).recipe) == text


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63) + 1, 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
    | st.sampled_from(
        ["no", "1e-6", "010", ".nan", "null", "~", "", "2024-01-01", "a\nb\n", "  x\n", "a: b", "# c", "- x", "${X}", "'", '"']
    )
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=6), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(
    kwargs=st.dictionaries(st.sampled_from(["a", "no", "1", "a b"]), values, max_size=3), text=scalars.filter(lambda v: isinstance(v, str))
)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_free_form_value_survives_a_dump(kwargs, text):
    if "<<" in json.dumps(kwargs) or "\\u0000" in json.dumps(kwargs):
        return  # a key `<<` is refused; NUL is no YAML
    recipe = load(VALID).recipe
    data = recipe.data.model_copy(update={"chat_template_kwargs": kwargs, "system_prompt": text})
    recipe = recipe.model_copy(update={"data": data})
    assert load(dump_recipe(recipe)).recipe == recipe


# --- JSON Schema


def is_valid(text):
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is an extra for development")
    return not list(jsonschema.Draft7Validator(json_schema()).iter_errors(yaml.safe_load(text)))


def test_the_schema_is_one():
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is an extra for development")
    jsonschema.Draft7Validator.check_schema(json_schema())


ACCEPTED = [
    VALID,
    VALID + "beta: 0.1\nextends: other.yaml\n",
    "extends: other.yaml\nmodel: {dtype: bfloat16}\n",
    "reward_funcs: [a.b]\nreward_weights: [1, 0.5]\n",
    VALID + "use_vllm: false\nwarmup_ratio: 0.1\nhead_chunk: null\n",
    VALID + "reward_clip_range: [-1, 1.5]\nthreads: auto\neval_strategy: 'no'\n",
]
NOT_ACCEPTED = [
    VALID + "betta: 0.1\n",
    VALID + "algorithm: {betta: 1}\n",
    VALID + "beta: -1\n",
    VALID + "num_generations: 1\n",
    VALID + "temperature: 0\n",
    VALID + "eval_strategy: sometimes\n",
    VALID + "reward_clip_range: [1]\n",
    "rewards: []\n",
    "rewards: [{weight: 1}]\n",
]


@pytest.mark.parametrize("text", ACCEPTED)
def test_the_schema_accepts(text):
    assert is_valid(text)


@pytest.mark.parametrize("text", NOT_ACCEPTED)
def test_the_schema_refuses(text):
    assert not is_valid(text)


def test_the_schema_accepts_what_a_dump_writes():
    assert is_valid(dump_recipe(load(VALID).recipe))


def test_every_key_of_the_schema_has_a_description():
    schema = json_schema()
    for name, entry in schema["properties"].items():
        assert entry.get("description"), name
    for definition in schema["definitions"].values():
        for name, entry in definition["properties"].items():
            assert entry.get("description"), name
    assert set(Recipe.model_fields) | LEAVES.keys() | {"extends", "reward_funcs", "reward_weights"} <= schema["properties"].keys()
    references = json.dumps(schema).split('"$ref": "')[1:]
    assert all(reference.startswith("#/definitions/") for reference in references)
