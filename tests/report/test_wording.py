from __future__ import annotations

import doctest
import importlib

import pytest


@pytest.mark.parametrize("module", ["wording", "curves", "sample"])
def test_examples(module):
    tested = doctest.testmod(importlib.import_module(f"rloo_cli.report.{module}"))
    assert tested.attempted
    assert not tested.failed
