"""Every command block of the pages is run, or stands in NOT_RUN with the reason."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from doc_world import BLOCK, ROOT, SUBSTITUTES, build_world, pages, substituted

from rloo_cli.cli.app import exit_code_of

HUB = "its model or its data lie on the hub"
INSTALLS = "installs packages"
SUITE = "runs the tests, or a set-up that takes root or minutes: a target of the Makefile, which the next test looks for"
CLUSTER = "needs a cluster"
MACHINES = "needs a second machine"
SERVES = "serves until it is stopped; tests/serving starts it"
DEVICES = "needs several GPUs and a server on some of them"
STAYS = "stays until a person leaves it"
LONG = "a benchmark or a series of faults, of many minutes"

NOT_RUN = {
    "CONTRIBUTING.md": {
        "make install": SUITE,
        "make check": SUITE,
        "make test": SUITE,
        "make test-all": SUITE,
        "make vllm-cpu": SUITE,
        "make test-vllm": SUITE,
        "make slurm": SUITE,
        "make test-slurm": SUITE,
        "make demo": SUITE,
    },
    "README.md": {"make demo": SUITE},
    "doctor.md": {
        "rloo doctor --server http://gpu2:8000 --key-file key": MACHINES,
        "rloo --install-completion": "writes to the shell's own start-up file; tests/cli/test_completion.py does it in a home folder of its own",
    },
    "lora.md": {'pip install "rloo[peft]"': INSTALLS, "python benchmarks/lora.py": LONG},
    "hub.md": {"hf upload my-team/my-model runs/mine/final . --exclude manifest.json": "uploads to the hub"},
    "images.md": {"from datasets import Dataset, Image, List": "opens a viewer of pictures"},
    "looking.md": {"rloo generate runs/quick --interactive": STAYS},
    "report.md": {"rloo report runs/mine --open": "opens a browser"},
    "python.md": {
        "from datasets import load_dataset": HUB,
        "accelerate launch --num_processes 8 train.py": "the reader's own program, on eight GPUs; the line after it starts the shipped one with two processes",
    },
    "reliability.md": {
        ".venv/bin/python -m tests.faults": LONG,
        ".venv/bin/python -m tests.faults A2 --kills 30": LONG,
        ".venv/bin/python -m tests.faults --markdown --json FILE": "reads what the others left",
    },
    "scaling-out.md": {
        "rloo train recipe.yaml --num-processes 16 --accelerate-config fsdp2 --num-machines 2 --main-process-ip head --machine-rank 0": MACHINES,
        "srun --nodes 2 --ntasks-per-node 1 --gpus-per-node 8 rloo train recipe.yaml --accelerate-config fsdp2": CLUSTER,
        "rloo train recipe.yaml --num-processes 16 --num-machines 2 --main-process-ip 10.0.0.1 --machine-rank 0": MACHINES,
        "rloo train recipe.yaml --num-processes 16 --num-machines 2 --main-process-ip 10.0.0.1 --machine-rank 1": MACHINES,
        "srun --nodes 2 --ntasks-per-node 1 --gpus-per-node 8 rloo train recipe.yaml": CLUSTER,
        "torchrun --standalone --nproc_per_node 8 -m rloo_cli train recipe.yaml": "needs eight GPUs or cores; tests/launch starts it with two",
        "torchrun --nnodes 2 --node_rank 0 --nproc_per_node 8 --master_addr 10.0.0.1 --master_port 29500 -m rloo_cli train recipe.yaml": MACHINES,
        "accelerate launch --config_file zero3.yaml --num_processes 8 -m rloo_cli train recipe.yaml": "needs eight GPUs or cores; tests/launch starts it with two",
        "python benchmarks/processes.py --json": LONG,
    },
    "slurm.md": {
        "rloo slurm mine.yaml --nodes 4 --gpus-per-node 8 --time 24:00:00 --submit": CLUSTER,
        "squeue --me": CLUSTER,
        "tail -F rloo-mine-1234.out": CLUSTER,
        "scontrol show job 1234 | grep -E 'JobState|Restarts|ExitCode'": CLUSTER,
        "srun --overlap --jobid=1234 --nodes=1 --pty bash": CLUSTER,
        "srun --ntasks-per-node=1 --gres=gpu:8 --cpu-bind=none rloo train mine.yaml --output-dir runs/mine --resume=auto": CLUSTER,
    },
    "vllm.md": {
        'pip install "rloo[vllm]"': INSTALLS,
        "make vllm-cpu": SUITE,
        "CUDA_VISIBLE_DEVICES=0,1 rloo vllm-serve --model M --dtype bfloat16 --tensor-parallel-size 2": SERVES,
        "CUDA_VISIBLE_DEVICES=2,3,4,5,6,7 rloo train recipe.yaml --accelerate-config fsdp2": DEVICES,
        "CUDA_VISIBLE_DEVICES=0 rloo vllm-serve --model Qwen/Qwen2.5-0.5B-Instruct --dtype bfloat16": SERVES,
        "CUDA_VISIBLE_DEVICES=1 rloo train recipe.yaml": DEVICES,
        "rloo vllm-serve --model M --host 0.0.0.0 --key-file server.key": SERVES,
    },
}
"""Page → line as it stands, without its comment → why it is not run."""
EXIT_CODES = {"rloo doctor": (0, 2)}
"""Of lines that may say more than `all is well`: what this machine has is not the page's."""
SLOW = ("--num-processes", "vllm", "--engine", "doctor", "python ", "torchrun ", "accelerate ")
"""Words of lines that take more than a few seconds: processes of their own, and packages that take long to import."""
PROCESS_SECONDS = 900
"""A process that hangs is ended; none comes near it."""


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of commands or Python."""

    page: str
    number: int
    language: str
    text: str

    @property
    def lines(self) -> list[str]:
        """The command lines, without comments; of Python the first line, which stands for all."""
        if self.language == "python":
            return [self.text.splitlines()[0]]
        starts = "$ " if self.language == "console" else ""
        lines = [line for line in self.text.replace("\\\n", " ").splitlines() if line.startswith(starts)]
        return [bare for line in lines if (bare := without_comment(line.removeprefix(starts)))]

    @property
    def run(self) -> list[str]:
        """Those that are run."""
        return [line for line in self.lines if line not in NOT_RUN.get(self.page, {})]


def without_comment(line: str) -> str:
    return re.sub(r"(^|\s)#.*$", "", line).strip()


def blocks() -> list[Block]:
    found = []
    for page in pages():
        name = page.name if page.parent != ROOT / "recipes" / "quickstart" else "quickstart/README.md"
        for number, (language, file, text) in enumerate(BLOCK.findall(page.read_text(encoding="utf-8"))):
            if language in ("sh", "bash", "console") or (language == "python" and not file):
                found.append(Block(name, number, language, text))
    return found


def runnable() -> Iterator[object]:
    for block in blocks():
        if block.run:
            is_slow = block.language == "python" or any(word in line for line in block.run for word in SLOW)
            name = f"{block.page}-{block.number}-{block.run[0][:50]}".replace("\n", " ")
            yield pytest.param(block, id=name, marks=[pytest.mark.slow] if is_slow else [])


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """(where the folder is built and used, a copy of it as it was): recipes of runs hold the path."""
    place, kept = tmp_path_factory.mktemp("world") / "world", tmp_path_factory.mktemp("kept") / "world"
    place.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rloo_cli.launch.report.write_report", lambda folder, is_alone: "")
        build_world(place)
    shutil.copytree(place, kept, symlinks=True)
    return place, kept


@pytest.fixture
def world(built, monkeypatch) -> Path:
    """The folder as it was built, and the current one."""
    place, kept = built
    shutil.rmtree(place)
    shutil.copytree(kept, place, symlinks=True)
    monkeypatch.chdir(place)
    monkeypatch.setenv("COLUMNS", "80")
    return place


@pytest.mark.parametrize("block", list(runnable()))
def test_a_block_runs_as_it_stands(block, world, capfd):
    if any("vllm" in line or "--engine" in line for line in block.run):
        pytest.importorskip("vllm")
    make_ready(block.text, world)
    if block.language == "python":
        check_python(substituted(block.text), world)
        return
    for line in block.run:
        make_way(line, world)
        code = run_line(substituted(line), world)
        printed = capfd.readouterr()
        assert code in EXIT_CODES.get(" ".join(shlex.split(line)[:2]), (0,)), f"{line}\n{printed.out}{printed.err}"


def make_ready(text: str, world: Path) -> None:
    """Make the run that a block looks at and few do."""
    if "runs/lora" in text and "rloo train" not in text:
        pytest.importorskip("peft")
        assert exit_code_of(["train", "recipes/lora.yaml", "-q", "--output-dir", str(world / "runs" / "lora")]) == 0


def make_way(line: str, world: Path) -> None:
    """Take away a run folder that the line is to begin, and what the line before left where this one writes."""
    words = shlex.split(line)
    if "train" in words and "--output-dir" in words and "--resume" not in words:
        shutil.rmtree(world / words[words.index("--output-dir") + 1], ignore_errors=True)
    if words[:2] == ["rloo", "export"]:
        shutil.rmtree(world / words[3], ignore_errors=True)
    if words[:3] == ["rloo", "recipes", "cp"]:
        shutil.rmtree(world / "my-task", ignore_errors=True)


def run_line(line: str, world: Path) -> int:
    """The exit code of a line: in this process where it is one command of ours, else in a shell."""
    if re.match(r"rloo [^|><&;$*`]*$", line) and not any(word in line for word in SLOW):
        return exit_code_of(shlex.split(line)[1:])
    return in_process(["bash", "-euo", "pipefail", "-c", line], world)


def check_python(text: str, world: Path) -> None:
    (world / "block.py").write_text(text, encoding="utf-8")
    assert in_process([sys.executable, "block.py"], world) == 0


def in_process(command: list[str], world: Path) -> int:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join([str(ROOT), str(world)])}
    return subprocess.run(command, cwd=world, env=environment, timeout=PROCESS_SECONDS, check=False).returncode


def test_what_is_not_run_stands_in_a_page():
    there = {(block.page, line) for block in blocks() for line in block.lines}
    assert [(page, line) for page, lines in NOT_RUN.items() for line in lines if (page, line) not in there] == []


def test_a_substitute_replaces_what_stands_in_a_page():
    everything = "".join(page.read_text(encoding="utf-8") for page in pages())
    assert [old for old, _, _ in SUBSTITUTES if old not in everything] == []


def test_targets_that_pages_name_are_in_the_makefile():
    lines = {line for block in blocks() for line in block.lines if line.startswith("make ")}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert [line for line in lines if not re.search(rf"^{line.split()[1]}:", makefile, re.MULTILINE)] == []
