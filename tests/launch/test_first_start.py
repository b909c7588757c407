"""A first start that goes wrong: it takes nothing with it that was there before."""

from __future__ import annotations

from pathlib import Path

import pytest

from rloo_cli.cli.app import exit_code_of
from rloo_cli.errors import RefusedError
from rloo_cli.launch.first_start import attempt_undone, folder_undone
from rloo_cli.launch.target import Target
from rloo_cli.run.folder import RunFolder

SMOKE = Path(__file__).resolve().parents[2] / "recipes" / "smoke.yaml"


def start_wrong(folder, *more):
    data = folder.parent / "bad.jsonl"
    data.write_text("{no json\n")
    return exit_code_of(["train", str(SMOKE), "--set", f"data.dataset_name={data}", "--output-dir", str(folder), *more])


def below(folder):
    return {path.relative_to(folder).as_posix(): path.read_text() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize("more", [[], ["--resume=auto"], ["--resume"]])
@pytest.mark.parametrize(
    "files",
    [
        ["logs/t", "checkpoints/000050/"],
        ["logs/"],
        ["rollouts/", "checkpoints/"],
        ["checkpoints/000050/model.safetensors"],
        ["logs/server.log"],
        [".lock", "thesis.tex"],
    ],
)
def test_a_folder_of_other_things_is_refused_and_left_alone(tmp_path, capsys, files, more):
    folder = tmp_path / "proj"
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).mkdir() if name.endswith("/") else (folder / name).write_text("x")
    before = below(folder)
    assert start_wrong(folder, *more) == 2
    assert "no run of ours" in capsys.readouterr().err
    assert below(folder) == before


def test_logs_of_an_attempt_make_no_checkpoint_ours(tmp_path):
    folder = tmp_path / "proj"
    (folder / "logs" / "attempt-1").mkdir(parents=True)
    (folder / "checkpoints" / "000050").mkdir(parents=True)
    before = below(folder)
    assert start_wrong(folder) == 2
    assert below(folder) == before


@pytest.mark.parametrize("stands", [None, "empty", "died"])
def test_what_the_start_wrote_goes_and_what_stood_there_stays(tmp_path, stands):
    folder = tmp_path / "run"
    if stands is not None:
        folder.mkdir()
    if stands == "died":
        (folder / "logs" / "attempt-1").mkdir(parents=True)
        (folder / "logs" / "attempt-1" / "rank-0.log").write_text("killed")
        (folder / "rollouts").mkdir()
    before = below(folder)
    assert start_wrong(folder) != 0
    assert folder.exists() == (stands is not None)
    assert below(folder) == before


def test_what_others_put_there_meanwhile_stays(tmp_path):
    target = Target(folder=RunFolder(tmp_path / "run"), resume=None)

    def start():
        with folder_undone(target), target.folder.lock(), attempt_undone(target) as attempt:
            target.folder.prepare()
            target.folder.recipe.write_text("")
            (target.folder.checkpoints / "notes").write_text("mine")
            (attempt / "rank-0.log").write_text("")
            raise RefusedError("wrong")

    with pytest.raises(RefusedError):
        start()
    assert below(target.folder.path) == {"checkpoints": None, "checkpoints/notes": "mine"}
