"""Runs of two processes: the numbers of one, and what is left when a process is killed, fails or is told to stop."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rloo_cli.cli.app import exit_code_of
from rloo_cli.run.folder import RunFolder
from rloo_cli.run.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = ["bf16=false", "max_steps=12", "save_steps=4", "eval_steps=12", "save_total_limit=1"]
TOLERANCE = 1e-4
"""Relative, of float32 in another order of summing; and absolute, of differences that are rounding alone."""
END_SECONDS = 60
"""From the end of one rank to that of the command."""

KILLED_IN = """
import importlib.util, os, signal, sys


def die():
    open(os.path.join(os.path.dirname(__file__), "killed"), "w").close()
    os.kill(os.getpid(), signal.SIGKILL)


def in_rollout(module):
    generate, batches = module.TransformersEngine.generate, []

    def generate_or_die(self, *arguments, check_stop, **options):
        batches.append(0)

        def between_tokens():
            batches[-1] += 1
            if (len(batches), batches[-1]) == (6, 3):
                die()
            check_stop()

        return generate(self, *arguments, check_stop=between_tokens, **options)

    module.TransformersEngine.generate = generate_or_die


def in_backward(module):
    forward, step, steps = module.FullySharded.forward, module.FullySharded.step, []

    def forward_and_die(self, batch):
        if len(steps) == 5:
            self.policy.model.base_model.layers[0].register_full_backward_pre_hook(lambda *_: die())
        return forward(self, batch)

    def counted(self, **options):
        steps.append(1)
        return step(self, **options)

    module.FullySharded.forward, module.FullySharded.step = forward_and_die, counted


class Patched:
    places = {{
        "rollout": ("rloo_cli.rollout.transformers_engine", in_rollout),
        "backward": ("rloo_cli.training.strategy_fsdp", in_backward),
    }}

    def find_spec(self, name, path=None, target=None):
        wanted, patch = self.places["{where}"]
        if name != wanted:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_patch(module):
            execute(module)
            patch(module)

        spec.loader.exec_module = execute_and_patch
        return spec


if os.environ.get("RANK") == "1":
    sys.meta_path.insert(0, Patched())
"""
"""A module that Python imports at its start: rank 1 dies in the sixth step, between tokens or between layers."""


def arguments(folder, *more, settings=()):
    options = [word for setting in [*SETTINGS, *settings] for word in ("--set", setting)]
    return ["train", "smoke", "--output-dir", str(folder), *options, *more]


def rloo(words):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return [sys.executable, "-m", "rloo_cli", *words], {"cwd": ROOT, "env": environment, "text": True}


def run(words, seconds=300):
    command, options = rloo(words)
    return subprocess.run(command, capture_output=True, timeout=seconds, **options)


class Started:
    """A command in a session of its own that has done a number of steps, or come to where a file exists."""

    def __init__(self, words, *, step=None):
        command, options = rloo(words)
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, **options)
        for line in self.process.stdout:
            if step is not None and line.startswith(f"step {step}/"):
                break
        self.family = psutil.Process(self.process.pid).children(recursive=True)

    def ranks(self):
        """Pids of the ranks, by number."""
        launcher = psutil.Process(self.process.pid)
        return [p.pid for p in sorted((c for c in launcher.children() if "launch.rank" in " ".join(c.cmdline())), key=lambda c: c.pid)]

    def end(self):
        """(exit code, what was said on standard error, seconds); nothing of the run is left."""
        started = time.monotonic()
        _, errors = self.process.communicate(timeout=END_SECONDS + 30)
        seconds = time.monotonic() - started
        _, alive = psutil.wait_procs(self.family, timeout=5)
        assert not alive, alive
        return self.process.returncode, errors, seconds


def rows(folder):
    return [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in read_metrics(folder / "metrics.jsonl")]


def gold(folder):
    return rows(folder), (folder / "final" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of two processes from the beginning to the end."""
    folder = tmp_path_factory.mktemp("processes") / "whole"
    done = run(arguments(folder, "--num-processes", "2"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 12/12 | reward") == 1
    return folder


@pytest.mark.slow
def test_two_processes_end_with_the_numbers_of_one(whole, tmp_path):
    assert run(arguments(tmp_path / "one")).returncode == 0
    ours, theirs = rows(whole), rows(tmp_path / "one")
    assert len(ours) == len(theirs) == 13
    for two, one in zip(ours, theirs, strict=True):
        assert two == pytest.approx(one, rel=TOLERANCE, abs=1e-5)
    names = {path.name for path in RunFolder(whole).attempt(1).iterdir()}
    assert names >= {"train.log", "train-rank-1.log", "launch.log", "rank-0.json", "rank-1.json"}
    assert json.loads((whole / "environment.json").read_text())["num_processes"] == 2
    assert "num_processes: 2" in (whole / "recipe.yaml").read_text()


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_command_which_names_it_and_resume_goes_on(whole, tmp_path):
    started = Started(arguments(tmp_path / "run", "--num-processes", "2"), step=6)
    os.kill(started.ranks()[1], signal.SIGKILL)
    code, errors, seconds = started.end()
    assert (code, seconds < END_SECONDS) == (1, True), errors
    assert re.search(r"^error: rank 1 on \S+ was ended by SIGKILL without a word, after: .+train-rank-1\.log", errors, re.MULTILINE), errors
    assert "Traceback" not in errors
    assert run(arguments(tmp_path / "run", "--num-processes", "2", "--resume")).returncode == 0
    assert gold(tmp_path / "run") == gold(whole)


@pytest.mark.slow
@pytest.mark.parametrize("who", ["launcher", "launcher, one rank asleep", "one rank", "whole group twice"])
def test_a_stop_is_agreed_on_and_resume_ends_as_the_run_that_was_never_stopped(whole, tmp_path, who):
    started = Started(arguments(tmp_path / "run", "--num-processes", "2"), step=6)
    if who == "launcher":
        os.kill(started.process.pid, signal.SIGUSR1)
    elif who == "launcher, one rank asleep":
        os.kill(started.ranks()[1], signal.SIGSTOP)
        os.kill(started.process.pid, signal.SIGTERM)
    elif who == "one rank":
        os.kill(started.ranks()[1], signal.SIGTERM)
    else:  # a batch system signals every process
        for pid in [started.process.pid, *started.ranks()]:
            os.kill(pid, signal.SIGINT)
    code, errors, seconds = started.end()
    assert (code, seconds < END_SECONDS) == (75, True), errors
    what, how = errors.splitlines()[-2:]
    assert re.fullmatch(r"stopped by SIG\w+: step \d+ is saved, --resume goes on from there\.", what)
    assert " --num-processes 2 " in how
    assert how.endswith(f"--output-dir {tmp_path / 'run'} --resume")
    assert run(arguments(tmp_path / "run", "--num-processes", "2", "--resume")).returncode == 0
    assert gold(tmp_path / "run") == gold(whole)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """(options, folder of a run of two processes from the beginning to the end) under a strategy, made once."""
    made = {}

    def make(strategy):
        options = ["--num-processes", "2", "--accelerate-config", strategy]
        if strategy not in made:
            folder = tmp_path_factory.mktemp(strategy) / "whole"
            done = run(arguments(folder, *options))
            assert done.returncode == 0, done.stderr
            made[strategy] = folder
        return options, made[strategy]

    return make


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_a_stop_under_shards_is_saved_and_resume_ends_as_the_run_that_was_never_stopped(sharded, tmp_path, strategy):
    options, uninterrupted = sharded(strategy)
    started = Started(arguments(tmp_path / "run", *options), step=6)
    os.kill(started.process.pid, signal.SIGUSR1)
    code, errors, seconds = started.end()
    assert (code, seconds < END_SECONDS) == (75, True), errors
    assert re.search(r"^stopped by SIGUSR1: step \d+ is saved, --resume goes on from there\.$", errors, re.MULTILINE), errors
    assert run(arguments(tmp_path / "run", *options, "--resume")).returncode == 0
    assert gold(tmp_path / "run") == gold(uninterrupted)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("where", ["rollout", "backward"])
def test_a_rank_that_is_killed_under_shards_ends_the_command_which_names_it_and_resume_goes_on(sharded, tmp_path, monkeypatch, where):
    options, uninterrupted = sharded("fsdp2")
    (tmp_path / "sitecustomize.py").write_text(KILLED_IN.format(where=where))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    started = Started(arguments(tmp_path / "run", *options))
    code, errors, seconds = started.end()
    monkeypatch.delenv("PYTHONPATH")
    assert (code, seconds < END_SECONDS) == (1, True), errors
    assert re.search(r"^error: rank 1 on \S+ was ended by SIGKILL without a word, after: .+train-rank-1\.log", errors, re.MULTILINE), errors
    assert "Traceback" not in errors
    ended = time.time() - (tmp_path / "killed").stat().st_mtime
    assert ended < END_SECONDS, ended
    assert len(rows(tmp_path / "run")) == 5
    assert run(arguments(tmp_path / "run", *options, "--resume")).returncode == 0
    assert gold(tmp_path / "run") == gold(uninterrupted)


@pytest.mark.slow
def test_a_second_interrupt_leaves_at_once(tmp_path):
    started = Started(arguments(tmp_path / "run", "--num-processes", "2"), step=2)
    for _ in range(2):
        os.kill(started.process.pid, signal.SIGINT)
        time.sleep(0.05)
    code, errors, seconds = started.end()
    assert (code, seconds < 10) == (130, True), errors


@pytest.mark.slow
def test_ranks_go_when_the_launcher_is_killed(tmp_path):
    started = Started(arguments(tmp_path / "run", "--num-processes", "2"), step=2)
    started.process.kill()
    assert started.end()[0] == -signal.SIGKILL


@pytest.mark.slow
def test_the_error_of_a_rank_is_the_commands(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def score(completions, trainer_state):\n    assert trainer_state.step < 3, 'enough'\n    return [0.5] * len(completions)\n"
    )
    rewards = "rewards=[{function: mine.score}]"
    done = run(arguments(tmp_path / "run", "--num-processes", "2", "--code-dir", str(tmp_path), settings=[rewards, "save_steps=1"]))
    assert done.returncode == 4, done.stderr
    assert "enough" in done.stderr
    assert "mine.py:2" in done.stderr
    reports = [json.loads((RunFolder(tmp_path / "run").attempt(1) / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert {report["exit_code"] for report in reports} <= {4, 9}


@pytest.mark.slow
def test_wrong_data_leaves_no_folder_and_is_told_once(tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Name a colour."}\n{"prompt": 3}\n')
    data = [f"dataset_name={tmp_path / 'prompts.jsonl'}"]
    done = run(arguments(tmp_path / "run", "--num-processes", "2", settings=data))
    assert done.returncode == 3, done.stderr
    assert done.stderr.count("prompts.jsonl:2") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_launcher_of_the_users_own_trains_the_same(whole, tmp_path):
    words = arguments(tmp_path / "run")
    _, options = rloo(words)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "rloo_cli"]
    done = subprocess.run([*launcher, *words], capture_output=True, timeout=300, **options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done:") == 1
    assert gold(tmp_path / "run") == gold(whole)


def test_a_batch_that_does_not_divide_is_refused_before_anything_starts(tmp_path, capsys):
    settings = ["prompts_per_step=null", "per_device_train_batch_size=2", "num_generations=4"]
    assert exit_code_of(arguments(tmp_path / "run", "--num-processes", "3", settings=settings)) == 2
    assert "2 × 3 processes × gradient_accumulation_steps 1 = 6 completions a step" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_another_number_of_processes_that_changes_a_step_is_refused_on_resume(tmp_path, capsys):
    settings = ["prompts_per_step=null", "per_device_train_batch_size=8", "lr_scheduler_type=constant", "max_steps=1"]
    assert exit_code_of(arguments(tmp_path / "run", settings=settings)) == 0
    more = [*settings, "max_steps=2"]
    assert exit_code_of(arguments(tmp_path / "run", "--num-processes", "2", "--resume", settings=more)) == 2
    assert "has 8 completions, and on 2 process(es) it would have 16" in capsys.readouterr().err
