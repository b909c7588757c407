from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from test_rollouts_command import on_terminal

from rloo_cli.cli.app import exit_code_of
from rloo_cli.inspect.metric_rows import read_metric_rows
from rloo_cli.inspect.run_page import resume_command
from rloo_cli.inspect.run_state import distinct_names
from rloo_cli.run.folder import RunFolder
from rloo_cli.run.lock import locked
from rloo_cli.run.logs import RankReport, write_rank_report

LINE = "2026-03-04 10:00:{:02d},123 INFO rloo_cli.launch.local: words\n"


def output_of(capsys, *arguments: str, code: int = 0) -> str:
    found = exit_code_of(["runs", *arguments])
    captured = capsys.readouterr()
    assert found == code, captured.err
    return captured.out if code == 0 else captured.err


def json_of(capsys, *arguments: str):
    return json.loads(output_of(capsys, *arguments, "--json"))


def written(folder: Path, *attempts: list[RankReport], steps: int = 3, log: str = LINE.format(0) + LINE.format(42)) -> Path:
    """A run with these attempts, whose log lasts 42 seconds each."""
    run = RunFolder(folder)
    folder.mkdir(parents=True)
    run.metrics.write_text("".join(json.dumps({"step": n, "reward": n / 10}) + "\n" for n in range(1, steps + 1)))
    run.environment.write_text(json.dumps({"total_steps": 9, "command": ["/x/rloo", "train", "a.yaml"], "working_folder": str(Path.cwd())}))
    for number, reports in enumerate(attempts, 1):
        run.attempt(number).mkdir(parents=True)
        (run.attempt(number) / "train.log").write_text(log)
        for report in reports:
            write_rank_report(run.attempt(number), report)
    return folder


def ended(code: int, reason: str = "", *, rank: int = 0, neighbour: bool = False) -> RankReport:
    return RankReport(rank=rank, exit_code=code, reason=reason, neighbour=neighbour)


# --- ls --------------------------------------------------------------------------------------------------------------------------


def test_a_finished_run_on_a_line(finished, capsys):
    (run,) = json_of(capsys, "ls", str(finished.parent))
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    evaluation = [row["eval/reward"] for row in rows if "eval/reward" in row]
    assert (run["state"], run["step"], run["total_steps"], run["attempts"]) == ("finished", 2, 2, 1)
    assert run["reward"] == [row["reward"] for row in rows if "reward" in row][-1]
    assert (run["evaluation"], run["best"]) == (evaluation[-1], max(evaluation))
    assert 0 < run["seconds"] < 300
    lines = [line.split("\t") for line in output_of(capsys, "ls", str(finished.parent)).splitlines()]
    assert lines[1][:3] == [finished.name, "finished", "2/2"]


def test_the_states(tmp_path, capsys):
    written(tmp_path / "stopped", [ended(75, "stopped by SIGTERM")])
    written(tmp_path / "failed", [ended(75)], [ended(4, "reward `x` failed"), ended(9, "rank 0 failed", rank=1, neighbour=True)])
    written(tmp_path / "led", [ended(9, "rank 1 failed", neighbour=True), ended(6, "disk full", rank=1)])
    written(tmp_path / "deep" / "died", [])
    written(tmp_path / "lost", [ended(9, "rank 1 is gone", neighbour=True)])
    written(tmp_path / "gone", [ended(0)])
    held = written(tmp_path / "running", [])
    (tmp_path / "no-run").mkdir()
    with locked(held / ".lock"):
        runs = {Path(run["path"]).name: run for run in json_of(capsys, "ls", str(tmp_path))}
    told = {name: (run["state"], run["exit_code"], run["reason"]) for name, run in runs.items()}
    assert told.pop("running")[0] == "running"
    assert f"pid {os.getpid()} on " in runs["running"]["reason"]
    assert told == {
        "stopped": ("stopped", 75, "stopped by SIGTERM"),
        "failed": ("failed", 4, "reward `x` failed"),
        "led": ("failed", 6, "disk full"),
        "died": ("died", None, "it left no word of how it ended"),
        "lost": ("died", 9, "a process left no word of how it ended; rank 0 then: rank 1 is gone"),
        "gone": ("failed", 0, "its last attempt ended well, but the final model is not there or damaged"),
    }
    assert runs["failed"]["seconds"] == 84  # both attempts
    assert runs["stopped"]["started"].startswith("2026-03-04 10:00:00")


def test_a_failure_is_told_on_a_terminal_and_in_a_pipe(tmp_path, capsys):
    written(tmp_path / "runs" / "bad", [ended(4, "reward `x` failed \x1b[2J")])
    assert output_of(capsys, "ls", str(tmp_path / "runs")).splitlines()[1].split("\t")[-1] == "reward `x` failed \\x1b[2J"
    shown = on_terminal(80, ["runs", "ls", str(tmp_path / "runs")])
    assert "failed (4)" in shown
    assert "reward `x` failed \\x1b[2J" in shown
    assert "\x1b[2J" not in shown


def test_where_there_is_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "runs: no such folder" in output_of(capsys, "ls", code=2)
    assert "holds no runs" in output_of(capsys, "ls", str(tmp_path), code=2)
    assert "is no run folder" in output_of(capsys, "show", str(tmp_path), code=2)


# --- show ------------------------------------------------------------------------------------------------------------------------


def test_a_page_of_a_run(finished, capsys):
    page = output_of(capsys, "show", str(finished))
    assert page.splitlines()[0] == f"{finished}  finished at step 2 of 2"
    for title in ("Recipe, where it differs from the defaults", "Curves", "Checkpoints", "Attempts", "Next"):
        assert f"\n{title}\n" in page
    assert f'rloo generate {finished} "…"' in " ".join(page.split())
    assert f"rloo eval {finished}" in " ".join(page.split())
    document = json_of(capsys, "show", str(finished))
    assert document["recipe"]["training.max_steps"] == 2
    assert "training.learning_rate" in document["recipe"]
    assert "training.weight_decay" not in document["recipe"]
    assert [(each["name"], each["step"], each["damage"]) for each in document["checkpoints"]] == [
        ("000001", 1, ""),
        ("000002", 2, ""),
        ("final", 2, ""),
    ]
    assert document["curves"]["reward"] == list(read_metric_rows(finished / "metrics.jsonl").series("reward").values)
    assert document["attempts"][0]["ranks"][0]["exit_code"] == 0


def test_a_run_without_a_split_to_evaluate_on_is_not_to_be_scored(finished, tmp_path, capsys):
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    recipe["data"]["dataset_test_split"] = None
    recipe["evaluation"] = {}
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert json_of(capsys, "show", str(run))["next"].keys() == {"try it", "look at completions"}


def test_damage_of_a_checkpoint_is_found(finished, tmp_path, capsys):
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    weights = run / "checkpoints" / "000002" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert json_of(capsys, "show", str(run))["checkpoints"][1]["damage"] == ""
    assert "sha256" in json_of(capsys, "show", str(run), "--verify")["checkpoints"][1]["damage"]
    weights.write_bytes(data[:-1])
    assert f"{len(data) - 1} bytes instead of {len(data)}" in json_of(capsys, "show", str(run))["checkpoints"][1]["damage"]


def test_warnings_and_how_to_go_on(tmp_path, capsys):
    warned = LINE.format(1) + LINE.replace("INFO", "WARNING").format(2).replace("words", "the disk is slow") * 2
    run = written(tmp_path / "run", [ended(75, "stopped by SIGTERM")], log=warned)
    document = json_of(capsys, "show", str(run))
    assert document["warnings"] == ["the disk is slow"]
    assert document["next"]["go on"] == f"rloo train a.yaml --output-dir {run} --resume"


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["train", "a.yaml", "-o", "x", "--set", "beta=0 1"], "rloo train a.yaml --set 'beta=0 1' --output-dir RUN --resume"),
        (["train", "a.yaml", "--output-dir=x", "--resume=auto"], "rloo train a.yaml --output-dir RUN --resume"),
        (["train", "--resume", "40", "a.yaml"], "rloo train a.yaml --output-dir RUN --resume"),
        (["train", "--resume", "a.yaml"], "rloo train a.yaml --output-dir RUN --resume"),
        (["eval", "a.yaml"], ""),
        ([], ""),
        ([1, "train"], ""),
        ("train", ""),
    ],
)
def test_the_command_that_goes_on(words, wanted):
    command = ["/x/rloo", *words] if isinstance(words, list) else words
    assert resume_command({"command": command}, Path("RUN")) == wanted


def test_the_command_says_where_it_was_given(tmp_path):
    command = resume_command({"command": ["rloo", "train", "a.yaml"], "working_folder": "/else where"}, tmp_path)
    assert command == f"cd '/else where' && rloo train a.yaml --output-dir {tmp_path} --resume"


# --- compare ---------------------------------------------------------------------------------------------------------------------


def test_two_runs_side_by_side(finished, tmp_path, capsys):
    other = Path(shutil.copytree(finished, tmp_path / "other"))
    recipe = (other / "recipe.yaml").read_text()
    (other / "recipe.yaml").write_text(recipe.replace("learning_rate: 0.001", "learning_rate: 0.002"))
    document = json_of(capsys, "compare", str(finished), str(other))
    assert [run["name"] for run in document["runs"]] == [finished.name, "other"]
    assert document["recipe"] == [{"field": "training.learning_rate", finished.name: 0.001, "other": 0.002}]
    numbers = document["numbers"]
    assert numbers["steps"] == {finished.name: 2, "other": 2}
    rewards = list(read_metric_rows(finished / "metrics.jsonl").series("reward").values)
    assert numbers["reward, last tenth"]["other"] == pytest.approx(sum(rewards) / 2)
    lines = [line.split("\t") for line in output_of(capsys, "compare", str(finished), str(other)).splitlines()]
    assert ["training.learning_rate", "0.001", "0.002"] in lines
    assert "two run folders or more" in output_of(capsys, "compare", str(finished), code=2)
    assert "0.002" in on_terminal(80, ["runs", "compare", str(finished), str(other)])


def test_names_that_tell_paths_apart():
    assert distinct_names([Path("/a/x/run"), Path("/a/y/run")]) == ["x/run", "y/run"]
    assert distinct_names([Path("/a/run"), Path("/a/other")]) == ["run", "other"]


# --- damage ----------------------------------------------------------------------------------------------------------------------

FILES = (
    "recipe.yaml",
    "metrics.jsonl",
    "environment.json",
    "run.json",
    "logs",
    "logs/attempt-1",
    "logs/attempt-1/train.log",
    "logs/attempt-1/rank-0.json",
    "checkpoints",
    "checkpoints/000002",
    "checkpoints/000002/manifest.json",
    "final",
    "final/manifest.json",
    ".lock",
)
CONTENTS = (b"\xff\x00\xfe{", b'{"step": 1e999, "rank": "x", "files": 3}', b"[" * 3000, None)
MORE_CONTENTS = (b"", b"[]", b"{}", b"null", b'{"info": 1, "files": {}}\n', b"[[1, 2]]\n", b"a: 1\nb: 2\n")


def damage(path: Path, content: bytes | None) -> None:
    """A file of this content in the path's place; None = a link to nowhere."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to("/nowhere") if content is None else path.write_bytes(content)


@pytest.mark.parametrize("name", FILES)
def test_no_damage_stops_it(name, finished, tmp_path, capsys):
    look_at_damaged(CONTENTS, name, finished, tmp_path, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_no_further_damage_stops_it(name, finished, tmp_path, capsys):
    look_at_damaged(MORE_CONTENTS, name, finished, tmp_path, capsys)


def look_at_damaged(contents, name, finished, tmp_path, capsys):
    runs = []
    for number, content in enumerate(contents):
        runs.append(
            Path(shutil.copytree(finished, tmp_path / f"run-{number}", ignore=shutil.ignore_patterns("*.parquet", "*.safetensors")))
        )
        damage(runs[-1] / name, content)
    listed = json_of(capsys, "ls", str(tmp_path))
    assert {run["path"]: run["state"] == "running" for run in listed} == {str(run): False for run in runs}
    for run in runs:
        output_of(capsys, "show", str(run), "--verify")
    json_of(capsys, "compare", *map(str, runs), str(finished))


def test_looking_imports_nothing_heavy(finished):
    code = (
        "import sys; from rloo_cli.cli.app import exit_code_of as run\n"
        "assert [run(words.split()) for words in sys.argv[1:]] == [0] * (len(sys.argv) - 1)\n"
        'print("HEAVY", sorted({"torch", "transformers", "datasets", "accelerate"} & set(sys.modules)))'
    )
    commands = [f"runs ls {finished.parent}", f"runs show {finished}", "recipes ls", "show smoke --sources"]
    result = subprocess.run([sys.executable, "-c", code, *commands], capture_output=True, text=True, timeout=100)
    assert result.stdout.splitlines()[-1] == "HEAVY []", result.stderr
