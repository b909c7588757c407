from __future__ import annotations

import errno
import hashlib
import os
import stat

import pytest
from failpoints import FailingFileSystem, leftovers

from rloo_cli.errors import StorageError
from rloo_cli.run import atomic
from rloo_cli.run.manifest import DamagedError, Manifest

FAULTS = [errno.ENOSPC, errno.EIO, "short"]


def until_it_survives(monkeypatch, fault, attempt, check, *, limit=60):
    """Fail the 1st, 2nd, 3rd … call of `attempt` until it runs through; `check` after each. The number of calls comes back."""
    for n in range(1, limit):
        failing = FailingFileSystem(n, fault)
        monkeypatch.setattr(atomic, "fs", failing)
        try:
            attempt()
        except StorageError as error:
            check(n, error)
        else:
            check(n, None)
            if failing.count < n:
                return n
    raise AssertionError(f"{limit} faults were not enough")


def test_a_written_file_holds_the_data_with_the_mode_of_the_umask(tmp_path):
    path = tmp_path / "a.json"
    old = os.umask(0o027)
    try:
        atomic.write_json(path, {"x": 1.5})
    finally:
        os.umask(old)
    assert path.read_text() == '{\n  "x": 1.5\n}\n'
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_write_is_fsynced_before_and_after_the_rename(tmp_path, monkeypatch):
    failing = FailingFileSystem()
    monkeypatch.setattr(atomic, "fs", failing)
    atomic.write_file(tmp_path / "a", b"data")
    assert [call for call in failing.log if call in ("write", "fsync", "rename")] == ["write", "fsync", "rename", "fsync"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_is_old_or_new_whichever_call_fails(tmp_path, monkeypatch, fault):
    path = tmp_path / "a"
    path.write_bytes(b"old")

    def check(n, error):
        assert path.read_bytes() in (b"old", b"new and longer")
        assert error is None or str(path) in error.message
        monkeypatch.undo()
        path.write_bytes(b"old")

    calls = until_it_survives(monkeypatch, fault, lambda: atomic.write_file(path, b"new and longer"), check)
    assert calls > 6
    assert leftovers(tmp_path) == []


def test_nan_is_refused_before_a_byte_is_written(tmp_path):
    with pytest.raises(ValueError):
        atomic.write_json(tmp_path / "a", {"x": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told_with_need_and_room(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic, "fs", FailingFileSystem(1, errno.ENOSPC, only=("write",)))
    with pytest.raises(
        StorageError, match=r"cannot write .*/a: No space left on device \(1\.5 kB needed, .* free\)\. Free some space"
    ) as caught:
        atomic.write_file(tmp_path / "a", b"x" * 1500)
    assert caught.value.exit_code == 6
    assert "\n" not in caught.value.message


def test_appended_lines_follow_each_other_and_the_size_comes_back(tmp_path):
    path = tmp_path / "m.jsonl"
    assert atomic.append_line(path, "one") == 4
    assert atomic.append_line(path, "zwei ü") == 4 + 8
    assert path.read_text() == "one\nzwei ü\n"


def test_a_line_is_one_write(tmp_path, monkeypatch):
    failing = FailingFileSystem()
    monkeypatch.setattr(atomic, "fs", failing)
    atomic.append_line(tmp_path / "m", "x" * 100_000)
    assert failing.log == ["open", "write", "close"]


@pytest.mark.parametrize("fault", FAULTS)
def test_no_half_line_whichever_call_fails(tmp_path, monkeypatch, fault):
    path = tmp_path / "m"
    path.write_bytes(b"first\n")

    def check(n, error):
        assert path.read_bytes() in (b"first\n", b"first\nsecond\n")
        path.write_bytes(b"first\n")

    assert until_it_survives(monkeypatch, fault, lambda: atomic.append_line(path, "second"), check) == 4


def test_a_short_write_without_an_error_is_completed(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic.FileSystem, "write", staticmethod(lambda descriptor, data: os.write(descriptor, memoryview(data)[:3])))
    atomic.append_line(tmp_path / "m", "a long line")
    atomic.write_file(tmp_path / "f", b"long content")
    assert (tmp_path / "m").read_bytes() == b"a long line\n"
    assert (tmp_path / "f").read_bytes() == b"long content"


def test_a_write_that_never_advances_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic.FileSystem, "write", staticmethod(lambda descriptor, data: 0))
    with pytest.raises(StorageError):
        atomic.append_line(tmp_path / "m", "line")


def write_folder(target):
    with atomic.AtomicFolder(target, info={"step": 3}) as folder:
        folder.write_json("a.json", {"x": 1})
        folder.write("b.bin", [b"12", b"", memoryview(b"345")])
        (folder.path / "sub").mkdir()
        (folder.path / "sub" / "c.txt").write_text("by other code")


def test_a_folder_appears_with_a_manifest_of_all_its_files(tmp_path):
    target = tmp_path / "000003"
    write_folder(target)
    manifest = Manifest.read(target)
    manifest.verify(target)
    assert manifest.info == {"step": 3}
    assert sorted(manifest.files) == ["a.json", "b.bin", "sub/c.txt"]
    assert manifest.files["b.bin"].size == 5
    assert manifest.files["b.bin"].sha256 == hashlib.sha256(b"12345").hexdigest()
    assert leftovers(tmp_path) == []


def test_files_of_other_code_get_the_mode_of_the_umask(tmp_path):
    with atomic.AtomicFolder(tmp_path / "f") as folder:
        private = folder.path / "x"
        private.write_bytes(b"")
        private.chmod(0o600)
        folder.write("y", b"")
    assert stat.S_IMODE((tmp_path / "f" / "x").stat().st_mode) == stat.S_IMODE((tmp_path / "f" / "y").stat().st_mode)


def test_everything_is_fsynced_before_the_rename(tmp_path, monkeypatch):
    failing = FailingFileSystem()
    monkeypatch.setattr(atomic, "fs", failing)
    write_folder(tmp_path / "f")
    calls = failing.log[: failing.log.index("rename")]
    assert calls.count("fsync") == 6  # a, b, sub, sub/c, the manifest, the folder
    assert failing.log[failing.log.index("rename") :].count("fsync") == 1  # the parent


def test_an_exception_in_the_block_leaves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError), atomic.AtomicFolder(tmp_path / "f") as folder:
        folder.write("a", (b"1" for _ in [0, 1 // 0]))
    assert list(tmp_path.iterdir()) == []


def test_what_other_code_cannot_write_is_a_storage_error_too(tmp_path):
    from safetensors import SafetensorError

    for error in (OSError(errno.ENOSPC, "No space left on device"), SafetensorError("I/O error: No space left on device")):
        with pytest.raises(StorageError, match=r"cannot write .*final.*No space left"), atomic.AtomicFolder(tmp_path / "final"):
            raise error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_is_complete_or_absent_whichever_call_fails(tmp_path, monkeypatch, fault):
    number = 0

    def attempt():
        nonlocal number
        number += 1
        write_folder(tmp_path / str(number))

    def check(n, error):
        target = tmp_path / str(number)
        if target.exists():
            Manifest.read(target).verify(target)
        else:
            assert error is not None
            assert str(target) in error.message

    assert until_it_survives(monkeypatch, fault, attempt, check) >= 28
    assert leftovers(tmp_path) == []


def test_a_folder_is_never_overwritten(tmp_path):
    write_folder(tmp_path / "f")
    before = (tmp_path / "f" / "manifest.json").read_bytes()
    with pytest.raises(StorageError, match="never overwritten"):
        write_folder(tmp_path / "f")
    assert (tmp_path / "f" / "manifest.json").read_bytes() == before
    assert leftovers(tmp_path) == []


def test_a_folder_that_appears_meanwhile_is_not_overwritten_either(tmp_path):
    with pytest.raises(StorageError, match="never overwritten"), atomic.AtomicFolder(tmp_path / "f"):
        (tmp_path / "f").mkdir()
    assert list((tmp_path / "f").iterdir()) == []


def test_a_replaceable_folder_is_replaced_as_a_whole(tmp_path):
    for content in (b"1", b"2"):
        with atomic.AtomicFolder(tmp_path / "final", replace=True) as folder:
            folder.write(f"only-{content.decode()}", content)
    assert sorted(path.name for path in (tmp_path / "final").iterdir()) == ["manifest.json", "only-2"]
    assert leftovers(tmp_path) == []


def test_the_rest_of_an_attempt_of_ours_is_cleared_first(tmp_path):
    stale = atomic.temporary_path(tmp_path / "f")
    stale.mkdir()
    (stale / "half").write_bytes(b"half")
    write_folder(tmp_path / "f")
    assert not (tmp_path / "f" / "half").exists()


def test_no_flipped_bit_passes_in_a_manifest(tmp_path):
    write_folder(tmp_path / "f")
    path = tmp_path / "f" / "manifest.json"
    original = path.read_bytes()
    for position in range(len(original)):
        data = bytearray(original)
        data[position] ^= 1 << (position % 8)
        path.write_bytes(data)
        with pytest.raises(DamagedError):
            Manifest.read(tmp_path / "f")


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"3", b"null", b'{"files": 3, "info": {}}', b'{"files": {"a": 1}, "info": {}}', b"\xff"]
)
def test_what_is_no_manifest_is_damaged(tmp_path, content):
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(DamagedError, match=r"manifest\.json"):
        Manifest.read(tmp_path)


def test_a_file_where_a_folder_should_be(tmp_path):
    (tmp_path / "runs").write_text("")
    for path in (tmp_path / "runs", tmp_path / "runs" / "x"):
        with pytest.raises(StorageError, match="move it away"):
            atomic.make_folder(path)


def test_too_little_room_is_found_before_writing(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic.FileSystem, "free_bytes", lambda self, path: 2_000_000)
    atomic.ensure_free(tmp_path, 1_999_999, "checkpoint x")
    with pytest.raises(StorageError, match=r"checkpoint x: no room: 3 MB needed, 2 MB free"):
        atomic.ensure_free(tmp_path, 3_000_000, "checkpoint x")


def test_removing_a_tree_does_not_follow_links(tmp_path):
    (tmp_path / "keep").mkdir()
    (tmp_path / "keep" / "file").write_text("x")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "link").symlink_to(tmp_path / "keep")
    atomic.remove_tree(tmp_path / "tree")
    assert not (tmp_path / "tree").exists()
    assert (tmp_path / "keep" / "file").exists()


def test_a_full_disk_that_tokenizers_finds_is_told_as_any_other(tmp_path):
    """It raises a plain Exception with these words."""
    with (
        pytest.raises(StorageError, match=r"cannot write .*out: No space left on device .*Free some space"),
        atomic.AtomicFolder(tmp_path / "out"),
    ):
        raise Exception("No space left on device (os error 28)")
    assert not (tmp_path / "out").exists()


def test_an_exception_that_is_not_the_systems_goes_on_its_way(tmp_path):
    with pytest.raises(Exception, match="^mine$"), atomic.AtomicFolder(tmp_path / "out"):
        raise Exception("mine")
    assert not (tmp_path / "out").exists()
