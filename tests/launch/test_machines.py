"""Several machines, each a launcher of its own on this one: the numbers of one process, and what is left when one of them goes."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
from test_several_processes import ROOT, SETTINGS, TOLERANCE, gold, rows, run
from test_several_processes import arguments as all_arguments

from rloo_cli.run.folder import RunFolder

END_SECONDS = 60
"""From a fault to the end of every launcher."""
SILENT, COME = "watch.SILENT_SECONDS", "meeting.COME_SECONDS"


def arguments(folder, *more, settings=()):
    return all_arguments(folder, *more, settings=["max_steps=8", "eval_steps=8", *settings])


def free_port():
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Machine:
    """A launcher in a session of its own."""

    def __init__(self, words, rank, *, port, count=2, deadlines=()):
        changes = "; ".join(f"{name} = {seconds}" for name, seconds in deadlines)
        program = f"import sys; from rloo_cli.launch import meeting, watch; {changes or 'pass'}; from rloo_cli.__main__ import main; main()"
        options = ["--num-machines", count, "--machine-rank", rank, "--main-process-ip", "127.0.0.1", "--main-process-port", port]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, *words, *map(str, options)],
            cwd=ROOT,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.family = []
        self.shown = ""

    def come_to_step(self, step):
        for line in self.process.stdout:
            if line.startswith(f"step {step}/"):
                return
        raise AssertionError(self.process.stderr.read())

    def note_family(self):
        self.family = psutil.Process(self.process.pid).children(recursive=True)

    def rank(self):
        """The pid of its first rank."""
        children = psutil.Process(self.process.pid).children()
        return min(child.pid for child in children if "launch.rank" in " ".join(child.cmdline()))

    def end(self, seconds=END_SECONDS + 30):
        """(exit code, standard error); nothing of it is left."""
        self.shown, errors = self.process.communicate(timeout=seconds)
        _, alive = psutil.wait_procs(self.family, timeout=10)
        assert not alive, alive
        return self.process.returncode, errors


def machines(words, count=2, *, own=(), **options):
    """That many launchers, each with the words and what `own` adds for it; all are gone when the test ends."""
    port = free_port()
    return [Machine([*words, *(own[rank] if own else ())], rank, port=port, count=count, **options) for rank in range(count)]


@pytest.fixture
def start(request):
    started = []

    def begin(words, step=None, **options):
        both = machines(words, **options)
        started.extend(both)
        if step is not None:
            both[0].come_to_step(step)
            for machine in both:
                machine.note_family()
        return both

    yield begin
    for machine in started:
        for process in [*psutil.Process(machine.process.pid).children(recursive=True)] if machine.process.poll() is None else []:
            process.kill()
        if machine.process.poll() is None:
            machine.process.kill()
        machine.process.communicate()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of two processes on one machine, from the beginning to the end."""
    folder = tmp_path_factory.mktemp("machines") / "whole"
    done = run(arguments(folder, "--num-processes", "2"))
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("share", [1, 2])
def test_two_machines_end_with_the_numbers_of_one_process(share, start, tmp_path):
    assert run(arguments(tmp_path / "one")).returncode == 0
    both = start(arguments(tmp_path / "run", "--num-processes", str(2 * share)))
    (code, errors), (other, other_errors) = [machine.end(seconds=280) for machine in both]
    assert (code, other, other_errors) == (0, 0, ""), errors + other_errors
    joins, *_, ends = both[1].shown.splitlines()
    assert re.fullmatch(rf"machine 1 of 2: trains with machine 0 \(\S+\), run folder {tmp_path / 'run'}", joins)
    assert ends == f"done: machine 1 of 2, {tmp_path / 'run'}"
    ours, theirs = rows(tmp_path / "run"), rows(tmp_path / "one")
    assert len(ours) == len(theirs)
    for many, one in zip(ours, theirs, strict=True):
        assert many == pytest.approx(one, rel=TOLERANCE, abs=1e-5)
    attempt = RunFolder(tmp_path / "run").attempt(1)
    reports = [json.loads((attempt / f"rank-{rank}.json").read_text()) for rank in range(2 * share)]
    assert [report["exit_code"] for report in reports] == [0] * (2 * share)
    assert (attempt / "launch-machine-1.log").exists()
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["num_machines"] == 2


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_all_machines_which_name_it_and_resume_goes_on(whole, start, tmp_path):
    both = start(arguments(tmp_path / "run", "--num-processes", "2"), step=6)
    os.kill(both[1].rank(), signal.SIGKILL)
    began = time.monotonic()
    for machine in both:
        code, errors = machine.end()
        assert code == 1, errors
        assert re.search(
            r"^error: rank 1 on \S+ was ended by SIGKILL without a word, after: .+train-rank-1\.log\)\. To go on: .+ --resume$",
            errors,
            re.MULTILINE,
        ), errors
        assert "Traceback" not in errors
    assert time.monotonic() - began < END_SECONDS
    assert run(arguments(tmp_path / "run", "--num-processes", "2", "--resume")).returncode == 0
    assert gold(tmp_path / "run") == gold(whole)


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 1])
def test_a_launcher_that_is_killed_ends_the_other_which_names_its_machine(who, start, tmp_path):
    both = start(arguments(tmp_path / "run", "--num-processes", "2"), step=3, deadlines=[(SILENT, 10)])
    both[who].process.kill()
    began = time.monotonic()
    assert both[who].end()[0] == -signal.SIGKILL
    code, errors = both[1 - who].end()
    assert code == 1, errors
    assert re.search(rf"^error: machine {who} \(\S+\) (is gone|was silent)", errors, re.MULTILINE), errors
    assert time.monotonic() - began < END_SECONDS


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 1])
def test_a_silent_machine_ends_the_other(who, start, tmp_path):
    """A launcher and its ranks that are stopped say as little as a machine that lost its network."""
    both = start(arguments(tmp_path / "run", "--num-processes", "2"), step=3, deadlines=[(SILENT, 8)])
    stopped = [both[who].process.pid, *(process.pid for process in both[who].family)]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    try:
        code, errors = both[1 - who].end()
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    assert code == 1, errors
    assert re.search(rf"^error: machine {who} \(\S+\) was silent for \d+ s.+rank {who} there said last: .+ \(log: ", errors, re.MULTILINE)
    assert time.monotonic() - began < END_SECONDS
    assert both[who].end()[0] not in (0, 75)  # once it is back it finds that it is too late


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 1])
def test_a_signal_to_one_launcher_stops_all_and_resume_ends_as_the_run_that_was_never_stopped(who, whole, start, tmp_path):
    both = start(arguments(tmp_path / "run", "--num-processes", "2"), step=5)
    both[who].process.send_signal(signal.SIGUSR1)
    began = time.monotonic()
    (code, errors), (other, other_errors) = [machine.end() for machine in both]
    assert (code, other) == (75, 75), errors + other_errors
    assert time.monotonic() - began < END_SECONDS
    assert re.search(r"stopped by SIGUSR1: step \d+ is saved, --resume goes on from there\.", errors)
    assert re.search(r"stopped by SIGUSR1: step \d+ is saved", other_errors)
    assert "--num-processes 2 --num-machines 2 --machine-rank 0" in errors.splitlines()[-1]
    resumed = start(arguments(tmp_path / "run", "--num-processes", "2", "--resume"))
    assert [machine.end(seconds=200)[0] for machine in resumed] == [0, 0]
    assert gold(tmp_path / "run") == gold(whole)


@pytest.mark.slow
def test_the_error_of_a_rank_is_that_of_all_machines(start, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def score(completions, trainer_state):\n    assert trainer_state.step < 2, 'enough'\n    return [0.5] * len(completions)\n"
    )
    words = arguments(tmp_path / "run", "--num-processes", "2", "--code-dir", str(tmp_path), settings=["rewards=[{function: mine.score}]"])
    for machine in start(words):
        code, errors = machine.end(seconds=200)
        assert code == 4, errors
        assert "enough" in errors


@pytest.mark.slow
def test_a_machine_that_does_not_come_is_named(tmp_path):
    machine = Machine(arguments(tmp_path / "run", "--num-processes", "2"), 0, port=free_port(), deadlines=[(COME, 3)])
    code, errors = machine.end()
    assert code == 2, errors
    assert "of 2 machines came 0 (" in errors
    assert "and machine 1 did not within 3 s: start the same command there with --machine-rank 1" in errors
    assert not (tmp_path / "run").exists()
    lonely = Machine(arguments(tmp_path / "run", "--num-processes", "2"), 1, port=free_port(), deadlines=[(COME, 3)])
    code, errors = lonely.end()
    assert code == 2, errors
    assert "machine 0 did not answer at 127.0.0.1:" in errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("other", "says"),
    [
        (
            ["--set", "learning_rate=5e-6"],
            r"machine 1 \(\S+\) has another recipe than machine 0 \(\S+\): training.learning_rate is 5e-06 there and",
        ),
        (
            ["--num-processes", "4"],
            r"machine 1 \(\S+\) counts 4 processes on all machines, and machine 0 2: all machines start equally many",
        ),
    ],
)
def test_machines_that_came_for_something_else_are_refused_everywhere(other, says, start, tmp_path):
    both = start(arguments(tmp_path / "run", "--num-processes", "2"), own=[[], other])
    for machine in both:
        code, errors = machine.end()
        assert code == 2, errors
        assert re.search(says, errors), errors
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_what_machine_0_refuses_the_others_are_told(start, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    both = start(arguments(tmp_path / "run", "--num-processes", "2"))
    (code, errors), (other, other_errors) = [machine.end() for machine in both]
    assert (code, other) == (2, 2), errors + other_errors
    reason = errors.strip().splitlines()[-1].removeprefix("error: ")
    assert re.fullmatch(rf"error: machine 0 \(\S+\): {re.escape(reason)}", other_errors.strip().splitlines()[-1])


@pytest.mark.slow
def test_two_machines_of_one_launcher_of_the_users_own_train_the_same(whole, tmp_path):
    port = free_port()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
    launchers = []
    for node in range(2):
        where = [
            "--nnodes",
            "2",
            "--node_rank",
            str(node),
            "--nproc_per_node",
            "1",
            "--master_addr",
            "127.0.0.1",
            "--master_port",
            str(port),
        ]
        command = [sys.executable, "-m", "torch.distributed.run", *where, "-m", "rloo_cli", *arguments(tmp_path / "run")]
        launchers.append(subprocess.Popen(command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    said = [launcher.communicate(timeout=250)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], said
    assert "2 processes on 2 machines train together" in said[0]
    assert gold(tmp_path / "run") == gold(whole)


def test_options_that_stop_short_of_several_machines_are_refused_before_anything_starts(tmp_path, capsys):
    from rloo_cli.cli.app import exit_code_of

    assert SETTINGS
    assert exit_code_of(arguments(tmp_path / "run", "--num-processes", "2", "--num-machines", "2", "--machine-rank", "0")) == 2
    assert "--main-process-ip is missing" in capsys.readouterr().err
    assert exit_code_of(arguments(tmp_path / "run", "--machine-rank", "1")) == 2
    assert "--machine-rank: one machine needs none of these; say --num-machines N" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
