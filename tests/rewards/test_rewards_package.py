import inspect
import subprocess
import sys

import pytest

from rloo_cli import rewards
from rloo_cli.recipe.install import install_command

pytest.importorskip("math_verify")


@pytest.mark.parametrize("name", rewards.__all__)
def test_every_public_name_is_a_documented_reward(name):
    reward = getattr(rewards, name)
    assert callable(reward)
    assert reward.__name__ == name
    assert inspect.getdoc(reward)
    assert "kwargs" in inspect.signature(reward).parameters


def test_table_and_public_names_agree():
    assert sorted(rewards._MODULES) == rewards.__all__


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="acuracy_reward"):
        rewards.acuracy_reward


def test_no_builtin_brings_torch_or_sympy_into_the_worker():
    names = ", ".join(rewards.__all__)
    program = f"import sys; from rloo_cli.rewards import {names}; print([m for m in ('torch', 'sympy', 'numpy') if m in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"


def test_a_missing_extra_is_told_with_its_install_command():
    program = (
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'math_verify' else find(name, *a)\n"
        "import rloo_cli.rewards\n"
        "from rloo_cli.rewards import exact_match_reward\n"
        "try: rloo_cli.rewards.accuracy_reward\n"
        "except ImportError as error: print(error)"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == f"accuracy_reward needs math-verify: {install_command('math')}"
