"""What every test stands on: no network, no telemetry, one thread, and no state that another test left in accelerate."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")  # vLLM would compile a part of its sampler in every process

# This folder is on sys.path, so that its vllm/ would pass for the library where that is missing.
_vllm = find_spec("vllm")
if _vllm is None or _vllm.origin is None:
    sys.modules["vllm"] = None  # type: ignore[assignment]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A report whose captured output holds no half of a character, as some tests print on purpose: xdist could not send it."""
    report = yield
    report.sections = [(name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections]
    return report


@pytest.fixture(autouse=True)
def _no_reports(request, monkeypatch):
    """A second or two at the end of each run in this process; the tests of reports ask for them by the fixture `reports`."""
    if "reports" not in request.fixturenames:
        monkeypatch.setattr("rloo_cli.launch.report.write_report", lambda folder, is_alone: f"report: {folder.report}")


@pytest.fixture(autouse=True)
def _forget_accelerate_state():
    """accelerate keeps the first Accelerator's precision for the whole process; a test may want another."""
    yield
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state()
