from __future__ import annotations

import json
import logging
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from rloo_cli.cli.app import COMMANDS, GROUPS, LINES, exit_code_of
from rloo_cli.errors import EngineError
from rloo_cli.recipe.install import install_command

ROOT = Path(__file__).resolve().parent.parent.parent
SMOKE = ROOT / "recipes" / "smoke.yaml"


def write_recipe(folder: Path, **changes) -> Path:
    document = yaml.safe_load(SMOKE.read_text())
    for section, values in changes.items():
        document[section] = values if section == "rewards" else {**document.get(section, {}), **values}
    document["model"]["model_name_or_path"] = str(ROOT / "recipes" / "smoke" / "model")
    if "data" not in changes:
        document["data"]["dataset_name"] = str(ROOT / "recipes" / "smoke" / "prompts.jsonl")
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def test_help_has_a_whole_line_for_each_command_on_a_narrow_terminal():
    result = subprocess.run(
        [sys.executable, "-m", "rloo_cli", "--help"], capture_output=True, text=True, timeout=60, env={**os.environ, "COLUMNS": "80"}
    )
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    listed = lines[lines.index("Commands:") + 1 :]
    listed = [line.split(maxsplit=1) for line in listed[: listed.index("")]]
    assert dict(listed) == LINES
    assert LINES.keys() == COMMANDS.keys() | GROUPS.keys()


@pytest.mark.parametrize("group", GROUPS)
def test_lines_of_a_group_are_whole(group, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert exit_code_of([group, "--help"]) == 0
    listed = capsys.readouterr().out.partition("\nCommands:\n")[2].partition("\n\n")[0].splitlines()
    assert listed
    assert all(line.endswith(".") and not line.endswith("...") for line in listed)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["trian"], 2, "Did you mean 'train'"),
        (["train"], 2, "Missing argument 'RECIPE'"),
        (["train", "a.yaml", "--sett", "x=1"], 2, "--set"),
        (["train", "no-such.yaml"], 2, "no-such.yaml: no such file"),
        (["plan", "no-such-recipe"], 2, "no-such-recipe"),
        (["schema", "--show", "trainning"], 2, "Sections: model, data"),
        (["eval", "no-such.yaml", "--checkpoint", "3"], 2, "needs a run folder"),
        (["train", "smoke", "--code-dir", "/no/such/dir"], 2, "--code-dir /no/such/dir: no such folder"),
        (["train", "smoke", "--set", "beta=-1"], 2, "beta"),
        (["train", "smoke", "--resume=auto"], 2, "--output-dir"),
        (["train", "smoke", "--resume", "--output-dir", "no-such-run"], 2, "holds no run"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_a_code(arguments, code, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert exit_code_of(arguments) == code
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err + captured.out
    assert list(tmp_path.iterdir()) == []


def test_five_faults_are_five_lines_at_once(tmp_path, capsys):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "model:\n  model_name_or_path: some/model\n  dtyp: float32\n"
        "data:\n  dataset_name: some/data\n"
        "rewards:\n  - function: no_such_module.score\n"
        "generation:\n  num_generations: 1\n"
        "algorithm:\n  beta: -0.5\n"
        "training:\n  learning_rate: fast\n"
    )
    assert exit_code_of(["train", str(recipe)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[0] for line in lines[:5]] == [f"{recipe}:{place}" for place in ("3:3", "7:15", "9:20", "11:9", "13:18")]
    assert lines[5].startswith("5 errors.")
    assert len(lines) == 6


def test_no_arguments_show_the_help(capsys):
    assert exit_code_of([]) == 2
    assert "rloo train quickstart" in capsys.readouterr().err


def test_version(capsys):
    assert exit_code_of(["--version"]) == 0
    assert capsys.readouterr().out.startswith("rloo 0.")


def test_an_unexpected_exception_is_one_line_with_the_tracebacks_place(monkeypatch, capsys):
    def fail(*_, **__):
        raise KeyError("deep")

    monkeypatch.setattr("rloo_cli.plan.prepare.check_recipe", fail)
    assert exit_code_of(["plan", "smoke"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("bug: KeyError: 'deep' (traceback in ")
    assert "please report" in line
    log = Path(line.split("traceback in ")[1].split(")")[0])
    assert "Traceback" in log.read_text()
    log.unlink()


def test_ctrl_c_is_130_without_a_traceback(monkeypatch, capsys):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("rloo_cli.plan.prepare.check_recipe", interrupt)
    assert exit_code_of(["plan", "smoke"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_reader_that_leaves_early_is_no_error():
    result = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {sys.executable} -m rloo_cli schema | head -1"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    assert result.returncode in (0, 141)
    assert result.stderr == ""


def test_the_schema_is_json_and_a_section_is_a_table(capsys):
    assert exit_code_of(["schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "rloo recipe"
    assert exit_code_of(["schema", "--show", "algorithm"]) == 0
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["algorithm", "type", "default", "meaning"]
    assert ["beta", "number ≥ 0", "0.05"] in [row[:3] for row in rows]


def test_a_section_fits_a_narrow_terminal(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    assert exit_code_of(["schema", "--show", "all"]) == 0
    shown = capsys.readouterr().out
    assert "beta\x1b[0m  number ≥ 0, default 0.05\n      Weight of the KL penalty" in shown
    assert "model_name_or_path\x1b[0m  text, required\n" in shown
    assert all(len(line) <= 80 for line in shown.splitlines() if line.startswith("      "))


def test_plan_without_a_model_imports_nothing_heavy_and_knows_the_batch():
    code = "import sys, rloo_cli.cli.app as a; a.exit_code_of(['plan', 'smoke', '--no-model']); print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert "2 prompts × 4 completions = 8 completions an optimizer step" in result.stdout
    assert result.stdout.endswith("False\n")


def test_train_refuses_wrong_data_and_leaves_nothing(tmp_path, capsys):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": 3}\n')
    recipe = write_recipe(tmp_path, data={"dataset_name": "prompts.jsonl", "dataset_test_split": None}, evaluation={"eval_strategy": "no"})
    (tmp_path / "smoke").symlink_to(ROOT / "recipes" / "smoke")
    code = exit_code_of(["train", str(recipe), "--output-dir", str(tmp_path / "run")])
    captured = capsys.readouterr()
    assert code == 3, captured.err
    assert "prompts.jsonl:2" in captured.err
    assert "Traceback" not in captured.err + captured.out
    assert not (tmp_path / "run").exists()


def test_a_column_that_a_reward_wants_and_the_data_lacks_is_a_recipe_error(tmp_path, capsys):
    (tmp_path / "reward.py").write_text("def score(completions, answers):\n    return [0.0] * len(completions)\n")
    recipe = write_recipe(tmp_path, rewards=[{"function": "reward.score"}])
    assert exit_code_of(["train", str(recipe), "--output-dir", str(tmp_path / "run")]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"error: {recipe}:")
    assert "needs `answers`" in errors
    assert not (tmp_path / "run").exists()


def test_train_leaves_a_whole_run_folder(finished):
    names = {path.name for path in finished.iterdir()}
    assert names == {
        "recipe.yaml",
        "recipe.source.yaml",
        "environment.json",
        "run.json",
        "metrics.jsonl",
        "rollouts",
        "checkpoints",
        "final",
        "logs",
        "report.html",
    }
    steps = [json.loads(line)["step"] for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 2]  # the last one is the evaluation
    rank = json.loads((finished / "logs" / "attempt-1" / "rank-0.json").read_text())
    assert (rank["exit_code"], rank["reason"]) == (0, "")
    log = (finished / "logs" / "attempt-1" / "train.log").read_text().splitlines()
    assert "train smoke" in log[0]
    assert log[-1].endswith("done")
    assert json.loads((finished / "environment.json").read_text())["code_dir"] == str(ROOT / "recipes")
    assert (finished / "recipe.source.yaml").read_text() == SMOKE.read_text()


def test_a_finished_run_is_refused_or_for_scripts_done(finished, capsys):
    before = sorted(finished.rglob("*"))
    assert exit_code_of(["train", "smoke", "--output-dir", str(finished)]) == 2
    assert "finished run" in capsys.readouterr().err
    assert exit_code_of(["train", "smoke", "--output-dir", str(finished), "--resume=auto"]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert sorted(finished.rglob("*")) == before


def test_eval_of_a_run_needs_no_recipe_and_writes_nothing(finished, capsys):
    before = sorted(finished.rglob("*"))
    found = []
    for which in ([], ["--checkpoint", "2"]):
        assert exit_code_of(["eval", str(finished), "--json", *which]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]
    assert found[0]["eval/prompts"] == 4
    assert sorted(finished.rglob("*")) == before


def test_an_engine_that_fails_ends_with_the_command_that_goes_on(tmp_path, monkeypatch, capsys):
    from rloo_cli.rollout.transformers_engine import TransformersEngine

    generate, recipe, folder = TransformersEngine.generate, write_recipe(tmp_path), tmp_path / "a \x1b[2J run"

    def failing(self, *arguments, **options):
        if self.weights_version:
            raise EngineError("the engine fell over.")
        return generate(self, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(TransformersEngine, "generate", failing)
        assert exit_code_of(["train", str(recipe), "--output-dir", str(folder), "--code-dir", str(ROOT / "recipes"), "--quiet"]) == 5
    (error,) = capsys.readouterr().err.splitlines()
    said, _, command = error.partition(" To go on: ")
    assert said == "error: the engine fell over. Step 1 is saved; --resume goes on from there."
    assert shlex.split(command.replace("\\x1b", "\x1b")) == [
        *("rloo", "train", str(recipe), "--code-dir", str(ROOT / "recipes"), "--output-dir", str(folder), "--resume")
    ]
    assert exit_code_of(shlex.split(command.replace("\\x1b", "\x1b"))[1:]) == 0
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out + captured.err
    assert "a \\x1b[2J run: from the checkpoint of step 1" in captured.out
    assert f"done: {tmp_path}/a \\x1b[2J run (" in captured.out
    assert exit_code_of(["train", str(recipe), "--output-dir", str(folder), "--code-dir", str(ROOT / "recipes"), "--resume=auto"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/a \\x1b[2J run: finished already, nothing to do\n"


def test_plan_tells_everything_as_json(capsys):
    assert exit_code_of(["plan", "smoke", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["batch"]["completions_per_step"] == 8
    assert plan["steps"]["total"] == 2
    assert plan["memory"]["bytes"]["peak"] > plan["memory"]["bytes"]["weights"] > 0
    assert plan["first_prompt"]
    assert plan["command"] == "rloo train smoke"


def test_what_is_said_while_the_engine_is_checked_goes_to_a_file_that_is_named_where_it_fails(tmp_path, monkeypatch, capsys):
    def said(inputs):
        logging.getLogger("vllm").warning("of vLLM")
        warnings.warn("of torch", FutureWarning, stacklevel=1)
        logging.getLogger("rloo_cli.x").warning("of ours\x1b[2J")
        raise EngineError("vLLM fell over.")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("rloo_cli.training.engine_check.check_engine", said)
    assert exit_code_of(["plan", "smoke", "--engine", "--set", "bf16=false"]) == 5
    (log,) = tmp_path.glob("rloo-engine-check-*.log")
    errors = capsys.readouterr().err.splitlines()
    assert errors == ["warning: of ours\\x1b[2J", f"error: vLLM fell over (log: {log})."]
    assert "of vLLM" in log.read_text()
    assert "of torch" in log.read_text()


def test_plan_compares_the_engine_with_the_trainer_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert exit_code_of(["plan", "smoke", "--json", "--engine", "--set", "bf16=false"]) == 0
    engine = json.loads(capsys.readouterr().out)["engine"]
    assert engine["name"] == "transformers"
    assert engine["completions"] == 8
    assert engine["logp_diff_max"] < 1e-4
    assert engine["ess"] == pytest.approx(1, abs=1e-4)
    assert not list(tmp_path.rglob("*"))
    assert exit_code_of(["plan", "smoke", "--no-model", "--engine"]) == 2


def test_vllm_that_is_not_installed_is_one_line_with_the_install_command(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("rloo_cli.plan.extras.find_spec", lambda name: None if name == "vllm" else find_spec(name))
    monkeypatch.chdir(tmp_path)
    assert exit_code_of(["train", "smoke", "--set", "use_vllm=true"]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert f"generation.use_vllm: vLLM is not installed here: {install_command('vllm')}" in lines[0]
    assert not list(tmp_path.rglob("*.*"))
    assert exit_code_of(["plan", "smoke", "--no-model", "--set", "use_vllm=true"]) == 0
    assert "vLLM is not installed here" in capsys.readouterr().out


@pytest.mark.parametrize(("mode", "fault"), [(None, "cannot be read"), (0o644, "others can read or change it")])
def test_a_key_file_that_does_not_do_is_an_error_of_its_field_before_anything_is_loaded(mode, fault, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    if mode is not None:
        Path("server.key").write_text("k" * 20)
        Path("server.key").chmod(mode)
    options = ["use_vllm=true", "vllm_mode=server", "vllm_server_key_file=server.key"]
    assert exit_code_of(["train", "smoke", *(word for option in options for word in ("--set", option))]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "generation.vllm_server_key_file: " in line
    assert fault in line
    assert "--key-file" not in line


def test_a_signal_saves_and_resume_goes_on(tmp_path, capsys):
    folder = tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "rloo_cli",
        "train",
        "smoke",
        "--output-dir",
        str(folder),
        "--set",
        "max_steps=500",
        "--set",
        "eval_strategy=no",
    ]
    process = subprocess.Popen(
        [*command, "--set", "lr_scheduler_type=constant", "--set", "bf16=false"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    for line in process.stdout:
        if line.startswith("step 2/"):
            break
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75, errors
    what, how = errors.splitlines()[-2:]
    assert what.startswith("stopped by SIGTERM: step")
    assert how.startswith("  rloo train smoke --set max_steps=500")
    assert how.endswith(f"--output-dir {folder} --resume")
    steps = len((folder / "metrics.jsonl").read_text().splitlines())
    assert (
        exit_code_of(
            [*command[3:], "--set", f"max_steps={steps + 1}", "--set", "lr_scheduler_type=constant", "--set", "bf16=false", "--resume"]
        )
        == 0
    )
    assert f"from the checkpoint of step {steps}" in capsys.readouterr().out
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == steps + 1
    assert sorted(path.name for path in (folder / "logs").iterdir()) == ["attempt-1", "attempt-2"]


def test_a_resume_with_other_prompts_is_refused(tmp_path, capsys):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Name a colour."}\n{"prompt": "Name a bird."}\n')
    recipe = write_recipe(
        tmp_path,
        data={"dataset_name": "prompts.jsonl", "dataset_test_split": None},
        evaluation={"eval_strategy": "no"},
        rewards=[{"function": "think_format_reward"}],
        training={"bf16": False, "lr_scheduler_type": "constant"},
    )
    command = ["train", str(recipe), "--output-dir", str(tmp_path / "run")]
    assert exit_code_of([*command, "--set", "max_steps=1"]) == 0
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Name a colour."}\n{"prompt": "Name a fish."}\n')
    assert exit_code_of([*command, "--set", "max_steps=2", "--resume"]) == 2
    assert "prompts.jsonl" in capsys.readouterr().err
