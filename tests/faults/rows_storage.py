"""Group A: crash and storage. Once a checkpoint was saved, a complete one exists at every later instant."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import time
from pathlib import Path

from at_save import run_cases
from card import fault

SAVED = "000004"
"""The checkpoint that faults are aimed at; the one before is of step 2."""
KILL_STEPS, KILL_EVERY = 12, 2


# --- killed ------------------------------------------------------------------------------------------------------------------------


@fault("A1", "SIGKILL at the n-th call of a save to the file system, n = 1, 2, … until a run survives")
def killed_at_every_call_of_a_save(bench):
    settings = ["save_total_limit=1"]  # so that deletions are among the calls
    cases = run_cases(bench, "cases", step=4, settings=settings, fault="kill")
    bench.expect("exit code", all(case.code == -signal.SIGKILL for case in cases), f"{[case.code for case in cases]}")
    bench.expect("nothing lost", len(cases) > 40, f"only {len(cases)} calls in a save")
    for case in cases:
        expect_whole(bench, case.folder, where=f"n = {case.n} ({case.call}): ")
    looks = {case.look(): case for case in cases}
    for case in looks.values():
        go_on(bench, case, settings, where=f"n = {case.n} ({case.call}): ")
    bench.note(f"killed at each of {len(cases)} calls of a save, which left {len(looks)} different folders, each resumed")


def go_on(bench, case, settings, *, where):
    done = bench.train("--resume", folder=case.folder, settings=settings)
    bench.check(done, code=0, says=["from the checkpoint of step"], where=where)
    bench.is_gold(case.folder, *settings, where=where)
    bench.expect("nothing left behind", not done.temporary, f"{where}{done.temporary}")


@fault("A2", "SIGKILL at random moments of a run (seeded); each resumed")
def killed_at_random_moments(bench):
    settings = [f"max_steps={KILL_STEPS}", f"save_steps={KILL_EVERY}"]
    started = time.perf_counter()
    bench.gold(*settings)
    whole = bench.train(settings=settings).seconds
    draw, kills, lost = random.Random(2), 0, []
    while kills < bench.kills:
        after = draw.uniform(0, whole)
        outcome = bench.train(settings=settings, signal_when=(signal.SIGKILL, later(after)))
        if outcome.code == 0:  # it was quicker than the moment drawn
            continue
        kills += 1
        where = f"kill {kills}, after {after:.2f} s: "
        bench.expect("exit code", outcome.code == -signal.SIGKILL, f"{where}{outcome.tail()}")
        done_steps, saved = steps_recorded(outcome.folder), max(outcome.steps, default=0)
        lost.append(done_steps - saved)
        bench.expect("nothing lost", lost[-1] <= KILL_EVERY, f"{where}{done_steps} steps done, {saved} saved")
        bench.expect("nothing left behind", not outcome.orphans, f"{where}still running: {outcome.orphans}")
        done = bench.train("--resume=auto", folder=outcome, settings=settings)
        bench.check(done, code=0, where=where)
        bench.is_gold(done.folder, *settings, where=where)
        bench.expect("nothing left behind", not done.temporary, f"{where}{done.temporary}")
        shutil.rmtree(done.folder)
    seconds = time.perf_counter() - started
    bench.note(f"{kills} kills of a {KILL_STEPS}-step run saved every {KILL_EVERY}: at most {max(lost)} steps lost, {seconds:.0f} s in all")


def later(seconds):
    """A predicate that holds after so many seconds."""
    moment = time.monotonic() + seconds
    return lambda folder: time.monotonic() >= moment


def steps_recorded(folder):
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b'"loss"') if path.exists() else 0


def expect_whole(bench, folder, *, where):
    """Expect a checkpoint that verifies, and every one that does to hold the golden tensors of its step."""
    from rloo_cli.errors import RlooError
    from rloo_cli.run.checkpoint import find_checkpoint, list_steps

    steps = list_steps(folder / "checkpoints")
    verified = 0
    for step in steps:
        with contextlib.suppress(RlooError):
            checkpoint = find_checkpoint(folder / "checkpoints", step)
            verified += 1
            same = weights_hash(checkpoint.path) == golden_weights(bench, step)
            bench.expect("nothing lost", same, f"{where}checkpoint {step} verifies and holds other weights")
    bench.expect("nothing lost", verified == len(steps) > 0, f"{where}{verified} of the checkpoints {steps} verify")


def golden_weights(bench, step):
    """The hash of the weights that the undisturbed run saved at a step."""
    folder = bench.root / "golden-checkpoints"
    if not folder.exists():
        bench.train(folder=folder)
    return weights_hash(folder / "checkpoints" / f"{step:06d}")


def weights_hash(checkpoint):
    return hashlib.sha256((checkpoint / "model.safetensors").read_bytes()).hexdigest()


# --- no room, no right, no disk ------------------------------------------------------------------------------------------------------


@fault("A3", "ENOSPC in a checkpoint", quick=True)
def no_room_for_a_checkpoint(bench):
    outcome = bench.train(inject=lambda: fail_in_save(step=4, code=errno.ENOSPC))
    bench.check(outcome, code=6, says=[SAVED, "needed", "free", "--resume"])
    bench.expect("nothing lost", outcome.steps == [2], f"checkpoints {outcome.steps} instead of [2]")
    bench.expect("nothing left behind", not outcome.temporary, f"{outcome.temporary}")
    bench.resume_is_gold(outcome)
    early = bench.train(inject=little_room)
    bench.check(early, code=6, says=["000002", "no room", "needed", "1 kB free"], where="found before a byte is written: ")
    bench.resume_is_gold(early)


def fail_in_save(*, step, code):
    """Let the third write of the checkpoint of a step, and every one after it, fail."""
    from failpoints import FailingFileSystem

    from rloo_cli.run import atomic
    from rloo_cli.training import training_run

    save = training_run.save_checkpoint

    def failing(folder, number, **options):
        if number == step:
            atomic.fs = FailingFileSystem(3, code, only=("write",), once=False)
        return save(folder, number, **options)

    training_run.save_checkpoint = failing


def little_room():
    from rloo_cli.run import atomic

    atomic.FileSystem.free_bytes = lambda self, path: 1000


@fault("A4", "ENOSPC in metrics.jsonl, a rollout file, the recipe or final/")
def no_room_for_other_files(bench):
    for name, entry in (("metrics.jsonl", 3), ("000003.parquet", 1), ("recipe.yaml", 1), ("environment.json", 1), ("config.json", 1)):
        where = f"{name}: "
        outcome = bench.train(inject=lambda name=name, entry=entry: fail_on_file(name, entry))
        bench.check(outcome, code=6, says=["No space left", "free"], where=where)
        with contextlib.suppress(FileNotFoundError):
            for line in (outcome.folder / "metrics.jsonl").read_bytes().splitlines(keepends=True):
                bench.expect("nothing lost", line.endswith(b"}\n"), f"{where}half a line: {line[-60:]!r}")
                json.loads(line)
        bench.expect("nothing left behind", not outcome.temporary, f"{where}{outcome.temporary}")
        bench.resume_is_gold(outcome, where=where)


def fail_on_file(name, entry):
    """Let the n-th writing of a file take half of it and then find the disk full."""
    from rloo_cli.run import atomic

    class FullDisk(atomic.FileSystem):
        def __init__(self):
            self.opened, self.times = set(), 0

        def open(self, path, flags):
            descriptor = super().open(path, flags)
            self.opened.discard(descriptor)
            if name in Path(path).name and flags & os.O_WRONLY and "manifest" not in str(path):
                self.times += 1
                if self.times >= entry:
                    self.opened.add(descriptor)
            return descriptor

        def write(self, descriptor, data):
            if descriptor in self.opened and len(data) < 2:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return os.write(descriptor, data[: len(data) // 2] if descriptor in self.opened else data)

    atomic.fs = FullDisk()
    if name == "config.json":  # final/ is written by transformers
        from transformers import PreTrainedModel

        def full(self, *arguments, **options):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        PreTrainedModel.save_pretrained = full


@fault("A5", "read-only run folder; a file where a folder should be", quick=True)
def no_right_or_no_folder(bench):
    never = forbid_loading
    read_only = bench.root / "read-only"
    read_only.mkdir()
    read_only.chmod(0o555)
    for where, folder in (("the folder: ", read_only), ("its parent: ", read_only / "run")):
        outcome = bench.train(folder=folder, inject=lambda: (drop_root_rights(), never()))
        bench.check(outcome, code=6, says=["Permission denied", "--output-dir"], where=where)
        bench.expect("nothing left behind", not list(read_only.iterdir()), f"{where}{list(read_only.iterdir())}")
    bench.write("file", "precious")
    for where, folder in (("a file: ", bench.root / "file"), ("below a file: ", bench.root / "file" / "run")):
        bench.check(bench.train(folder=folder, inject=never), code=6, says=[str(bench.root / "file"), "move it away"], where=where)
    bench.expect("nothing lost", (bench.root / "file").read_text() == "precious", "the file was changed")
    base = stopped_after_two_saves(bench)
    for name in ("rollouts", "checkpoints", "logs", "final"):
        where = f"a file for {name}/: "
        run = shutil.copytree(base.folder, bench.root / "case")
        (run / name).rename(bench.root / "kept") if (run / name).exists() else None
        (run / name).write_text("precious")
        outcome = bench.train("--resume", folder=run, inject=never)
        bench.check(outcome, code=6, says=[str(run / name), "move it away"], where=where)
        bench.expect("nothing lost", (run / name).read_text() == "precious", f"{where}the file was changed")
        bench.expect("nothing left behind", not outcome.temporary, f"{where}{outcome.temporary}")
        (run / name).unlink()
        (bench.root / "kept").rename(run / name) if (bench.root / "kept").exists() else None
        bench.resume_is_gold(outcome, where=where)
        shutil.rmtree(run)


def forbid_loading():
    """End with 99 where a model is loaded: everything above has to be found before."""
    from rloo_cli.training import train

    train.load_model = lambda *arguments, **options: os._exit(99)


def drop_root_rights():
    """Let permissions count for this process, also where the tests run as root."""
    import ctypes

    class Header(ctypes.Structure):
        _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]

    class Data(ctypes.Structure):
        _fields_ = [("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32)]

    version_3 = 0x20080522
    ctypes.CDLL(None, use_errno=True).capset(ctypes.byref(Header(version_3, 0)), ctypes.byref((Data * 2)()))


# --- damaged checkpoints -------------------------------------------------------------------------------------------------------------


@fault("A6", "newest checkpoint truncated at 0, 1 byte, 50, 99 %, each file in turn")
def truncated(bench):
    damage_each_file(
        bench, {"0 %": lambda data: b"", "1 byte": lambda data: data[:1], "50 %": lambda data: data[: len(data) // 2], "99 %": cut_end}
    )


@fault("A7", "one bit flipped in each file of the newest checkpoint in turn")
def flipped(bench):
    damage_each_file(bench, {"a bit": flip, "the last bit": lambda data: data[:-1] + bytes([data[-1] ^ 1])})


def cut_end(data):
    return data[: min(len(data) - 1, len(data) * 99 // 100)]


def flip(data):
    position = len(data) // 3
    return data[:position] + bytes([data[position] ^ 0x10]) + data[position + 1 :]


def damage_each_file(bench, kinds):
    base = stopped_after_two_saves(bench, settings=["num_iterations=3"])  # a batch serves three steps, so one is in the checkpoint
    saved = base.folder / "checkpoints" / SAVED
    names = sorted(path.relative_to(saved).as_posix() for path in saved.rglob("*") if path.is_file())
    bench.expect("nothing lost", "experience.safetensors" in names, f"a checkpoint of {names} only")
    for name in names:
        for kind, damage in kinds.items():
            where = f"{name}, {kind}: "
            folder = shutil.copytree(base.folder, bench.root / "case")
            file = folder / "checkpoints" / SAVED / name
            file.write_bytes(damage(file.read_bytes()))
            outcome = bench.train("--resume", folder=folder, settings=base.settings)
            bench.check(outcome, code=0, says=[f"{SAVED}/{name}", "from the checkpoint of step 2"], where=where)
            bench.is_gold(folder, *base.settings, where=where)
            aside = folder / "checkpoints" / f"{SAVED}.aside-1" / name
            bench.expect("nothing lost", aside.exists(), f"{where}the damaged checkpoint is gone")
            bench.expect("nothing left behind", not outcome.temporary, f"{where}{outcome.temporary}")
            shutil.rmtree(folder)
    bench.note(f"{len(names)} files, {len(kinds)} kinds of damage each")


def stopped_after_two_saves(bench, *, settings=()):
    """A run killed in its fifth step: checkpoints of steps 2 and 4."""
    from bench import signal_in_phase

    outcome = bench.train(settings=settings, inject=signal_in_phase("train", signal.SIGKILL, entry=5))
    assert outcome.code == -signal.SIGKILL, outcome.output
    assert outcome.steps == [2, 4], outcome.steps
    return outcome


@fault("A8", "all checkpoints bad", quick=True)
def all_bad(bench):
    base = stopped_after_two_saves(bench)
    checkpoints = base.folder / "checkpoints"
    saved = {file: file.read_bytes() for file in checkpoints.rglob("*") if file.is_file()}
    (checkpoints / "000002" / "model.safetensors").write_bytes(b"")
    (checkpoints / SAVED / "manifest.json").unlink()
    before = tree(checkpoints)
    outcome = bench.train("--resume", folder=base)
    bench.check(
        outcome,
        code=6,
        lines=4,
        says=["all 2 checkpoints", "000002/model.safetensors: 0 bytes instead of", f"{SAVED}/manifest.json", "nothing was deleted"],
    )
    bench.expect("nothing lost", tree(checkpoints) == before, "the damaged checkpoints were changed")
    bench.expect("nothing left behind", not outcome.temporary, f"{outcome.temporary}")
    for file, data in saved.items():
        file.write_bytes(data)
    bench.resume_is_gold(base)


def tree(folder):
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@fault("A9", "checkpoint of another recipe, model, G or version", quick=True)
def foreign_checkpoint(bench):
    base = stopped_after_two_saves(bench)
    before = tree(base.folder / "checkpoints")
    config = bench.root / "model" / "config.json"
    other_model = shutil.copytree(bench.root / "model", bench.root / "other-model")
    asked = {
        "another learning rate": (["learning_rate=0.5"], "training.learning_rate: 0.001 in the run, 0.5 now"),
        "another model": ([f"model_name_or_path={other_model}"], "model.model_name_or_path"),
        "another G": (["num_generations=2"], "generation.num_generations: 4 in the run, 2 now"),
    }
    for where, (settings, says) in asked.items():
        outcome = bench.train("--resume", folder=base, settings=settings)
        bench.check(outcome, code=2, says=[says], lines=9, where=f"{where}: ")
    whole = config.read_text()
    config.write_text(json.dumps(json.loads(whole) | {"intermediate_size": 64}))
    bench.check(bench.train("--resume", folder=base), code=2, says=["is not the model that"], where="other shapes under the same name: ")
    config.write_text(whole)
    stranger = stopped_after_two_saves(bench, settings=["num_generations=2"])
    from_elsewhere = bench.train(f"--resume={stranger.folder / 'checkpoints' / SAVED}", folder=base)
    bench.check(from_elsewhere, code=2, says=["is of another run"], where="another run's: ")
    bench.expect("nothing lost", tree(base.folder / "checkpoints") == before, "the checkpoints were changed")
    newer = shutil.copytree(base.folder, bench.root / "newer")
    pretend_version(newer / "checkpoints" / SAVED, "9.9.0")
    bench.check(bench.train("--resume", folder=newer), code=2, says=["written by rloo 9.9.0"], where="another version: ")
    bench.resume_is_gold(base)


def pretend_version(checkpoint, version):
    """Rewrite a manifest as another version of rloo would have written it."""
    from rloo_cli.run.manifest import Manifest

    manifest = Manifest.read(checkpoint)
    (checkpoint / "manifest.json").write_bytes(Manifest(info={**manifest.info, "rloo": version}, files=manifest.files).to_bytes())


# --- two at once, and deletion -------------------------------------------------------------------------------------------------------


@fault("A10", "two runs on one folder", quick=True)
def two_runs_on_one_folder(bench):
    second = {}

    def start_another(folder):
        """Once the first is under way, start others, then say that it may be killed."""
        if steps_recorded(folder) < 3:
            return False
        for how in ("", "--resume", "--resume=auto"):
            second[how] = bench.train(*([how] if how else []), folder=folder)
        return True

    first = bench.train(settings=["max_steps=6"], signal_when=(signal.SIGKILL, start_another), inject=lambda: slow_down(after=3))
    holder = json.loads((first.folder / ".lock").read_text())
    for how, outcome in second.items():
        bench.check(outcome, code=6, says=["locked by pid", str(holder["pid"]), socket.gethostname()], where=f"{how or 'a new run'}: ")
    bench.expect("exit code", first.code == -signal.SIGKILL, f"the first run: {first.tail()}")
    bench.expect("nothing left behind", (first.folder / ".lock").exists(), "no lock to take over")
    done = bench.resume_is_gold(first)
    bench.expect(
        "message", f"took over the lock of pid {holder['pid']}" in done.output + done.log, "nothing is said of the dead run's lock"
    )
    bench.expect("nothing left behind", not (first.folder / ".lock").exists(), "the lock stays after the end")


def slow_down(*, after):
    """Wait in each step after so many."""
    from rloo_cli.training.training_run import TrainingRun

    original = TrainingRun.next_batch

    def waiting(self):
        if self.step >= after:
            time.sleep(20)
        original(self)

    TrainingRun.next_batch = waiting


@fault("A11", "deletion of an old checkpoint fails")
def old_checkpoint_stays(bench):
    from bench import signal_in_phase, together

    settings = ["save_total_limit=1"]
    for call in ("rename", "unlink", "rmdir"):
        where = f"{call}: "
        stubborn = lambda call=call: fail_deletions(call)  # noqa: E731
        outcome = bench.train(settings=settings, inject=stubborn)
        bench.check(outcome, code=0, says=["warning", "could not be deleted", "Training goes on"], where=where)
        bench.expect("nothing lost", 6 in outcome.steps, f"{where}the newest is not there: {outcome.steps}")
        bench.is_gold(outcome.folder, *settings, where=where)
        killed = bench.train(settings=settings, inject=together(stubborn, signal_in_phase("train", signal.SIGKILL, entry=5)))
        done = bench.resume_is_gold(killed, where=f"{where}killed afterwards, ")
        bench.expect("nothing left behind", done.steps == [6], f"{where}checkpoints {done.steps} after the next start")


def fail_deletions(call):
    """Let what belongs to a checkpoint resist its deletion."""
    from rloo_cli.run import atomic

    class Stubborn(atomic.FileSystem):
        def refuse(self, path):
            if "/checkpoints/" in str(path) and ".tmp-probe" not in str(path):
                raise OSError(errno.EACCES, os.strerror(errno.EACCES))

        def rename(self, source, target):
            if call == "rename" and ".tmp-" not in Path(source).name:
                self.refuse(source)
            super().rename(source, target)

        def unlink(self, path):
            if call == "unlink" and "/0000" in str(path).replace(".tmp-", ""):
                self.refuse(path)
            super().unlink(path)

        def rmdir(self, path):
            if call == "rmdir":
                self.refuse(path)
            super().rmdir(path)

    atomic.fs = Stubborn()


@fault("A12", "EIO, short write, failing fsync at the n-th call of a save, n = 1, 2, … until none is left")
def failing_disk_at_every_call_of_a_save(bench):
    faults = {"EIO": (errno.EIO, None), "a short write, then ENOSPC": ("short", ("write",)), "a failing fsync": (errno.EIO, ("fsync",))}
    settings = ["save_total_limit=1"]
    resumed = set()
    for name, (what, only) in faults.items():
        cases = run_cases(bench, name.replace(" ", "-"), step=4, settings=settings, fault=what, only=only)
        for case in cases:
            where = f"{name}, n = {case.n} ({case.call}): "
            said = "could not be deleted" if case.code == 0 else "error: "
            bench.expect("exit code", case.code in (0, 6), f"{where}{case.code}: {case.output[-300:]}")
            bench.expect("message", said in case.output or is_silent(case), f"{where}no `{said}`: {case.output[-300:]}")
            bench.expect("message", "Traceback" not in case.output, f"{where}a traceback on the terminal")
            expect_whole(bench, case.folder, where=where)
        looks = {case.look(): case for case in cases}
        for case in (case for look, case in looks.items() if look not in resumed):
            go_on(bench, case, settings, where=f"{name}, n = {case.n} ({case.call}), resumed: ")
        resumed |= looks.keys()
        bench.note(f"{name}: at each of {len(cases)} calls of a save, which left {len(looks)} different folders, each resumed")


def is_silent(case):
    """Whether what failed changes nothing that anybody would want to know: a close of a file that is durable already."""
    return case.code == 0 and case.call == "close"
