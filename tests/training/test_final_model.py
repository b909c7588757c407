"""final/ of a model that no rank has as a whole: written as its tensors are gathered, by the main rank alone."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch
from processes import run_ranks
from transformers import AutoModelForCausalLM, AutoTokenizer

from rloo_cli.errors import NeighbourError, StorageError
from rloo_cli.run import atomic
from rloo_cli.run.folder import RunFolder
from rloo_cli.run.ranks import ALONE, join_ranks
from rloo_cli.training.final_model import save_final_model


class Gathering:
    """A strategy whose tensors come one at a time, each in the memory of the one before."""

    name = "fsdp2"

    def __init__(self, model, meet=lambda: None):
        self.policy = SimpleNamespace(model=model)
        self.meet = meet
        self.passes = 0

    def named_tensors(self):
        last = buffer = None
        for name, tensor in self.policy.model.state_dict(keep_vars=True).items():
            if tensor is not last:
                self.meet()
                if buffer is not None:
                    buffer.fill_(float("nan"))
                buffer = tensor.detach().clone()
            last = tensor
            yield name, buffer
        self.passes += 1


def expect_model(folder, model):
    loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in loaded.state_dict().items())
    assert AutoTokenizer.from_pretrained(folder).chat_template == tiny.CHAT_TEMPLATE


@pytest.mark.parametrize("model", [tiny.qwen2, tiny.llama], ids=["tied", "untied"])
def test_a_gathered_model_is_the_model(tmp_path, model):
    strategy = Gathering(model())
    save_final_model(RunFolder(tmp_path), strategy, tiny.byte_tokenizer(), step=3, ranks=ALONE, card=lambda: "# a card\n")
    assert RunFolder(tmp_path).finished_step() == 3
    assert RunFolder(tmp_path).final_damage() is None
    assert (tmp_path / "final" / "README.md").read_text() == "# a card\n"
    expect_model(tmp_path / "final", strategy.policy.model)


class FullDisk(atomic.FileSystem):
    """Takes so many writes, and no more."""

    def __init__(self, writes):
        self.left = writes

    def write(self, descriptor, data):
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(descriptor, data)


def saving(rank, folder):
    """(kind of error, passes over the tensors, what then lies there), on a full disk and on one with room, of a rank that gathers with
    the other."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    ranks, told = join_ranks(), []
    for disk in (FullDisk(3), atomic.FileSystem()):
        if ranks.is_main:
            atomic.fs = disk
        strategy, error = Gathering(tiny.qwen2(), ranks.barrier), ""
        try:
            save_final_model(RunFolder(Path(folder)), strategy, tiny.byte_tokenizer(), step=3, ranks=ranks, card=lambda: "# a card\n")
        except (StorageError, NeighbourError) as raised:
            error = type(raised).__name__
        told.append([error, strategy.passes, [path.name for path in Path(folder).iterdir()]])
        ranks.barrier()
    dist.destroy_process_group()
    return told


def test_all_ranks_gather_and_one_writes_all_or_nothing(tmp_path):
    (tmp_path / "run").mkdir()
    main, other = run_ranks(saving, 2, tmp_path, str(tmp_path / "run"))
    assert main == [["StorageError", 2, []], ["", 2, ["final"]]]
    assert other == [["NeighbourError", 2, []], ["", 2, ["final"]]]
    expect_model(tmp_path / "run" / "final", tiny.qwen2())
