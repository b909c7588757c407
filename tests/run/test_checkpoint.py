from __future__ import annotations

import errno
import logging
import os
import shutil

import pytest
import torch
from failpoints import FailingFileSystem, in_child, leftovers
from safetensors.torch import load_file, save

from rloo_cli.errors import RefusedError, StorageError
from rloo_cli.run import atomic, saving
from rloo_cli.run.checkpoint import find_checkpoint, list_steps, set_aside_newer
from rloo_cli.run.manifest import Manifest, digest_file
from rloo_cli.run.saving import save_checkpoint
from rloo_cli.run.tensors import safetensors_stream

TENSORS = {
    "model": {
        "f32": torch.arange(12, dtype=torch.float32).reshape(3, 4) / 7,
        "bf16": torch.tensor([1.0, -0.0, float("inf"), 3e38], dtype=torch.bfloat16),
        "bool": torch.tensor([True, False, True]),
        "i64": torch.tensor([[2**62, -1]]),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.empty(0, 5),
        "view": torch.arange(20.0).reshape(4, 5).T[1:4],
        "u8": torch.tensor([0, 255], dtype=torch.uint8),
    },
    "optimizer": {"0.exp_avg": torch.randn(7, generator=torch.Generator().manual_seed(0))},
}
DOCUMENTS = {"position": {"step": 3, "seed": 2**62, "pi": 0.1 + 0.2, "none": None, "text": "ü\ud800"}}


def saved(folder, *steps, **options):
    for step in steps:
        save_checkpoint(folder, step, tensors=TENSORS, documents={"position": {"step": step}}, **options)


def damage(path, kind):
    data = path.read_bytes()
    if kind == "flip":
        changed = bytearray(data)
        changed[len(data) // 2] ^= 0x10
        path.write_bytes(changed)
    elif kind == "gone":
        path.unlink()
    else:
        path.write_bytes(data[: kind if isinstance(kind, int) else int(len(data) * kind)])


def test_what_is_loaded_is_what_was_saved_to_the_bit(tmp_path):
    path = save_checkpoint(tmp_path, 3, tensors=TENSORS, documents=DOCUMENTS)
    assert path == tmp_path / "000003"
    found = find_checkpoint(tmp_path)
    assert found.step == 3
    assert found.load_document("position") == DOCUMENTS["position"]
    for name, tensors in TENSORS.items():
        loaded = found.load_tensors(name)
        assert loaded.keys() == tensors.keys()
        for key, tensor in tensors.items():
            assert loaded[key].dtype == tensor.dtype
            assert loaded[key].shape == tensor.shape
            assert torch.equal(loaded[key], tensor)
    assert found.has("model")
    assert not found.has("experience")


def test_the_stream_is_what_safetensors_writes():
    tensors = {name: torch.randn(3, n) for n, name in enumerate(["b", "a", "c"], start=1)}
    size, stream = safetensors_stream(tensors, {"format": "pt"})
    data = b"".join(stream)
    assert data == save(tensors, {"format": "pt"})
    assert size == len(data)


def test_tensors_start_at_multiples_of_their_element_size(tmp_path):
    size, stream = safetensors_stream(TENSORS["model"])
    data = b"".join(stream)
    assert size == len(data)
    (tmp_path / "x").write_bytes(data)
    loaded = load_file(tmp_path / "x")
    assert all(tensor.data_ptr() % tensor.element_size() == 0 for tensor in loaded.values())


def test_no_checkpoint_ever(tmp_path):
    assert find_checkpoint(tmp_path / "checkpoints") is None
    (tmp_path / "notes").mkdir()
    assert find_checkpoint(tmp_path) is None


def test_the_newest_is_found_and_a_step_or_path_on_request(tmp_path):
    saved(tmp_path, 8, 10, 9)
    assert find_checkpoint(tmp_path).step == 10
    assert find_checkpoint(tmp_path, 8).step == 8
    assert find_checkpoint(tmp_path, tmp_path / "000009").step == 9


def test_a_step_that_was_never_saved_is_refused_with_those_that_were(tmp_path):
    saved(tmp_path, 2, 4)
    with pytest.raises(RefusedError, match=r"no checkpoint .*000003.*: 2, 4"):
        find_checkpoint(tmp_path, 3)


@pytest.mark.parametrize("kind", [0, 1, 0.5, 0.99, "flip", "gone"])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "position.json", "manifest.json"])
def test_a_damaged_file_is_named_and_the_one_before_used(tmp_path, caplog, name, kind):
    saved(tmp_path, 4, 6)
    damage(tmp_path / "000006" / name, kind)
    with caplog.at_level(logging.WARNING):
        assert find_checkpoint(tmp_path).step == 4
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(tmp_path / "000006" / name) in caplog.text
    assert "step 4" in caplog.text


def test_a_damaged_one_asked_for_by_name_is_an_error(tmp_path):
    saved(tmp_path, 4, 6)
    damage(tmp_path / "000006" / "model.safetensors", "flip")
    with pytest.raises(StorageError, match=r"model\.safetensors: damaged"):
        find_checkpoint(tmp_path, 6)


def test_all_damaged_lists_each_and_deletes_nothing(tmp_path):
    saved(tmp_path, 2, 4, 6)
    for step, kind in ((2, "flip"), (4, 0), (6, "gone")):
        damage(tmp_path / f"{step:06d}" / "model.safetensors", kind)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(StorageError, match=r"all 3 checkpoints") as caught:
        find_checkpoint(tmp_path)
    for line in ("000002/model.safetensors: damaged", "000004/model.safetensors: 0 bytes instead of", "000006/model.safetensors: missing"):
        assert line in caught.value.message
    assert sorted(tmp_path.rglob("*")) == before


def test_another_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "CHECKPOINT_FORMAT", 99)
    saved(tmp_path, 2)
    monkeypatch.undo()
    with pytest.raises(RefusedError, match="format 99"):
        find_checkpoint(tmp_path)


def test_a_saved_step_is_never_overwritten(tmp_path):
    saved(tmp_path, 2)
    with pytest.raises(StorageError, match="never overwritten"):
        saved(tmp_path, 2)
    assert find_checkpoint(tmp_path).step == 2


def test_newer_checkpoints_are_set_aside_when_a_run_goes_on_from_an_older_one(tmp_path, caplog):
    saved(tmp_path, 2, 4, 6)
    moved = set_aside_newer(tmp_path, 2)
    assert [path.name for path in moved] == ["000004.aside-1", "000006.aside-1"]
    assert find_checkpoint(tmp_path).step == 2
    saved(tmp_path, 4)
    assert [path.name for path in set_aside_newer(tmp_path, 0)] == ["000002.aside-1", "000004.aside-2"]
    assert find_checkpoint(tmp_path) is None
    assert find_checkpoint(tmp_path, tmp_path / "000006.aside-1").step == 6


@pytest.mark.parametrize(
    ("limit", "best", "kept"),
    [
        (2, None, [6, 8]),
        (2, 4, [4, 8]),  # the best is one of the two
        (1, 4, [4, 8]),  # the newest stays in any case
        (3, 8, [4, 6, 8]),
        (2, 5, [6, 8]),  # it is gone
        (None, 4, [2, 4, 6, 8]),
    ],
)
def test_the_newest_and_the_best_are_kept(tmp_path, limit, best, kept):
    saved(tmp_path, 2, 4, 6, 8, limit=limit, best=best)
    assert list_steps(tmp_path) == kept
    assert leftovers(tmp_path) == []


def test_a_stray_of_a_higher_number_costs_no_checkpoint(tmp_path):
    """Neither a foreign folder nor a complete checkpoint of a later step may push out the one just saved."""
    saved(tmp_path, 2, 4)
    (tmp_path / "000003").mkdir()
    (tmp_path / "999999").mkdir()
    (tmp_path / "999999" / "notes").write_text("mine")
    shutil.copytree(tmp_path / "000004", tmp_path / "000012")
    saved(tmp_path / "elsewhere", 20)
    (tmp_path / "elsewhere" / "000020").rename(tmp_path / "000020")
    saved(tmp_path, 6, limit=1, best=2)
    assert list_steps(tmp_path) == [2, 3, 6, 12, 20, 999999]
    assert (tmp_path / "999999" / "notes").read_text() == "mine"


@pytest.mark.parametrize("name", ["0000044", "44", "00044", "٠٠٠٠٤٤"])
def test_a_name_that_no_step_gets_is_no_checkpoint(tmp_path, caplog, name):
    saved(tmp_path, 4)
    shutil.copytree(tmp_path / "000004", tmp_path / name)
    assert list_steps(tmp_path) == [4]
    assert find_checkpoint(tmp_path).step == 4
    assert [record.message for record in caplog.records if name in record.message] != []
    assert len(caplog.records) == 1
    assert set_aside_newer(tmp_path, 2) == [tmp_path / "000004.aside-1"]
    assert (tmp_path / name).is_dir()


@pytest.mark.parametrize("call", ["rename", "unlink", "rmdir"])
def test_a_failed_deletion_is_a_warning(tmp_path, monkeypatch, caplog, call):
    saved(tmp_path, 2, 4)
    failing = FailingFileSystem(2 if call == "rename" else 1, errno.EACCES, only=(call,))
    monkeypatch.setattr(atomic, "fs", failing)
    saved(tmp_path, 6, limit=2)
    monkeypatch.undo()
    assert "000002 could not be deleted" in caplog.text
    assert find_checkpoint(tmp_path).step == 6
    assert {4, 6} <= set(list_steps(tmp_path))


def test_too_little_room_is_found_before_a_byte_is_written(tmp_path, monkeypatch):
    saved(tmp_path, 2)
    monkeypatch.setattr(atomic.FileSystem, "free_bytes", lambda self, path: 1000)
    with pytest.raises(StorageError, match=r"checkpoint .*000004: no room: .* needed, 1 kB free"):
        saved(tmp_path, 4)
    assert list_steps(tmp_path) == [2]


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EIO, "short"])
def test_whichever_call_fails_the_one_before_stands_and_none_is_wrong(tmp_path, monkeypatch, fault):
    saved(tmp_path, 2)
    for n in range(1, 100):
        failing = FailingFileSystem(n, fault)
        monkeypatch.setattr(atomic, "fs", failing)
        try:
            saved(tmp_path, 4, limit=1)
        except StorageError:
            monkeypatch.undo()
            assert find_checkpoint(tmp_path).step in (2, 4)
            assert torch.equal(find_checkpoint(tmp_path).load_tensors("model")["f32"], TENSORS["model"]["f32"])
            shutil.rmtree(tmp_path)
            saved(tmp_path, 2)
            continue
        if failing.count < n:
            break
        monkeypatch.undo()  # a deletion failed: a warning
        shutil.rmtree(tmp_path)
        saved(tmp_path, 2)
    assert n > 40
    assert list_steps(tmp_path) == [4]


def test_killed_at_any_call_a_complete_checkpoint_remains(tmp_path):
    from rloo_cli.run.folder import RunFolder

    run = RunFolder(tmp_path / "run")
    run.prepare()
    saved(run.checkpoints, 2)
    for n in range(1, 100):

        def work(n=n):
            atomic.fs = FailingFileSystem(n, "kill")
            saved(run.checkpoints, 4, limit=1)

        status = in_child(work)
        assert find_checkpoint(run.checkpoints).step in (2, 4)
        run.remove_orphans()
        assert leftovers(run.path) == []
        if os.WIFEXITED(status):
            break
        shutil.rmtree(run.checkpoints)
        saved(run.checkpoints, 2)
    assert os.WEXITSTATUS(status) == 0
    assert n > 40
    assert list_steps(run.checkpoints) == [4]


@pytest.mark.parametrize("name", ["../000002/model.safetensors", "/etc/hostname", "transformers/../../escaped"])
def test_a_manifest_that_names_files_elsewhere_is_damage(tmp_path, name):
    saved(tmp_path, 2)
    manifest = Manifest.read(tmp_path / "000002")
    forged = Manifest(info=manifest.info, files={**manifest.files, name: digest_file(tmp_path / "000002" / "model.safetensors")})
    (tmp_path / "000002" / "manifest.json").write_bytes(forged.to_bytes())
    with pytest.raises(StorageError, match="names files outside its folder"):
        find_checkpoint(tmp_path, 2)
