"""No dead option: the code outside recipe/ reads every field, and some test names it."""

import re
from pathlib import Path

import pytest

from rloo_cli.recipe.schema import Recipe, RewardEntry

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = {name: field.annotation for name, field in Recipe.model_fields.items() if name != "rewards"} | {"rewards": RewardEntry}
FIELDS = [(section, name) for section, model in SECTIONS.items() for name in model.model_fields]


def sources(folder):
    return [p for p in (ROOT / folder).rglob("*.py") if p != Path(__file__)]


CODE = "\n".join(p.read_text() for p in sources("rloo_cli") if p.parent.name != "recipe" or p.name == "batch.py")
TESTS = "\n".join(p.read_text() for p in sources("tests"))


@pytest.mark.parametrize(("section", "name"), FIELDS)
def test_a_field_is_read_by_the_code_and_named_in_a_test(section, name):
    assert re.search(rf"\.{name}\b", CODE), f"nothing reads {section}.{name}"
    assert re.search(rf"\b(\w+__)?{name}\b", TESTS), f"no test names {section}.{name}"
