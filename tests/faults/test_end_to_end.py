"""The program itself, with its real engine and reward workers: the same twice, and the same when stopped and resumed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SMOKE = ROOT / "recipes" / "smoke.yaml"
STEPS = 6
REUSED = ["--set", "num_iterations=2", "--set", "steps_per_generation=2"]


def command(folder, *arguments):
    settings = ["--set", f"max_steps={STEPS}", "--set", "save_steps=2"]
    return [sys.executable, "-m", "rloo_cli", "train", str(SMOKE), "--output-dir", str(folder), *settings, *arguments]


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def run(folder, *arguments):
    done = subprocess.run(command(folder, *arguments), capture_output=True, text=True, timeout=280, env=environment())
    assert done.returncode == 0, done.stderr
    return gold(folder)


def gold(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in rows], (
        folder / "final" / "model.safetensors"
    ).read_bytes()


def steps_recorded(folder):
    path = folder / "metrics.jsonl"
    return sum('"loss"' in line for line in path.read_text().splitlines()) if path.exists() else 0


def interrupt(folder, number, after, *arguments):
    """Start, send the signal once `after` steps are recorded, and return the exit code."""
    process = subprocess.Popen(command(folder, *arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment())
    deadline = time.monotonic() + 200
    while steps_recorded(folder) < after and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    return process.returncode, output


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The bits of a run that is never stopped, under further arguments, made once."""
    made = {}

    def make(*arguments):
        if arguments not in made:
            made[arguments] = run(tmp_path_factory.mktemp("whole") / "run", *arguments)
        return made[arguments]

    return make


def test_the_same_recipe_twice_gives_the_same_bits_with_any_number_of_reward_workers(whole, tmp_path):
    assert run(tmp_path / "b", "--set", "reward_workers=3") == whole("--set", "reward_workers=1")


@pytest.mark.parametrize("after", [3, *(pytest.param(step, marks=pytest.mark.slow) for step in (1, 2, 4))])
def test_stopped_by_a_signal_and_resumed_it_ends_with_the_same_bits(after, whole, tmp_path):
    expected = whole(*REUSED)
    code, output = interrupt(tmp_path / "stopped", signal.SIGTERM, after, *REUSED)
    if code != 0:  # a fast machine may have finished before the signal came
        assert code == 75, output
        assert "Traceback" not in output
        assert "SIGTERM" in output
        assert run(tmp_path / "stopped", "--resume", *REUSED) == expected
    assert gold(tmp_path / "stopped") == expected


def test_killed_and_resumed_it_ends_with_the_same_bits(whole, tmp_path):
    one_worker = ("--set", "reward_workers=1")
    expected = whole(*one_worker)
    interrupt(tmp_path / "killed", signal.SIGKILL, 3, *one_worker)
    if not (tmp_path / "killed" / "final").exists():
        run(tmp_path / "killed", "--resume", *one_worker)
    assert gold(tmp_path / "killed") == expected
