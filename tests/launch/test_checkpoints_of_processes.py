"""Checkpoints of real runs of two processes: killed in a save, damaged, resumed by others than wrote them, exported."""

from __future__ import annotations

import re
import shutil
import time

import pytest
import torch
from test_several_processes import END_SECONDS, arguments, gold, rows, run
from transformers import AutoModelForCausalLM, AutoTokenizer

from rloo_cli.run.checkpoint import find_checkpoint, list_steps
from rloo_cli.run.folder import RunFolder

pytestmark = pytest.mark.slow

SETTINGS = ["max_steps=6", "save_steps=2", "eval_steps=6", "save_total_limit=null"]
KILLED_AT = """
import os, signal

if os.environ.get("RANK") == "{rank}":
    fsync = os.fsync

    def fsync_or_die(descriptor):
        path = os.readlink("/proc/self/fd/%d" % descriptor)
        if "/.tmp-000004-" in path and path.endswith("{name}"):
            open(os.path.join(os.path.dirname(__file__), "killed"), "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(descriptor)

    os.fsync = fsync_or_die
"""


def train(folder, strategy, *more, processes=2):
    options = ["--num-processes", str(processes), "--accelerate-config", strategy]
    return run(arguments(folder, *options, *more, settings=SETTINGS), seconds=280)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run of two processes under a strategy, made once."""
    made = {}

    def make(strategy):
        if strategy not in made:
            folder = tmp_path_factory.mktemp(strategy) / "whole"
            done = train(folder, strategy)
            assert done.returncode == 0, done.stderr
            made[strategy] = folder
        return made[strategy]

    return make


def as_after_step(step, run_folder, target):
    """A copy of a finished run that holds what it did when it had saved a step."""
    shutil.copytree(run_folder, target)
    shutil.rmtree(target / "final")
    for later in list_steps(target / "checkpoints"):
        if later > step:
            shutil.rmtree(target / "checkpoints" / f"{later:06d}")
    return target


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("rank", "name"), [(1, "model-00002-of-00002.safetensors"), (0, "manifest.json")])
def test_a_rank_killed_in_a_save_leaves_the_checkpoint_before_and_a_resume_ends_as_if_nothing_had_been(
    whole, tmp_path, monkeypatch, rank, name
):
    (tmp_path / "sitecustomize.py").write_text(KILLED_AT.format(rank=rank, name=name))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = train(tmp_path / "run", "fsdp2")
    seconds = time.time() - (tmp_path / "killed").stat().st_mtime
    print(f"ended {seconds:.1f} s after the kill")
    assert done.returncode == 1, done.stderr
    assert seconds < END_SECONDS
    assert re.search(rf"^error: rank {rank} on \S+ was ended by SIGKILL without a word", done.stderr, re.MULTILINE), done.stderr
    assert list_steps(tmp_path / "run" / "checkpoints") == [2]
    assert find_checkpoint(tmp_path / "run" / "checkpoints").step == 2
    monkeypatch.delenv("PYTHONPATH")
    done = train(tmp_path / "run", "fsdp2", "--resume")
    assert done.returncode == 0, done.stderr
    assert gold(tmp_path / "run") == gold(whole("fsdp2"))
    assert not list((tmp_path / "run").rglob(".tmp-*"))


@pytest.mark.timeout(900)
def test_a_flipped_bit_in_a_ranks_file_sends_every_rank_to_the_checkpoint_before(whole, tmp_path):
    folder = as_after_step(4, whole("fsdp2"), tmp_path / "run")
    file = folder / "checkpoints" / "000004" / "optimizer-00002-of-00002.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 0x40
    file.write_bytes(data)
    done = train(folder, "fsdp2", "--resume")
    assert done.returncode == 0, done.stderr
    warning = f"{file}: damaged: its sha256 is not the manifest's; going on from step 2 instead"
    assert warning in done.stdout
    for name in ("train.log", "train-rank-1.log"):
        assert warning in (RunFolder(folder).attempt(2) / name).read_text()
    assert gold(folder) == gold(whole("fsdp2"))


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("wrote", "reads", "processes"),
    [("fsdp2", "ddp", 1), ("fsdp2", "zero3", 2), ("zero3", "fsdp2", 2), ("zero3", "ddp", 2), ("ddp", "zero2", 2)],
)
def test_any_strategy_and_number_of_processes_goes_on_from_any_other(whole, tmp_path, wrote, reads, processes):
    folder = as_after_step(4, whole(wrote), tmp_path / "run")
    done = train(folder, reads, "--resume", processes=processes)
    assert done.returncode == 0, done.stderr
    assert "from the checkpoint of step 4" in done.stdout
    for ours, theirs in zip(rows(folder), rows(whole(wrote)), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero2", "zero3"])
def test_an_exported_checkpoint_answers_as_the_final_model_does(whole, tmp_path, strategy):
    folder = whole(strategy)
    done = run(["export", str(folder), str(tmp_path / "out")])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"exporting step 6 of {folder}, its last\n")
    ours, theirs = (AutoModelForCausalLM.from_pretrained(place) for place in (tmp_path / "out", folder / "final"))
    assert all(torch.equal(tensor, theirs.state_dict()[name]) for name, tensor in ours.state_dict().items())
    assert greedy(ours, tmp_path / "out") == greedy(theirs, folder / "final")
    for file in ("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "out" / file).read_bytes() == (folder / "final" / file).read_bytes()


def greedy(model, folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True) for text in ("a", "What?")]
    return [model.generate(torch.tensor([list(p["input_ids"])]), max_new_tokens=16, do_sample=False).tolist() for p in prompts]
