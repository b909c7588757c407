"""What a row works with: a folder of its own with a recipe, runs of the program with a fault in them, and the run that none disturbed.

    bench.train("--resume", settings=["save_steps=1"], inject=function, folder=earlier, signal_when=(SIGTERM, predicate)) -> Outcome
    bench.check(outcome, code=6, says=["free"])      exit code, message (one line, no traceback), bounded time, nothing left behind
    bench.resume_is_gold(outcome)                    nothing lost: resume without the fault, and compare to the bit
    bench.expect("nothing lost", ok, "what was found")      anything else; the points are `card.POINTS`
    bench.note("12 kills, 3.4 s each")               a figure for the table
    bench.write("my_rewards.py", "def f(completions, **kwargs): …")      beside the recipe; then settings=["rewards=[{function: my_rewards.f}]"]

A run is a fork of this process, which has imported everything but has not computed anything: a second instead of ten. In the child,
`inject()` comes first and may patch whatever it likes (`failpoints.py`, `signal_in_phase`); then the program's own entry gets the
command line. The child leads a session and carries a mark in its environment, so that whatever it leaves running is found and counted
(workers lead sessions of their own), and then killed.

The recipe: a random model of 2 layers (width 64, heads of 32, bytes as vocabulary), 6 prompts, 2 a step, G 4, 8 completion tokens, 6
steps, a checkpoint every 2. One thread, float32: the same bits every time.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import pkgutil
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from card import Result

Inject = Callable[[], None]
Predicate = Callable[[Path], bool]

MARK = "RLOO_FAULT_CARD"
"""Environment variable that marks whatever a run starts."""
LONGEST = 60.0
"""Seconds that any fault may take."""
POLL_SECONDS = 0.002
LEAVING_SECONDS = 5.0
"""How long what a run started may take to follow it."""
BUG, STOPPED = 1, 75

RECIPE = """\
model:
  model_name_or_path: model
  random_weights: true
data:
  dataset_name: prompts.jsonl
  dataset_test_split: train
rewards:
  - function: letters.share_of_letters
generation:
  num_generations: 4
  max_completion_length: 8
algorithm:
  beta: 0.05
training:
  prompts_per_step: 2
  max_steps: 6
  learning_rate: 1.0e-3
  bf16: false
  gradient_checkpointing: false
  layout: packed
  head_chunk: null
  max_tokens_per_micro_batch: 4096
  threads: 1
  seed: 7
run:
  logging_steps: 1
  save_steps: 2
  reward_workers: 1
"""
REWARD = """\
def share_of_letters(completions, **kwargs):
    return [sum(c.isalpha() for c in text) / max(len(text), 1) for text in completions]
"""
PROMPTS = ["Name a colour.", "Count to three.", "Say hello.", "What rhymes with tree?", "Two and two?", "Yes or no?"]


@dataclass(kw_only=True)
class Outcome:
    """How a run of the program ended."""

    code: int | None
    """Its exit code, negative for a signal; None: it was still running at the time limit, and was killed."""
    output: str
    """Standard output and error, as they came."""
    error: str
    """Standard error alone."""
    seconds: float
    folder: Path
    """The run folder."""
    settings: tuple[str, ...]
    orphans: list[str] = field(default_factory=list)
    """Processes that outlived it by more than `LEAVING_SECONDS`, as `pid command`; they were killed."""

    @property
    def log(self) -> str:
        """The train.log of its attempt; empty without one."""
        logs = sorted(self.folder.glob("logs/attempt-*/train.log"), key=lambda path: int(path.parent.name.split("-")[1]))
        return logs[-1].read_text() if logs else ""

    @property
    def temporary(self) -> list[str]:
        """Temporary files and folders anywhere in the run folder."""
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob(".tmp-*"))

    @property
    def steps(self) -> list[int]:
        """The steps of the checkpoints there are."""
        return sorted(int(path.name) for path in self.folder.glob("checkpoints/[0-9]*") if path.name.isdecimal())

    @property
    def rows(self) -> list[dict[str, Any]]:
        """metrics.jsonl; a ValueError where a line is not whole."""
        path = self.folder / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        if text and not text.endswith("\n"):
            raise ValueError(f"metrics.jsonl ends in half a line: {text[-60:]!r}")
        return [json.loads(line) for line in text.splitlines()]

    def tail(self) -> str:
        """The end of what it said, for a detail; of a bug the end of its traceback too."""
        lines = (self.error or self.output).strip().splitlines()[-3:]
        if self.code == BUG:
            lines += self.log.strip().splitlines()[-12:]
        return " | ".join(line.strip() for line in lines)[-900:]


@dataclass(frozen=True, kw_only=True)
class Gold:
    """What a run comes to: rows of metrics without perf/, and the sha256 of the final weights."""

    rows: list[dict[str, Any]]
    weights: str

    def difference(self, other: Gold) -> str:
        """What differs, in a line; empty where nothing does."""
        for i, (ours, theirs) in enumerate(zip(self.rows, other.rows, strict=False)):
            if ours != theirs:
                keys = [key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)]
                return f"row {i} of metrics.jsonl differs in {', '.join(sorted(keys))}"
        if len(self.rows) != len(other.rows):
            return f"{len(other.rows)} rows of metrics instead of {len(self.rows)}"
        return "" if self.weights == other.weights else "other weights in final/"


class Workshop:
    """Owns what rows share: the imports, the model's folder, and the golden runs."""

    def __init__(self, *, kills: int = 20) -> None:
        self.kills = kills
        self.golds: dict[tuple[str, ...], Gold] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Workshop:
        self.root = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="rloo-faults-")))
        warm_up()
        code = in_child(lambda: write_assets(self.root / "assets"))
        assert code == 0, "the scorecard's model could not be written"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    @contextlib.contextmanager
    def bench(self, result: Result) -> Iterator[Bench]:
        """A bench for one row; its folder is gone afterwards."""
        root = self.root / result.id
        shutil.copytree(self.root / "assets", root)
        try:
            yield Bench(self, root, result)
        finally:
            for folder in [root, *(path for path in root.rglob("*") if path.is_dir() and not path.is_symlink())]:
                folder.chmod(0o755)  # a row may have taken its own rights away
            shutil.rmtree(root)


class Bench:
    """One row's folder, runs and expectations."""

    def __init__(self, workshop: Workshop, root: Path, result: Result) -> None:
        self.root = root
        self.recipe = root / "recipe.yaml"
        self.kills = workshop.kills
        self._workshop = workshop
        self._result = result
        self._runs = 0

    def expect(self, point: str, ok: bool, detail: str) -> bool:
        """State an expectation of one of the five points; whether it held comes back."""
        return self._result.expect(point, bool(ok), detail)

    def note(self, figure: str) -> None:
        """Report a figure with the table."""
        self._result.figures.append(figure)

    def write(self, name: str, text: str | bytes) -> Path:
        """A file beside the recipe, where reward functions are imported from."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    def train(
        self,
        *arguments: str,
        settings: Sequence[str] = (),
        folder: Path | Outcome | None = None,
        inject: Inject | None = None,
        signal_when: tuple[int, Predicate] | None = None,
        timeout: float = LONGEST,
        recipe: Path | None = None,
    ) -> Outcome:
        """A run of `rloo train`, ended.

        Args:
            arguments: further ones of the command line, such as `--resume`.
            settings: `key=value` of `--set`; they also say which golden run is meant.
            folder: the run folder, or the outcome whose folder is gone on with; None = a new one.
            inject: called in the child before the program starts; see `signal_in_phase` and failpoints.py.
            signal_when: (number, predicate): the signal is sent as soon as predicate(run folder) holds.
            timeout: seconds until everything is killed and `code` is None.
            recipe: another than the bench's.
        """
        path = self._new_folder() if folder is None else folder.folder if isinstance(folder, Outcome) else folder
        sets = [part for setting in settings for part in ("--set", setting)]
        command = ["train", str(recipe or self.recipe), "--output-dir", str(path), *sets, *arguments]
        return self.run(command, folder=path, settings=settings, inject=inject, signal_when=signal_when, timeout=timeout)

    def run(
        self,
        command: Sequence[str],
        *,
        folder: Path | None = None,
        settings: Sequence[str] = (),
        inject: Inject | None = None,
        signal_when: tuple[int, Predicate] | None = None,
        timeout: float = LONGEST,
    ) -> Outcome:
        """A run of any command line of the program."""
        self._runs += 1
        mark = f"{os.getpid()}-{self._result.id}-{self._runs}"
        outcome = Outcome(code=None, output="", error="", seconds=0.0, folder=folder or self.root, settings=tuple(settings))
        both, errors = self.root / f".output-{self._runs}", self.root / f".error-{self._runs}"
        started = time.perf_counter()
        pid = _fork(lambda: _child(command, self.root, both, errors, mark, inject))
        outcome.code = _wait(pid, timeout, outcome.folder, signal_when)
        outcome.seconds = time.perf_counter() - started
        outcome.orphans = _end_survivors(pid, mark)
        outcome.output, outcome.error = (path.read_text(errors="replace") for path in (both, errors))
        return outcome

    def gold(self, *settings: str) -> Gold:
        """The uninterrupted run of these settings; made once."""
        key = tuple(settings)
        if key not in self._workshop.golds:
            outcome = self.train(settings=settings)
            if outcome.code != 0:
                raise RuntimeError(f"the undisturbed run failed with {outcome.code}: {outcome.output[-500:]}")
            self._workshop.golds[key] = read_gold(outcome.folder)
        return self._workshop.golds[key]

    def check(
        self, outcome: Outcome, *, code: int, says: Sequence[str] = (), within: float = LONGEST, lines: int | None = None, where: str = ""
    ) -> bool:
        """Expect an exit code, a message of one line that holds each of `says`, an end in time, and no process left; whether all did.

        Args:
            outcome: the run.
            code: its exit code.
            says: what its output has to contain.
            within: seconds.
            lines: most lines of standard error (notes aside) where one is not enough; a stop by a signal has two.
            where: put before each detail, for rows with many runs.
        """
        error = [line for line in outcome.error.splitlines() if line.strip() and not line.startswith("note:")]
        most = lines if lines is not None else 2 if code == STOPPED else 1
        tail = outcome.tail()
        missing = [text for text in says if text not in outcome.output]
        held = [
            self.expect("exit code", outcome.code == code, f"{where}{outcome.code} instead of {code}: {tail}"),
            self.expect("message", not missing, f"{where}it does not say {missing}: {tail}"),
            self.expect("message", "Traceback" not in outcome.output, f"{where}a traceback on the terminal: {tail}"),
            self.expect("message", len(error) <= most, f"{where}{len(error)} lines of error: {tail}"),
            self.expect("message", bool(error) or code == 0, f"{where}no word on standard error"),
            self.expect("bounded time", outcome.code is not None and outcome.seconds <= within, f"{where}{outcome.seconds:.1f} s"),
            self.expect("nothing left behind", not outcome.orphans, f"{where}still running: {outcome.orphans}"),
        ]
        return all(held)

    def resume_is_gold(self, outcome: Outcome, *, settings: Sequence[str] | None = None, where: str = "") -> Outcome:
        """Go on without the fault (unless the run came to its end) and expect the golden bits and a clean folder.

        Args:
            outcome: the run.
            settings: of the resume and the golden run, where not the outcome's own.
            where: put before each detail.
        """
        wanted = outcome.settings if settings is None else tuple(settings)
        done = outcome if (outcome.folder / "final" / "manifest.json").exists() else self.train("--resume", folder=outcome, settings=wanted)
        if self.expect("nothing lost", done.code == 0 or done is outcome, f"{where}--resume ended with {done.code}: {done.tail()}"):
            self.is_gold(done.folder, *wanted, where=where)
        self.expect("bounded time", done.seconds <= LONGEST, f"{where}the resume took {done.seconds:.1f} s")
        self.expect("nothing left behind", not done.orphans, f"{where}still running: {done.orphans}")
        if done is not outcome:
            self.expect("nothing left behind", not done.temporary, f"{where}temporary files after the next start: {done.temporary}")
        return done

    def is_gold(self, folder: Path, *settings: str, where: str = "") -> bool:
        """Expect a finished run folder to hold the golden bits."""
        try:
            difference = self.gold(*settings).difference(read_gold(folder))
        except (OSError, ValueError) as error:
            difference = str(error)
        return self.expect("nothing lost", not difference, f"{where}{difference}")

    def _new_folder(self) -> Path:
        number = 1
        while (path := self.root / f"run-{number}").exists():
            number += 1
        return path


def read_gold(folder: Path) -> Gold:
    """What a finished run folder holds."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [{key: value for key, value in json.loads(line).items() if not key.startswith("perf/")} for line in lines]
    return Gold(rows=rows, weights=hashlib.sha256((folder / "final" / "model.safetensors").read_bytes()).hexdigest())


def signal_in_phase(phase: str, *numbers: int, entry: int = 1) -> Inject:
    """An `inject` that sends the process signals as it enters a phase for the n-th time.

    Phases: load model, generate, train, sync, evaluate, save. Rewards are computed during generate.
    """

    def inject() -> None:
        from rloo_cli.run.progress import Progress

        original, entered = Progress.phase, 0

        @contextlib.contextmanager
        def phase_with_signal(self: Progress, name: str) -> Iterator[None]:
            nonlocal entered
            with original(self, name):
                entered += name == phase
                if name == phase and entered == entry:
                    for number in numbers:
                        os.kill(os.getpid(), number)
                yield

        Progress.phase = phase_with_signal

    return inject


def together(*injects: Inject) -> Inject:
    """Several as one."""

    def inject() -> None:
        for each in injects:
            each()

    return inject


def warm_up() -> None:
    """Import what a run imports, all of the program, so that every run is of one version. Nothing is computed: a fork after torch has
    used its threads hangs.
    """
    import datasets  # noqa: F401
    import pyarrow.parquet  # noqa: F401
    import torch
    import transformers
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401

    import rloo_cli

    for module in pkgutil.walk_packages(rloo_cli.__path__, "rloo_cli."):
        if not any(word in module.name for word in ("__main__", "vllm", "serving", "_child")):
            with contextlib.suppress(ImportError):  # what the program needs of an extra that is not here, its runs will tell
                importlib.import_module(module.name)
    torch.set_num_threads(1)


def write_assets(folder: Path) -> None:
    """The recipe, its reward, prompts, and the model's folder: configuration and tokenizer, no weights."""
    import tiny
    from transformers import Qwen2Config

    folder.mkdir(parents=True)
    common = tiny._common(tiny.VOCAB)
    config = Qwen2Config(**{**common, "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True})
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(folder / "model")
    tiny.byte_tokenizer().save_pretrained(folder / "model")
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "letters.py").write_text(REWARD)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))


def in_child(work: Callable[[], Any]) -> int:
    """The exit code of a fork that does `work`: 0, or 1 after an exception, whose traceback is printed; negative for a signal."""
    _, status = os.waitpid(_fork(work), 0)
    return os.waitstatus_to_exitcode(status)


def _fork(work: Callable[[], Any]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = work() or 0
        except BaseException:  # noqa: BLE001 - it must not climb into the parent's code
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return pid


def _child(command: Sequence[str], root: Path, both: Path, errors: Path, mark: str, inject: Inject | None) -> int:
    """The exit code of the program, in a session of its own, with its output in files."""
    os.setsid()
    os.environ[MARK] = mark
    os.chdir(root)
    _redirect(both, errors)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and so would we
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    sys.argv = ["rloo", *command]
    _do_not_wait_for_the_disk()
    if inject is not None:
        inject()
    from rloo_cli.cli.app import exit_code_of

    code = exit_code_of(command)
    for thread in threading.enumerate():  # as the interpreter does at its end; one that never ends is a fault, found by the time limit
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    return code


def _do_not_wait_for_the_disk() -> None:
    """fsync is still called, counted and failed on purpose, and returns at once: a kill takes nothing from the kernel."""
    from rloo_cli.run import atomic

    atomic.FileSystem.fsync = staticmethod(lambda descriptor: None)


def _redirect(both: Path, errors: Path) -> None:
    """Standard output to one file; standard error to it as well, and to one of its own."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    null, output, error = os.open(os.devnull, os.O_RDONLY), os.open(both, flags), os.open(errors, flags)
    os.dup2(null, 0)
    os.dup2(output, 1)
    os.dup2(error, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = _Tee(os.fdopen(2, "w", buffering=1, closefd=False), sys.stdout)


class _Tee:
    """Standard error, which the file of both outputs has too. What C code writes is in its own file alone."""

    def __init__(self, own: Any, other: Any) -> None:
        self._own, self._other = own, other

    def write(self, text: str) -> int:
        self._other.write(text)
        return self._own.write(text)

    def flush(self) -> None:
        self._other.flush()
        self._own.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


def _wait(pid: int, timeout: float, folder: Path, signal_when: tuple[int, Predicate] | None) -> int | None:
    """The exit code; None after the time limit, when it was killed."""
    deadline = time.monotonic() + timeout
    handle = os.pidfd_open(pid)
    try:
        while True:
            left = deadline - time.monotonic()
            ended = select.select([handle], [], [], max(0.0, min(left, POLL_SECONDS) if signal_when else left))[0]
            if ended or left <= 0:
                break
            if signal_when is not None and signal_when[1](folder):
                os.kill(pid, signal_when[0])
                signal_when = None
        if not ended:
            os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return code if ended else None
    finally:
        os.close(handle)


def _end_survivors(session: int, mark: str) -> list[str]:
    """Processes of the session, or with the mark, that are still there after a while; they are killed."""
    deadline = time.monotonic() + LEAVING_SECONDS
    while survivors := _survivors(session, mark):
        if time.monotonic() > deadline:
            for pid in survivors:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return [f"{pid} {command}" for pid, command in survivors.items()]
        time.sleep(0.01)
    return []


def _survivors(session: int, mark: str) -> dict[int, str]:
    needle = f"{MARK}={mark}\0".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
                is_ours = int(fields[3]) == session or needle in (entry / "environ").read_bytes()
                if is_ours and fields[0] != "Z":
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:80]
    return found
