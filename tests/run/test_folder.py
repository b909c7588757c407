from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
from failpoints import FailingFileSystem

from rloo_cli.errors import RefusedError, StorageError
from rloo_cli.run import atomic, lock
from rloo_cli.run.folder import RunFolder, RunState, default_run_path, open_existing, open_new
from rloo_cli.run.lock import Holder, ensure_unlocked, locked

DEAD_PID = 2**22 + 1  # above the kernel's largest


@pytest.fixture
def run(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.prepare()
    folder.recipe.write_text("model: …\n")
    return folder


def finish(run, step=6):
    with atomic.AtomicFolder(run.final, info={"step": step}, replace=True) as final:
        final.write("config.json", "{}")


def test_the_default_path_names_recipe_and_time():
    assert default_run_path("quick", datetime(2026, 1, 31, 17, 45, 1)) == Path("runs/quick-20260131-174501")


def test_paths_of_steps(run):
    assert run.rollout_file(12).name == "000012.parquet"
    assert run.eval_rollout_file(10) == run.path / "rollouts" / "eval-000010.parquet"


@pytest.mark.parametrize("exists", [False, True])
def test_an_absent_or_empty_folder_is_new(tmp_path, exists):
    if exists:
        (tmp_path / "r").mkdir()
    assert open_new(tmp_path / "r").state() is RunState.NEW
    with pytest.raises(RefusedError, match="holds no run"):
        open_existing(tmp_path / "r")


def test_a_started_run_is_refused_and_resume_named(run):
    before = sorted(run.path.rglob("*"))
    with pytest.raises(RefusedError, match="--resume"):
        open_new(run.path)
    assert sorted(run.path.rglob("*")) == before
    assert open_existing(run.path).state() is RunState.STARTED


def test_a_run_that_died_before_its_recipe_was_written_can_be_gone_on_with(tmp_path):
    RunFolder(tmp_path).new_attempt()
    assert open_existing(tmp_path).state() is RunState.STARTED


def test_a_foreign_folder_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    for opening in (open_new, open_existing):
        with pytest.raises(RefusedError, match="no run of ours"):
            opening(tmp_path)


def test_a_finished_run_is_known_by_its_complete_final_folder(run):
    assert run.finished_step() is None
    finish(run)
    assert run.finished_step() == 6
    assert run.state() is RunState.FINISHED
    with pytest.raises(RefusedError, match="finished"):
        open_new(run.path)
    (run.final / "config.json").unlink()
    assert run.state() is RunState.STARTED


def test_attempts_are_numbered(run):
    assert [run.new_attempt().name for _ in range(3)] == ["attempt-1", "attempt-2", "attempt-3"]
    (run.logs / "attempt-11").mkdir()
    assert run.new_attempt().name == "attempt-12"


@pytest.mark.parametrize("place", ["", "rollouts", "checkpoints", "logs", "final"])
def test_a_file_where_a_folder_should_be(tmp_path, place):
    run = RunFolder(tmp_path / "run")
    file = run.path / place
    file.parent.mkdir(exist_ok=True, parents=True)
    file.write_text("")
    with pytest.raises(StorageError, match="move it away") as caught:
        run.prepare()
    assert str(file) in caught.value.message
    assert file.read_text() == ""


def test_a_folder_where_a_file_should_be(tmp_path):
    run = RunFolder(tmp_path)
    run.metrics.mkdir()
    with pytest.raises(StorageError, match=r"metrics\.jsonl is a folder"):
        run.prepare()


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_read_only_folder_is_found_before_anything_is_loaded(tmp_path, monkeypatch, code):
    monkeypatch.setattr(atomic, "fs", FailingFileSystem(1, code, only=("open", "mkdir"), once=False))
    with pytest.raises(StorageError, match="choose another --output-dir") as caught:
        RunFolder(tmp_path / "run").prepare()
    assert caught.value.exit_code == 6


def test_preparing_leaves_nothing_behind(run):
    assert sorted(path.name for path in run.path.rglob("*")) == ["checkpoints", "logs", "recipe.yaml", "rollouts"]
    run.prepare()


def test_orphans_of_dead_processes_are_removed_and_nothing_else(run):
    living = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    orphan = run.checkpoints / f".tmp-000010-{DEAD_PID}"
    (orphan / "sub").mkdir(parents=True)
    (orphan / "model.safetensors").write_text("half")
    orphan_file = run.rollouts / f".tmp-000004.parquet-{DEAD_PID}"
    orphan_file.write_text("half")
    own = run.path / f".tmp-final-{os.getpid()}"
    own.mkdir()
    reused = run.path / f".tmp-metrics.jsonl-{living.pid}"  # older than the process that has its pid now
    reused.write_text("half")
    os.utime(reused, (1e9, 1e9))
    kept = [
        run.checkpoints / f".tmp-000012-{living.pid}",
        run.checkpoints / "000008",
        run.path / ".tmp-notes",
        run.path / "tmp-x-1",
    ]
    for path in kept:
        path.mkdir()
    try:
        removed = run.remove_orphans()
    finally:
        living.communicate()
    assert sorted(removed) == sorted([orphan, orphan_file, own, reused])
    assert not any(path.exists() for path in removed)
    assert all(path.exists() for path in kept)


def holding(path, then=""):
    """A process that holds the lock until its standard input ends."""
    code = f"import sys, pathlib, os\nfrom rloo_cli.run.lock import locked\nwith locked(pathlib.Path({str(path)!r})):\n print('held', flush=True)\n sys.stdin.read()\n {then}"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_run_is_told_who_holds_the_folder(run):
    holder = holding(run.lock_file)
    try:
        with pytest.raises(StorageError, match=f"locked by pid {holder.pid} on {socket.gethostname()}") as caught, run.lock():
            pass
        assert caught.value.exit_code == 6
        with pytest.raises(StorageError, match="locked by pid"):
            open_new(run.path)
    finally:
        holder.communicate()
    with run.lock():
        pass
    assert not run.lock_file.exists()


def test_the_lock_of_a_killed_process_is_taken_over(run):
    holder = holding(run.lock_file)
    holder.kill()
    holder.communicate()
    assert run.lock_file.exists()
    ensure_unlocked(run.lock_file)
    with run.lock() as dead:
        assert json.loads(run.lock_file.read_text())["pid"] == os.getpid()
    assert (dead.pid, dead.host) == (holder.pid, socket.gethostname())


def test_a_lock_is_exclusive_within_a_process_too(run):
    with run.lock(), pytest.raises(StorageError, match=f"pid {os.getpid()}"), run.lock():
        pass


@pytest.mark.parametrize("content", ["", "garbage", "[]", '{"pid": 1}'])
def test_an_unreadable_lock_file_is_taken_over(run, content):
    run.lock_file.write_text(content)
    with run.lock():
        pass


def test_without_flock_the_content_decides(run, monkeypatch):
    import fcntl

    def no_locks(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    run.lock_file.write_text(json.dumps({"pid": os.getppid(), "host": "elsewhere", "started": 0.0}))
    with pytest.raises(StorageError, match="on elsewhere"), locked(run.lock_file):
        pass
    run.lock_file.write_text(json.dumps({"pid": os.getppid(), "host": socket.gethostname(), "started": 0.0}))
    with locked(run.lock_file):  # that pid is another process now
        pass
    me = Holder.me()
    run.lock_file.write_text(json.dumps({"pid": me.pid, "host": me.host, "started": me.started}))
    with pytest.raises(StorageError, match=f"pid {me.pid}"), locked(run.lock_file):
        pass


def test_a_free_lock_that_names_another_host_goes_by_whether_locks_reach_there(run, monkeypatch):
    run.lock_file.write_text(json.dumps({"pid": 1, "host": "elsewhere", "started": 0.0}))
    monkeypatch.setattr("rloo_cli.run.lock._is_heard_elsewhere", lambda path: False)
    with pytest.raises(StorageError, match=r"pid 1 on elsewhere .*if not, remove .*\.lock"), run.lock():
        pass
    assert run.lock_file.exists()
    monkeypatch.undo()
    with run.lock():  # on this file system flock has seen that nobody holds it: a container that was started again
        pass


@pytest.mark.parametrize(
    ("kind", "options", "heard"),
    [("nfs4", "rw", True), ("fuse.s3fs", "rw", False), ("lustre", "rw,flock", True), ("lustre", "rw,localflock", False)],
)
def test_which_file_systems_share_locks(tmp_path, monkeypatch, kind, options, heard):
    from types import SimpleNamespace

    mounts = [
        SimpleNamespace(mountpoint="/", fstype="ext4", opts="rw"),
        SimpleNamespace(mountpoint=str(tmp_path), fstype=kind, opts=options),
    ]
    monkeypatch.setattr(lock.psutil, "disk_partitions", lambda all: mounts)
    assert lock._is_heard_elsewhere(tmp_path / "run" / ".lock") is heard


def test_a_lock_file_that_cannot_be_opened(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic, "fs", FailingFileSystem(1, errno.EROFS, only=("open",), once=False))
    with pytest.raises(StorageError, match="cannot lock"), locked(tmp_path / ".lock"):
        pass


def test_many_processes_never_hold_the_lock_together(tmp_path):
    code = """
import os, pathlib, sys
from rloo_cli.errors import StorageError
from rloo_cli.run.lock import locked
folder = pathlib.Path(sys.argv[1])
held = 0
while held < 25:
    try:
        with locked(folder / ".lock"):
            os.close(os.open(folder / "inside", os.O_CREAT | os.O_EXCL))
            os.unlink(folder / "inside")
            held += 1
    except StorageError:
        pass
"""
    processes = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stderr=subprocess.PIPE, text=True) for _ in range(4)]
    assert [process.communicate(timeout=60)[1] for process in processes] == [""] * 4
    assert [process.returncode for process in processes] == [0] * 4
