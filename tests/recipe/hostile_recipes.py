"""Recipes that nobody should write, by number, and what `rloo plan --no-model` made of each.

    python tests/recipe/hostile_recipes.py 20000            counts by kind, and every case that broke the promise
    python tests/recipe/hostile_recipes.py --show 4711      one case and its answer

The promise: exit code 0, 2 or 3, lines that can be read, within CPU_SECONDS, within EXTRA_MEMORY; never a traceback.
Cases run in forked children, whose limits the kernel keeps: a hang in C or an exhausted memory ends the child alone.
"""

from __future__ import annotations

import argparse
import collections
import io
import json
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

from recipe_texts import VALID

from rloo_cli.cli.app import exit_code_of
from rloo_cli.recipe.fields import LEAVES, SECTIONS
from rloo_cli.recipe.trl_keys import OTHER_KEYS, RENAMED, TRL_KEYS
from rloo_cli.run.visible import visible

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
SEEDS = [VALID, *(path.read_text() for path in sorted(RECIPES.glob("*.yaml")))]
KEYS = [*LEAVES, *SECTIONS, "rewards", "extends", "reward_funcs", "reward_weights", "nonsense", "__class__", "model_config", "", "null"]
PEER_KEYS = [*TRL_KEYS, *OTHER_KEYS, *RENAMED]

CPU_SECONDS = 2.0
"""Processor time of one case; a busy machine is no fault of the recipe."""
WALL_SECONDS = 60.0
"""For what waits without working, such as a read from a pipe that nobody writes to."""
EXTRA_MEMORY = 512 << 20
"""Address space beyond what the imported program has."""
LONGEST_ANSWER = 60_000
PROMISED = (0, 2, 3)

PLAIN = """no yes on off true null ~ 1e-6 1e999 -1 0 1 2 8 010 0o17 0x1F 1_000 1:30 190:20:30 .nan .inf -.inf NaN inf 2026-01-31
2001-12-14t21:59:43.10-05:00 = << steps auto none all cosine x é 𝒳 ${HOME} ${ ${X} $ ~/x ~nobody/x ../../.. /dev/zero /dev/stdin /proc/self/mem / . r.yaml
accuracy_reward think_format_reward os.system builtins.eval rloo_cli.rewards rloo_cli.rewards.accuracy_reward a.b.c ..x os .""".split()
NESTED = [
    "[]",
    "{}",
    "[1, 2]",
    "[2, 1]",
    "{a: 1}",
    "[[[[[]]]]]",
    "{a: {b: {c: {d: 1}}}}",
    "[{function: accuracy_reward}]",
    "[null]",
    "{null: null}",
]
TRICKS = [
    *(
        "&a x",
        "*a",
        "&a [*a, *a]",
        "!!int 3",
        "!x y",
        "!!python/object/apply:os.system [id]",
        "!!binary aGk=",
        "<<: {a: 1}",
        "? x",
        "- x",
        "%YAML 1.1",
    ),
    *(
        "'",
        '"',
        '"\\0"',
        '"\\ud800"',
        '"\\x1b[2J"',
        '"\\u202e"',
        '"a\\nb"',
        "|\n  a\n b",
        ">-\n  folded",
        "a: b: c",
        "x # y",
        "`",
        "@",
        "\t",
        "{",
        "]",
        "---",
        "...",
    ),
    *("\u2028", "\ufeff", "\x85", "\x7f", "\x1b", "\x00", "\u200b", "\uffff"),
]


def _value(rng: random.Random) -> str:
    """The text of a hostile value."""
    match rng.randrange(8):
        case 0 | 1:
            return rng.choice(PLAIN)
        case 2:
            return rng.choice(NESTED)
        case 3:
            return rng.choice(TRICKS)
        case 4:
            return f"{rng.choice(['', '-'])}{rng.choice(['9' * rng.randrange(1, 400), '1' + '0' * 5000, str(2**63), str(2**31), '1e308', '1e-400'])}"
        case 5:
            depth = rng.choice([3, 19, 20, 21, 200, 5000])
            return rng.choice(["[" * depth + "]" * depth, "{a: " * depth + "1" + "}" * depth, "[" * depth])
        case 6:
            return "".join(
                chr(rng.choice([rng.randrange(32, 127), rng.randrange(0x300), rng.randrange(0x110000)])) for _ in range(rng.randrange(12))
            )
        case _:
            return rng.choice(["x", "x ", "[a, ", "é"]) * rng.choice([10, 1000, 100_000])


def _line(rng: random.Random) -> str:
    return f"{rng.choice(['', '', '  ', '    ', chr(9), '- '])}{rng.choice(rng.choice([KEYS, PEER_KEYS]))}{rng.choice([': ', ': ', ':', ' '])}{_value(rng)}"


# --- one text ----------------------------------------------------------------------------------------------------------------------


def _edit(text: str, rng: random.Random) -> str:
    """A real recipe, a few of its lines changed."""
    rows = text.split("\n")
    for _ in range(rng.randrange(1, 5)):
        at, other = rng.randrange(len(rows)), rng.randrange(len(rows))
        match rng.randrange(8):
            case 0:
                rows.insert(at, _line(rng))
            case 1:
                rows[at : at + 1] = [] if len(rows) > 1 else [""]
            case 2:
                rows.insert(at, rows[at])
            case 3 | 4:
                rows[at] = f"{rows[at].partition(':')[0]}: {_value(rng)}"
            case 5:
                rows[at], rows[other] = rows[other], rows[at]
            case 6:
                rows[at] = rng.choice(["", " ", "   ", "\t", "- "]) + rows[at].lstrip()
            case 7:
                rows[at] = rows[at][: rng.randrange(len(rows[at]) + 1)]
    return "\n".join(rows)


def _sections(rng: random.Random) -> str:
    """A recipe made of sections and fields that exist, with values that do not fit."""
    rows = []
    for section in rng.sample(sorted(SECTIONS), rng.randrange(1, len(SECTIONS) + 1)):
        rows.append(f"{section}:")
        own = [name for name, leaf in LEAVES.items() if leaf.section == section] or ["function", "weight"]
        rows += [f"  {name}: {_value(rng)}" for name in rng.sample(own, rng.randrange(min(6, len(own)) + 1))]
    return rng.choice(["", VALID]) + "\n".join(rows) + "\n"


def _flat(rng: random.Random) -> str:
    """A config file as it is written for TRL, with values of any kind."""
    rows = [
        f"{key}: {_value(rng) if rng.random() < 0.6 else rng.choice(['true', 'false', '1', '4', '0.5', 'x'])}"
        for key in rng.sample(PEER_KEYS, rng.randrange(1, 12))
    ]
    return rng.choice([VALID, "model_name_or_path: x\ndataset_name: y\nreward_funcs: [accuracy_reward]\n", ""]) + "\n".join(rows) + "\n"


def _megabyte(rng: random.Random) -> str:
    size = rng.choice([1 << 20, (1 << 20) - 400, 300_000])
    unit = rng.choice(
        ["x", "a, ", "- ", "? ", "k: v\n", "{a: ", "[", "- {functon: a.b}\n", "# ", "'", "é", "&a *a ", "\t", "\n", "x: &a [*a]\n"]
    )
    return (
        VALID
        + rng.choice(["", "stop: [", "run_name: ", "run_name: '", "chat_template_kwargs: ", "rewards:\n", "reward_funcs: ["])
        + unit * (size // len(unit.encode()) - 1000)
    )


def _encode(text: str, rng: random.Random) -> bytes:
    """The text as UTF-8, or not quite."""
    data = text.encode("utf-8", "surrogatepass")
    match rng.randrange(16):
        case 0:
            return b"\xef\xbb\xbf" + data
        case 1:
            return text.encode(rng.choice(["utf-16", "utf-16-le", "utf-32", "utf-7", "latin-1"]), "replace")
        case 2:
            return data.replace(b"\n", rng.choice([b"\r\n", b"\r", b"\n\n", b"\x0b", b"\x00\n"]))
        case 3 | 4:
            flipped = bytearray(data)
            for _ in range(rng.randrange(1, 6)):
                if flipped:
                    flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
            return bytes(flipped)
        case 5:
            return data[: rng.randrange(len(data) + 1)]
        case 6:
            return data + rng.choice([b"\0", b"\xff", b"\xed\xa0\x80", b"\x1a", b"\n---\n", b"\n...\nx"])
    return data


# --- a case -----------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Files (the first is the recipe) and the words after `rloo plan RECIPE --no-model`."""

    kind: str
    files: dict[str, bytes]
    arguments: list[str] = field(default_factory=list)


def _overrides(rng: random.Random) -> list[str]:
    paths = [
        "rewards[0].weight",
        "rewards.0.function",
        "rewards[9].name",
        "rewards[0].kwargs.a.b",
        "algorithm.beta",
        "a.b.c",
        "[0]",
        "data.chat_template_kwargs.x.y",
        "",
        "=",
    ]
    words = []
    for _ in range(rng.randrange(1, 4)):
        name = rng.choice(
            [rng.choice(KEYS), rng.choice(PEER_KEYS), rng.choice(paths), f"{rng.choice(sorted(SECTIONS))}.{rng.choice(sorted(LEAVES))}"]
        )
        words += ["--set", f"{name}{rng.choice(['=', '=', '=', '', ' = ', '=='])}{_value(rng)}"]
    return words


def _chain(rng: random.Random) -> dict[str, bytes]:
    """Recipes that extend each other, in a line or a circle."""
    count = rng.choice([2, 3, 5, 25])
    files = {}
    for i in range(count):
        base = rng.choice([f"{i + 1}.yaml", f"{rng.randrange(count)}.yaml", f"{i + 1}.yaml", f"./x/../{i + 1}.yaml", _value(rng)])
        body = (
            _edit(rng.choice(SEEDS), rng) if rng.random() < 0.5 else rng.choice([VALID, "algorithm:\n  beta: 0.1\n", _line(rng) + "\n", ""])
        )
        files[f"{i}.yaml"] = _encode(body + (f"\nextends: {base}\n" if i < count - 1 or rng.random() < 0.3 else ""), rng)
    return files


def case(number: int) -> Case:
    """The case of this number, always the same."""
    rng = random.Random(number)
    kind = rng.choice(
        ["edited"] * 6
        + ["sections"] * 3
        + ["flat"] * 3
        + ["overrides"] * 3
        + ["chain"] * 2
        + ["bytes"]
        + (["megabyte"] if number % 20 == 0 else [])
    )
    makers: dict[str, Callable[[], dict[str, bytes]]] = {
        "edited": lambda: {"0.yaml": _encode(_edit(rng.choice(SEEDS), rng), rng)},
        "sections": lambda: {"0.yaml": _encode(_sections(rng), rng)},
        "flat": lambda: {"0.yaml": _encode(_flat(rng), rng)},
        "overrides": lambda: {"0.yaml": rng.choice(SEEDS).encode()},
        "chain": lambda: _chain(rng),
        "bytes": lambda: {"0.yaml": rng.randbytes(rng.randrange(300))},
        "megabyte": lambda: {"0.yaml": _encode(_megabyte(rng), rng)},
    }
    files = makers[kind]()
    arguments = _overrides(rng) if kind == "overrides" or rng.random() < 0.1 else []
    # A NUL cannot be in an argument, and a lone surrogate arrives as the byte that it stands for.
    return Case(kind=kind, files=files, arguments=[re.sub("[\0\ud800-\udfff]", "\udcff", word) for word in arguments])


# --- its outcome -------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a case."""

    number: int
    kind: str
    code: int | None
    """None where the child died."""
    seconds: float
    fault: str
    """How the promise was broken; empty where it was kept."""
    answer: str


def _answer(files: dict[str, bytes], arguments: Sequence[str]) -> tuple[int, str, str]:
    """(exit code, standard output, standard error) of planning the first file, in the working directory, streams as strict as real ones."""
    for name, data in files.items():
        Path(name).write_bytes(data)
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", errors) for errors in ("strict", "backslashreplace"))
    with redirect_stdout(out), redirect_stderr(err):
        code = exit_code_of(["plan", next(iter(files)), "--no-model", *arguments])
        texts = []
        for stream in (out, err):
            stream.flush()
            texts.append(stream.buffer.getvalue().decode())
    return code, texts[0], texts[1]


def _fault(code: int, out: str, err: str) -> str:
    """How an answer breaks the promise."""
    if code not in PROMISED:
        return f"exit code {code}"
    if "Traceback" in out + err:
        return "a traceback"
    if len(err) > LONGEST_ANSWER:
        return f"{len(err)} characters of error"
    if (code == 0) == bool(err.strip()):
        return "an error without a message" if code else "a message without an error"
    bad = next((line for line in [*out.split("\n"), *err.split("\n")] if visible(line) != line), None)
    if bad is not None:
        return f"control characters on the terminal: {bad[:200]!r}"
    lines = [line for line in err.splitlines() if not re.match(r"(error: )?\d+ errors\. ", line)]
    stray = next(
        (line for line in lines if not re.match(r"(error: )?([^:]+:\d+:\d+|--set .*|[^:]+\.yaml|… and \d+ more)[:.]", line)),
        None,
    )
    return f"a line without a place: {stray[:200]!r}" if stray is not None else ""


def _limit() -> None:
    """The kernel ends this process at the deadline; memory beyond the limit is refused."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + EXTRA_MEMORY, used + EXTRA_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)


def _child(numbers: Sequence[int], pipe: int) -> None:
    """Write a line as each case begins and ends, in a folder of its own."""
    _limit()
    with tempfile.TemporaryDirectory() as folder, os.fdopen(pipe, "w") as report:
        os.environ["TMPDIR"] = tempfile.tempdir = folder  # the traceback files of bugs
        for number in numbers:
            one = case(number)
            home = Path(folder, str(number))
            home.mkdir()
            for companion in RECIPES.iterdir():  # models, data and rewards of the shipped recipes
                if companion.is_dir():
                    (home / companion.name).symlink_to(companion)
            os.chdir(home)
            print(json.dumps({"number": number, "kind": one.kind}), file=report, flush=True)
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
            signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)
            started = time.monotonic()
            code, out, err = _answer(one.files, one.arguments)
            seconds = time.monotonic() - started
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            answer = err[:2000] if code else out[:200]
            print(
                json.dumps({"code": code, "seconds": seconds, "fault": _fault(code, out, err), "answer": answer}), file=report, flush=True
            )
            os.chdir(folder)


def outcomes(numbers: Sequence[int]) -> Iterator[Outcome]:
    """What became of each case, in order; a child that dies is replaced."""
    left = list(numbers)
    while left:
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.close(ours)
                _child(left, theirs)
                code = 0
            finally:
                os._exit(code)
        os.close(theirs)
        begun = None
        with os.fdopen(ours) as report:
            for line in report:
                entry = json.loads(line)
                if "code" not in entry:
                    begun = entry
                    continue
                yield Outcome(**begun, **entry)
                left.pop(0)
                begun = None
        _, status = os.waitpid(pid, 0)
        if left:
            ended = os.waitstatus_to_exitcode(status)
            assert begun is not None, f"the child ended with {ended} before it began case {left[0]}"
            yield Outcome(
                **begun, code=None, seconds=CPU_SECONDS, fault=f"the process ended with {ended} (-27: {CPU_SECONDS} s of CPU)", answer=""
            )
            left.pop(0)


def main() -> int:
    """The exit code: 1 where a case broke the promise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", nargs="?", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--show", type=int)
    options = parser.parse_args()
    if options.show is not None:
        one = case(options.show)
        print(
            one.kind,
            *(f"\n--- {name}\n{data[:3000]!r}" for name, data in one.files.items()),
            "\n---",
            [word[:300] for word in one.arguments],
        )
        options.first, options.count = options.show, 1
    started, counts, slowest, faults = time.monotonic(), collections.Counter(), 0.0, 0
    for outcome in outcomes(range(options.first, options.first + options.count)):
        counts[outcome.kind, outcome.code] += 1
        slowest = max(slowest, outcome.seconds)
        if outcome.fault or options.show is not None:
            faults += bool(outcome.fault)
            print(f"case {outcome.number} ({outcome.kind}): {outcome.fault or 'kept'}\n    {outcome.answer[:600]}", flush=True)
    for (kind, code), count in sorted(counts.items(), key=str):
        print(f"{kind:<12} exit {code}: {count}")
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10
    print(
        f"{options.count} cases, {faults} broken, {time.monotonic() - started:.0f} s, slowest {slowest:.2f} s, largest process {peak} MiB"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
