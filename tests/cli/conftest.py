from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Path:
    """A finished smoke run, to look at and not to change."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    result = subprocess.run(
        [sys.executable, "-m", "rloo_cli", "train", "smoke", "--output-dir", str(folder)],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert result.stdout.splitlines()[-1] == f"done: {folder} (metrics.jsonl, rollouts/, final/)"
    return folder
