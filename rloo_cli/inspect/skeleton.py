"""A reward function and its test to start from."""

from __future__ import annotations

import keyword
import sys
from pathlib import Path

from rloo_cli.errors import RefusedError
from rloo_cli.recipe.nodes import printable
from rloo_cli.run import atomic

FUNCTION = '''"""A reward function for rloo. In a recipe beside this file:

    rewards:
      - function: {module}.{name}

Try it on your data before you train:  rloo rewards check {module}.{name} --data prompts.jsonl
"""

from __future__ import annotations

from typing import Any


def {name}(completions: list[Any], answer: list[Any], **kwargs: Any) -> list[float | None]:
    """1.0 for each completion that ends with its row's answer, else 0.0; None where the row has no answer.

    One call holds all completions of one prompt; return one number for each, in order. None means "does not apply" and never
    becomes 0. An exception stops the run and names the completion: better than learning from a wrong number.

    Args:
        completions: strings, or `[{{"role": "assistant", "content": "…"}}]` where the prompts are messages.
        answer: the data's column `answer`, one value for each completion. Name any column and you get it.
        kwargs: all that is not named: `prompts`, `completion_ids`, the other columns, and `kwargs` of the recipe.
    """
    return [_score(_text_of(completion), gold) for completion, gold in zip(completions, answer, strict=True)]


def _score(text: str, gold: Any) -> float | None:
    """The reward of one completion. Write yours here."""
    if gold is None:
        return None
    return float(f" {{text.strip().rstrip('.')}}".endswith(f" {{gold}}"))


def _text_of(completion: Any) -> str:
    """The completion's text, whichever form it has."""
    return completion if isinstance(completion, str) else completion[-1]["content"]
'''

TEST = """from {module} import {name}


def said(text):
    return [{{"role": "assistant", "content": text}}]


def test_the_right_answer_is_paid_and_a_wrong_one_is_not():
    assert {name}([said("It is 42."), said("It is 7.")], answer=[42, 42]) == [1.0, 0.0]


def test_strings_are_read_like_messages():
    assert {name}(["It is 42", "no idea"], answer=[42, 42]) == [1.0, 0.0]


def test_saying_nothing_earns_nothing():
    assert {name}([said("")], answer=[42]) == [0.0]


def test_a_row_without_an_answer_is_not_scored():
    assert {name}([said("42")], answer=[None]) == [None]
"""


def write_skeleton(name: str, folder: Path) -> list[Path]:
    """The two files written: `NAME.py` with the function, `test_NAME.py` with its test. `module.name` names both.

    Raises:
        RefusedError: the name is none that Python can import, or a file is there already; nothing was written.
        StorageError: a file could not be written.
    """
    module, _, function = name.rpartition(".")
    module = module or function
    for part in (module, function):
        if not part.isidentifier() or keyword.iskeyword(part) or not part.isascii() or part.startswith("_"):
            raise RefusedError(f"`{printable(name)}` is no name for a reward function: write `my_reward`, or `my_module.my_reward`.")
    if module in sys.stdlib_module_names:
        raise RefusedError(f"`{module}` is a module of Python itself, which {module}.py would hide: choose another name.")
    files = {folder / f"{module}.py": FUNCTION, folder / f"test_{module}.py": TEST}
    for path in files:
        if path.exists() or path.is_symlink():
            raise RefusedError(f"{path} exists already, and nothing was written: choose another name, or --dir.")
    atomic.make_folder(folder)
    for path, template in files.items():
        atomic.write_file(path, template.format(module=module, name=function))
    return list(files)
