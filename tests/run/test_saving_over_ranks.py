"""Checkpoints that several ranks write, each its own files: read by any number of them, and what a fault on any leaves."""

from __future__ import annotations

import errno
import logging
import math
from pathlib import Path

import pytest
import torch
from failpoints import FailingFileSystem, leftovers
from processes import run_ranks

from rloo_cli.errors import RlooError
from rloo_cli.run import atomic
from rloo_cli.run.checkpoint import find_checkpoint, list_steps
from rloo_cli.run.manifest import DamagedError
from rloo_cli.run.ranks import join_ranks
from rloo_cli.run.saving import save_checkpoint
from rloo_cli.run.shards import SavedTensors, Shard, rank_file, shards_stream

MODEL = {
    "embed": torch.arange(35, dtype=torch.float32).reshape(7, 5) / 3,
    "norm": torch.tensor([1.5, -0.0, float("inf")], dtype=torch.bfloat16),
    "scale": torch.tensor(2.5, dtype=torch.float64),
    "empty": torch.empty(0, 4),
}
OPTIMIZER = {"exp_avg/embed": torch.randn(7, 5, generator=torch.Generator().manual_seed(0))}
STATE = {"model": MODEL, "optimizer": OPTIMIZER}


def by_rows(tensor, rank, world_size):
    """A rank's rows of a tensor, as torch.chunk and FSDP2 cut it; later ranks may get none."""
    if tensor.ndim == 0:
        return cut(tensor, *((0, 1) if rank == 0 else (1, 1)))
    rows = math.ceil(len(tensor) / world_size)
    row = tensor[0].numel() if len(tensor) else 0
    return cut(tensor, min(rank * rows, len(tensor)) * row, min((rank + 1) * rows, len(tensor)) * row)


def by_elements(tensor, rank, world_size):
    """A rank's even part of the flattened tensor, as ZeRO cuts it."""
    return cut(tensor, tensor.numel() * rank // world_size, tensor.numel() * (rank + 1) // world_size)


def replicated(tensor, rank, world_size):
    return None if rank else cut(tensor, 0, tensor.numel())


def cut(tensor, start, stop):
    return Shard(values=tensor.reshape(-1)[start:stop], start=start, shape=tuple(tensor.shape))


LAYOUTS = {"rows": by_rows, "elements": by_elements, "replicated": replicated}


def shards_of(layout, ranks):
    cut_up = {kind: {name: LAYOUTS[layout](t, ranks.rank, ranks.world_size) for name, t in named.items()} for kind, named in STATE.items()}
    return {kind: {name: shard for name, shard in named.items() if shard is not None} for kind, named in cut_up.items()}


def save(folder, step, layout, ranks, **options):
    own = ({"position": {"step": step}}, {"random": {"cpu": torch.arange(9, dtype=torch.uint8)}}) if ranks.is_main else ({}, {})
    return save_checkpoint(folder, step, documents=own[0], tensors=own[1], shards=shards_of(layout, ranks), ranks=ranks, **options)


def as_rank(work):
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        return work(join_ranks())
    finally:
        dist.destroy_process_group()


def saving(rank, folder):
    def work(ranks):
        for step, layout in enumerate(LAYOUTS, start=1):
            save(Path(folder), step, layout, ranks)

    as_rank(work)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder with a checkpoint of each layout, written by two ranks."""
    folder = tmp_path_factory.mktemp("written")
    run_ranks(saving, 2, folder, str(folder / "checkpoints"))
    return folder / "checkpoints"


def expect_state(checkpoint):
    for kind, named in STATE.items():
        loaded = checkpoint.load_tensors(kind)
        assert loaded.keys() == named.keys()
        for name, tensor in named.items():
            assert loaded[name].dtype == tensor.dtype
            assert loaded[name].shape == tensor.shape
            assert torch.equal(loaded[name], tensor)


@pytest.mark.parametrize(("step", "layout"), list(enumerate(LAYOUTS, start=1)))
def test_one_process_reads_what_two_wrote(written, step, layout):
    checkpoint = find_checkpoint(written, step)
    expect_state(checkpoint)
    assert checkpoint.load_document("position") == {"step": step}
    assert torch.equal(checkpoint.load_tensors("random")["cpu"], torch.arange(9, dtype=torch.uint8))
    whole = {"model.safetensors", "optimizer.safetensors"}
    parts = {rank_file(kind, rank, 2) for kind in STATE for rank in range(2)}
    files = {name for name in checkpoint.names if name.startswith(("model", "optimizer"))}
    assert files == (whole if layout == "replicated" else parts)
    assert leftovers(written) == []


def reading(rank, folder):
    def work(ranks):
        found = find_checkpoint(Path(folder), 1, ranks)
        saved = found.saved_tensors("model")
        parts = {}
        for name in saved.names:
            size = math.prod(saved.shape(name))
            parts[name] = saved.read(name, size * ranks.rank // ranks.world_size, size * (ranks.rank + 1) // ranks.world_size)
        return parts

    return as_rank(work)


@pytest.mark.parametrize("world_size", [2, 3])
def test_any_number_of_ranks_reads_its_own_ranges(written, tmp_path, world_size):
    parts = run_ranks(reading, world_size, tmp_path, str(written))
    for name, tensor in MODEL.items():
        assert torch.equal(torch.cat([part[name] for part in parts]).view(tensor.shape), tensor)


DAMAGED = [rank_file("model", 1, 2), rank_file("optimizer", 0, 2), "position.json", "manifest.json"]


def finding(rank, folder):
    """(step found, warnings) with each file of the newest damaged in turn."""
    lines, found = [], []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("rloo_cli").addHandler(handler)

    def work(ranks):
        for step in (4, 6):
            save(Path(folder), step, "rows", ranks)
        for name in DAMAGED:
            if ranks.is_main:
                flip(Path(folder) / "000006" / name)
            ranks.barrier()
            lines.clear()
            found.append([find_checkpoint(Path(folder), "latest", ranks).step, list(lines)])
            ranks.barrier()
            if ranks.is_main:
                flip(Path(folder) / "000006" / name)

    as_rank(work)
    return found


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x10
    file.write_bytes(data)


def test_a_flipped_bit_in_any_file_sends_all_ranks_to_the_one_before(tmp_path):
    main, other = run_ranks(finding, 2, tmp_path, str(tmp_path / "checkpoints"))
    assert main == other
    assert [step for step, _ in main] == [4] * len(DAMAGED)
    for name, (_, warnings) in zip(DAMAGED, main, strict=True):
        assert len(warnings) == 1
        assert str(tmp_path / "checkpoints" / "000006" / name) in warnings[0]
        assert "going on from step 4" in warnings[0]


FAULTS = [(culprit, fault) for culprit in (0, 1) for fault in (errno.ENOSPC, "short")]


def failing(rank, folder):
    """For each of FAULTS, (n, kind of error, steps then there, what was left behind) of every save in which the n-th call of the culprit
    failed, until none does."""
    found = []

    def work(ranks):
        for culprit, fault in FAULTS:
            save(Path(folder), 2, "rows", ranks)
            cases = []
            for n in range(1, 100):
                cases.append(fail_at(n if rank == culprit else 0, fault, n, Path(folder), ranks))
                if any(ranks.gather(cases[-1].pop() and rank == culprit)):
                    break
            found.append(cases)
            remove_all(Path(folder), ranks)

    as_rank(work)
    return found


def fail_at(call, fault, n, folder, ranks):
    own = atomic.fs = FailingFileSystem(call, fault, only=("open", "write", "fsync", "close", "rename", "mkdir"))
    error = None
    try:
        save(folder, 2 + n, "rows", ranks)
    except RlooError as raised:
        error = raised
    atomic.fs = atomic.FileSystem()
    ranks.barrier()
    steps, left = list_steps(folder), leftovers(folder)
    ranks.barrier()
    if ranks.is_main and 2 + n in steps:
        expect_state(find_checkpoint(folder, 2 + n))
    remove_all(folder, ranks, but="000002")
    return [n, type(error).__name__, steps, left, own.count < n]


def remove_all(folder, ranks, but=""):
    ranks.barrier()
    for path in folder.iterdir() if ranks.is_main else ():
        if path.name != but:
            atomic.remove_tree(path)
    ranks.barrier()


def test_whichever_call_fails_on_either_rank_all_fail_and_the_one_before_stands(tmp_path):
    main, other = run_ranks(failing, 2, tmp_path, str(tmp_path / "checkpoints"))
    for (culprit, _), ours, theirs in zip(FAULTS, main, other, strict=True):
        assert len(ours) == len(theirs) > 10
        for (n, our_error, steps, left), (_, their_error, _, _) in zip(ours[:-1], theirs[:-1], strict=True):
            kinds = ("StorageError", "NeighbourError")
            assert (our_error, their_error) == (kinds if culprit == 0 else kinds[::-1]), n
            assert steps == [2] or (culprit == 0 and steps == [2, 2 + n])  # the last fsync comes after the rename
            assert left == []
        assert (ours[-1][1], theirs[-1][1]) == ("NoneType", "NoneType")


def saving_without_room(rank, folder):
    def work(ranks):
        sizes = [shards_stream(named)[0] for named in shards_of("elements", ranks).values()]
        atomic.FileSystem.free_bytes = lambda self, path: sum(sizes) + (1 << 20) + 100
        try:
            save(Path(folder), 2, "elements", ranks)
        except RlooError as error:
            return error.message
        return ""

    return as_rank(work)


def test_there_must_be_room_for_what_all_ranks_write(tmp_path):
    messages = run_ranks(saving_without_room, 2, tmp_path, str(tmp_path / "checkpoints"))
    assert all("no room" in message for message in messages)
    assert list_steps(tmp_path / "checkpoints") == []


def write(folder, name, shards):
    path = folder / name
    path.write_bytes(b"".join(shards_stream(shards)[1]))
    return path


def test_a_part_that_is_in_no_file_is_damage(tmp_path):
    one = write(tmp_path, rank_file("model", 0, 3), {"embed": by_elements(MODEL["embed"], 0, 3)})
    three = write(tmp_path, rank_file("model", 2, 3), {"embed": by_elements(MODEL["embed"], 2, 3)})
    with pytest.raises(DamagedError, match=r"model-00001-of-00003.*embed: elements from 11 on, of 35, are in no file"):
        SavedTensors([one, three])


@pytest.mark.parametrize("same", [True, False])
def test_files_that_overlap_must_say_the_same(tmp_path, same):
    one = write(tmp_path, rank_file("model", 0, 2), {"embed": cut(MODEL["embed"], 0, 20)})
    two = write(tmp_path, rank_file("model", 1, 2), {"embed": cut(MODEL["embed"] + (0 if same else 1), 15, 35)})
    if same:
        assert torch.equal(SavedTensors([one, two]).whole("embed"), MODEL["embed"])
        return
    with pytest.raises(DamagedError, match="elements 15 to 20 are others than in model-00001-of-00002"):
        SavedTensors([one, two])


def test_files_that_give_a_tensor_two_shapes_are_damage(tmp_path):
    one = write(tmp_path, rank_file("model", 0, 2), {"embed": by_elements(MODEL["embed"], 0, 2)})
    two = write(tmp_path, rank_file("model", 1, 2), {"embed": by_elements(MODEL["embed"].T, 1, 2)})
    with pytest.raises(DamagedError, match="another shape"):
        SavedTensors([one, two])


@pytest.mark.parametrize(
    "content", [b"", b"\x08", (9).to_bytes(8, "little") + b"{}", (2).to_bytes(8, "little") + b"[]", (1 << 40).to_bytes(8, "little") + b"{}"]
)
def test_what_is_no_safetensors_file_is_damage(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(DamagedError, match="not a safetensors file"):
        SavedTensors([tmp_path / "model.safetensors"])


def test_incomplete_parts_under_a_sound_manifest_are_no_checkpoint(tmp_path, caplog):
    """As a fault in the program that wrote them would leave it."""
    save_checkpoint(tmp_path, 2, documents={}, tensors={"model": MODEL})
    save_checkpoint(tmp_path, 4, documents={}, tensors={}, shards={"model": {"embed": by_elements(MODEL["embed"], 0, 2)}})
    assert find_checkpoint(tmp_path).step == 2
    assert "model-00001-of-00001.safetensors: embed: elements from 17 on, of 35, are in no file" in caplog.text
