"""An attempt without SLURM: plain commands stand in for srun, to end in the ways that a cluster ends them."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import sys
import threading
import time
from pathlib import Path

import pytest

from rloo_cli.errors import LostRankError, RefusedError
from rloo_cli.launch import slurm_attempt
from rloo_cli.launch.slurm_attempt import Attempt, Server, run_attempt
from rloo_cli.launch.slurm_job import SlurmJob, job_of
from rloo_cli.launch.slurm_port import FIRST, LAST, free_port
from rloo_cli.launch.slurm_records import TaskRecord, judge, next_progress, read_records, write_record

RECORD = """
import json, os, sys, time
def leave(node, code, at=0.0):
    json.dump({"node": node, "host": f"n{node}", "exit_code": code, "time": time.time() + at}, open(f"{sys.argv[1]}/exit-{node}.json", "w"))
"""
LISTEN = """
import signal
asked = []
signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
"""


class Job(SlurmJob):
    """A job that remembers whether it was requeued."""

    requeues: list[str] = []  # noqa: RUF012

    def is_preempted(self):
        return False

    def requeue(self, say):
        self.requeues.append(self.id)
        return True

    def wait_for_end(self):
        pass


@pytest.fixture
def job(monkeypatch):
    monkeypatch.setattr(Job, "requeues", [])
    return Job(id="7")


@pytest.fixture
def attempt(tmp_path):
    logs = tmp_path / "run.slurm" / "job-7" / "attempt-1"
    logs.mkdir(parents=True)

    def make(training, *, tasks=1, server=None, max_requeues=3):
        command = (sys.executable, "-c", RECORD + LISTEN + training, str(logs))
        return Attempt(
            run=tmp_path / "run", logs=logs, training=command, tasks=tasks, server=server, signal_seconds=1.5, max_requeues=max_requeues
        )

    return make


def run(attempt, job):
    said = []
    return run_attempt(attempt, job, said.append), said


def test_the_code_is_that_of_the_task_that_failed_first_and_not_sruns(attempt, job):
    code, said = run(attempt("leave(1, 9, at=1); leave(0, 4); sys.exit(9)", tasks=2), job)
    assert code == 4
    assert "rloo ended with 4 on n0" in said[-1]
    assert job.requeues == []


def test_an_srun_that_hangs_after_its_tasks_is_ended(attempt, job, monkeypatch):
    monkeypatch.setattr(slurm_attempt, "LATE_SECONDS", 1.0)
    assert run(attempt("leave(0, 0); leave(1, 0); time.sleep(60)", tasks=2), job)[0] == 0


def test_tasks_that_stay_when_another_failed_are_ended_and_the_job_with_them(attempt, job, monkeypatch):
    monkeypatch.setattr(slurm_attempt, "REST_SECONDS", 1.0)
    monkeypatch.setattr(slurm_attempt, "LATE_SECONDS", 1.0)
    code, said = run(attempt("leave(0, 4); time.sleep(60)", tasks=2), job)
    assert code == 4
    assert any("does not end by itself" in line for line in said)


def test_a_task_that_left_no_word_makes_the_job_go_on(attempt, job, monkeypatch):
    monkeypatch.setattr(slurm_attempt, "LATE_SECONDS", 1.0)
    assert run(attempt("leave(0, 9); sys.exit(9)", tasks=2), job)[0] == 1
    assert job.requeues == ["7"]


def send_when_ready(number, attempt):
    """Send this process a signal once the training listens."""

    def send():
        while not (attempt.logs / "ready").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()
    return attempt


READY = "open(sys.argv[1] + '/ready', 'w'); "
WAIT_AND_SAVE = READY + "\nwhile not asked: time.sleep(0.05)\nleave(0, 75); sys.exit(75)"


def test_usr1_reaches_the_training_which_saves_and_the_job_is_requeued(attempt, job):
    assert run(send_when_ready(signal.SIGUSR1, attempt(WAIT_AND_SAVE)), job)[0] == 75
    assert job.requeues == ["7"]


def test_term_stops_for_good(attempt, job):
    assert run(send_when_ready(signal.SIGTERM, attempt(WAIT_AND_SAVE)), job)[0] == 75
    assert job.requeues == []


def test_a_training_that_does_not_save_in_time_is_killed_and_the_job_requeued_before_its_limit(attempt, job, monkeypatch):
    monkeypatch.setattr(slurm_attempt, "LATE_SECONDS", 0.5)
    deaf = send_when_ready(signal.SIGUSR1, attempt(READY + "time.sleep(60); time.sleep(60)"))
    assert run(deaf, job)[0] == 1
    assert job.requeues == ["7"]


def make_checkpoint(attempt, step):
    (attempt.run / "checkpoints" / f"{step:06d}").mkdir(parents=True)


def test_requeues_without_a_new_checkpoint_are_counted_and_end(attempt, job, monkeypatch):
    monkeypatch.setattr(slurm_attempt, "LATE_SECONDS", 0.0)
    dies = attempt("os._exit(1)", max_requeues=1)
    assert run(dies, job)[0] == 1
    assert job.requeues == ["7"]
    code, said = run(dies, job)
    assert (code, job.requeues) == (1, ["7"])
    assert "not requeued: 2 attempts in a row ended without a new checkpoint" in said[-1]
    with pytest.raises(LostRankError, match="not tried again"):  # SLURM itself started it once more
        run(dies, job)
    make_checkpoint(dies, 10)
    run(dies, job)
    assert job.requeues == ["7", "7"]


@pytest.fixture
def server(tmp_path):
    def make(code, seconds=20.0):
        key = tmp_path / "server.key"
        command = (sys.executable, "-c", LISTEN + "import time, os, sys\n" + code, str(key))
        return Server(command=command, url=f"http://127.0.0.1:{free_port(1, job=1)}", key=key, seconds=seconds)

    return make


SERVES = """
import http.server
class Answer(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        good = self.headers["authorization"] == "Bearer " + open(sys.argv[1]).read().strip()
        body = b'{"choices": [{"token_ids": [1]}]}'
        self.send_response(200 if good else 401); self.send_header("content-length", str(len(body))); self.end_headers(); self.wfile.write(body)
    def log_message(self, *words): pass
server = http.server.HTTPServer(("127.0.0.1", PORT), Answer); server.timeout = 0.2
"""


def serving(server, rest):
    made = server("")
    code = LISTEN + "import time, os, sys\n" + SERVES.replace("PORT", made.url.rpartition(":")[2]) + rest
    return Server(command=(sys.executable, "-c", code, str(made.key)), url=made.url, key=made.key, seconds=20.0)


def test_a_server_that_dies_before_it_is_ready_ends_the_job_with_its_code(attempt, server, job):
    code, said = run(attempt("leave(0, 0)", server=server("sys.exit(2)")), job)
    assert code == 2
    assert "before it was ready" in said[-1]
    assert job.requeues == []
    assert not any("training" in line for line in said)


def test_a_server_that_never_generates_ends_the_job_in_time(attempt, server, job):
    began = time.monotonic()
    code, said = run(attempt("leave(0, 0)", server=server("while not asked: time.sleep(0.1)", seconds=1.0)), job)
    assert code == 5
    assert "does not generate after" in said[-1]
    assert time.monotonic() - began < 30


def test_the_server_ends_with_the_training_and_its_key_is_gone(attempt, server, job):
    serves = serving(server, "while not asked: server.handle_request()\nopen(sys.argv[1] + '.ended', 'w')")
    look = f"import shutil; shutil.copy2({str(serves.key)!r}, {str(serves.key)!r} + '.seen'); leave(0, 0)"
    assert run(attempt(look, server=serves), job)[0] == 0
    assert Path(f"{serves.key}.ended").exists()
    assert not serves.key.exists()
    assert stat.S_IMODE(Path(f"{serves.key}.seen").stat().st_mode) == 0o600


def test_a_server_that_dies_later_stops_the_training_and_the_job_goes_on(attempt, server, job):
    serves = serving(server, "for i in range(5): server.handle_request()\nsys.exit(5)")
    code, said = run(attempt(WAIT_AND_SAVE, server=serves), job)
    assert code == 5
    assert job.requeues == ["7"]
    assert "the server ended by itself with 5" in " ".join(said)


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ((0, 0), (0, False)),
        ((75, 75), (75, True)),
        ((75, 0), (75, True)),
        ((9, 3), (3, False)),
        ((7, 2), (7, False)),
        ((9, 9), (1, True)),
        ((1, 1), (1, True)),
        ((1,), (1, True)),
        ((0,), (1, True)),
        ((), (1, True)),
    ],
)
def test_verdicts(codes, expected):
    records = [TaskRecord(node=i, host=f"n{i}", exit_code=code, time=float(i)) for i, code in enumerate(codes)]
    verdict = judge(records, tasks=2, server_code=None, has_bug=False, is_unwanted=False)
    assert (verdict.exit_code, verdict.goes_on) == expected
    assert not judge(records, tasks=2, server_code=None, has_bug=False, is_unwanted=True).goes_on


def test_a_bug_is_no_lost_process(attempt, job):
    code = "os.makedirs(sys.argv[1] + '/../../../run/logs/attempt-1'); "
    code += "json.dump({'rank': 1, 'exit_code': 1, 'reason': 'KeyError'}, open(sys.argv[1] + '/../../../run/logs/attempt-1/rank-1.json', 'w')); "
    assert run(attempt(code + "leave(0, 1)"), job)[0] == 1
    assert job.requeues == []
    assert run(attempt("leave(0, 1)"), job)[0] == 1  # the report is of the attempt before
    assert job.requeues == ["7"]


def test_records_come_back_in_the_order_of_their_ends(tmp_path):
    for node, when in ((0, 2.0), (1, 1.0)):
        write_record(tmp_path / "logs", TaskRecord(node=node, host="h", exit_code=node, time=when))
    (tmp_path / "logs" / "exit-2.json").write_text("{")
    assert [record.node for record in read_records(tmp_path / "logs")] == [1, 0]


def test_progress_is_kept_between_attempts(tmp_path):
    steps = [-1, -1, 10, 10, 10, 5]
    assert [next_progress(tmp_path / "progress.json", step=step).fruitless for step in steps] == [0, 1, 0, 1, 2, 3]
    assert json.loads((tmp_path / "progress.json").read_text())["step"] == 5


def test_ports_are_free_and_others_for_another_job():
    first, second = free_port(1, job=3), free_port(2, job=3)
    assert first != second
    assert all(FIRST <= port <= LAST for port in (first, second))
    assert free_port(1, job=4) not in (first, second)
    with socket.socket() as taken:
        taken.bind(("", first))
        taken.listen(1)
        assert free_port(1, job=3) == second


def test_the_inner_commands_are_refused_outside_of_a_job():
    with pytest.raises(RefusedError, match="rloo slurm"):
        job_of({})
