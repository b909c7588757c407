from __future__ import annotations

from datetime import datetime

import pytest

from rloo_cli.errors import RefusedError, StorageError
from rloo_cli.launch.target import choose_target, newest_run

NOW = datetime(2026, 1, 31, 17, 45, 1)


def choose(**options):
    return choose_target(**{"recipe_name": "mine", "output_dir": None, "resume": None, "now": NOW} | options)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A started run in runs/mine-20260101-000000, and the working directory above it."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "mine-20260101-000000"
    (folder / "checkpoints" / "000004").mkdir(parents=True)
    (folder / "recipe.yaml").write_text("model: {}\n")
    return folder


def test_a_new_run_gets_the_recipes_name_and_the_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    target = choose()
    assert str(target.folder.path) == "runs/mine-20260131-174501"
    assert target.resume is None
    assert not target.folder.path.exists()  # nothing is touched yet


def test_a_folder_in_use_is_refused_naming_resume(run):
    with pytest.raises(RefusedError, match="--resume"):
        choose(output_dir=str(run))


def test_a_file_in_the_folders_place_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="file"):
        choose(output_dir=str(tmp_path / "file"))


def test_resume_without_a_folder_takes_the_recipes_newest_run(run):
    (run.parent / "mine-20260102-000000-copy").mkdir()
    (run.parent / "other-20270101-000000").mkdir()
    target = choose(resume="latest")
    assert (target.folder.path.name, target.resume) == (run.name, "latest")


def test_resume_with_no_run_at_all_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RefusedError, match="--output-dir"):
        choose(resume="latest")
    with pytest.raises(RefusedError, match="no run"):
        choose(resume="latest", output_dir="empty")


def test_resume_takes_a_step(run):
    assert choose(resume="4", output_dir=str(run)).resume == 4


def test_a_step_that_is_not_saved_is_refused_and_nothing_is_written(run):
    before = sorted(run.rglob("*"))
    with pytest.raises(RefusedError, match=r"there is no checkpoint .*000002\. Steps saved in .*: 4\."):
        choose(resume="2", output_dir=str(run))
    assert sorted(run.rglob("*")) == before


def test_resume_takes_a_checkpoint_and_finds_its_run(run):
    checkpoint = run / "checkpoints" / "000004"
    target = choose(resume=str(checkpoint))
    assert target.folder.path == run
    assert target.resume == checkpoint


def test_resume_takes_a_run_folder(run):
    target = choose(resume=str(run))
    assert (target.folder.path, target.resume) == (run, "latest")


def test_resume_from_a_path_that_is_not_there_is_refused(run):
    with pytest.raises(RefusedError, match="no such folder"):
        choose(resume="nowhere/at/all")


def test_auto_starts_goes_on_or_is_done(run, monkeypatch):
    assert choose(resume="auto", output_dir="fresh").resume is None
    assert choose(resume="auto", output_dir=str(run)).resume == "latest"
    monkeypatch.setattr("rloo_cli.run.folder.RunFolder.finished_step", lambda self: 10)
    assert choose(resume="auto", output_dir=str(run)).finished


def test_auto_needs_a_folder():
    with pytest.raises(RefusedError, match="--output-dir"):
        choose(resume="auto")


def test_newest_run_goes_by_the_time_in_the_name(tmp_path):
    for name in ("m-20260102-000000", "m-20260101-235959"):
        (tmp_path / name).mkdir()
    assert newest_run("m", tmp_path).name == "m-20260102-000000"
