from __future__ import annotations

import builtins
import json
import shutil
import sys
from pathlib import Path

import pytest

from rloo_cli.cli.app import exit_code_of
from rloo_cli.inspect.rollout_files import find_rollouts
from rloo_cli.inspect.stored import read_groups

SMOKE_MODEL = Path(__file__).resolve().parents[2] / "recipes" / "smoke" / "model"
QUICK_MODEL = SMOKE_MODEL.parents[1] / "quickstart" / "model"


def output_of(capsys, *arguments: str, code: int = 0) -> str:
    found = exit_code_of(["generate", *arguments])
    captured = capsys.readouterr()
    assert found == code, captured.err
    return captured.out if code == 0 else captured.err


def json_of(capsys, *arguments: str):
    return json.loads(output_of(capsys, *arguments, "--json"))


def texts(document) -> list[list[str]]:
    return [[written["text"] for written in answer["completions"]] for answer in document["answers"]]


@pytest.fixture(scope="module")
def evaluated(finished):
    """Prompts and greedy completions of the run's last evaluation."""
    (file,) = [file for file in find_rollouts(finished) if file.label == "eval-2"]
    return [(group.prompt, group.prompt_text, group.completions[0].text) for group in read_groups(file)]


@pytest.fixture
def prompts(evaluated, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt, _, _ in evaluated))
    return path


@pytest.mark.parametrize("which", [["."], [".", "--checkpoint", "2"], ["checkpoints/000002"], ["final"]], ids=" ".join)
def test_it_says_what_the_evaluation_of_training_said(which, finished, evaluated, prompts, capsys):
    document = json_of(capsys, str(finished / which[0]), *which[1:], "--file", str(prompts), "--temperature", "0")
    assert [answer["prompt_text"] for answer in document["answers"]] == [text for _, text, _ in evaluated]
    assert texts(document) == [[text] for _, _, text in evaluated]
    assert document["sampling"]["max_new_tokens"] == 16  # as the run's recipe has it


def test_another_checkpoint_has_other_weights(finished, capsys):
    one, two = (json_of(capsys, str(finished), "Say hello.", "--checkpoint", step, "--temperature", "0") for step in ("1", "2"))
    assert (one["subject"], two["subject"]) == (f"step 1 of {finished}", f"step 2 of {finished}")
    assert one["answers"][0]["completions"][0]["logprob"] != two["answers"][0]["completions"][0]["logprob"]


def test_a_seed_draws_the_same_again(finished, capsys):
    asked = [str(finished), "one", "two", "-n", "3", "--max-new-tokens", "5"]
    document = json_of(capsys, *asked)
    assert texts(document) == texts(json_of(capsys, *asked))
    assert texts(document) != texts(json_of(capsys, *asked, "--seed", "1"))
    assert [len(answer["completions"]) for answer in document["answers"]] == [3, 3]
    assert all(written["tokens"] <= 5 for answer in document["answers"] for written in answer["completions"])


def test_system_prompt_template_and_raw(capsys, tmp_path):
    asked = [str(QUICK_MODEL), "What is 1+2?", "--temperature", "0"]
    told = json_of(capsys, *asked, "--system", "Be brief.")["answers"][0]
    assert [message["role"] for message in told["prompt"]] == ["system", "user"]
    assert "Be brief." in told["prompt_text"]
    assert json_of(capsys, *asked, "--raw")["answers"][0]["prompt_text"] == "What is 1+2?"
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"extends: {QUICK_MODEL.parents[1] / 'quickstart.yaml'}\ndata: {{system_prompt: Add.}}\n")
    assert "Add." in json_of(capsys, str(recipe), "What is 1+2?")["answers"][0]["prompt_text"]
    plain = json_of(capsys, str(recipe), "What is 1+2?", "--system", "")["answers"][0]
    assert plain["prompt_text"] == "<|im_start|>user\nWhat is 1+2?<|im_end|>\n<|im_start|>assistant\n"


def test_a_run_of_plain_strings_goes_on_from_strings(finished, tmp_path, capsys):
    from written_runs import row, write_run

    run = tmp_path / "run"
    shutil.copytree(finished, run, ignore=shutil.ignore_patterns("rollouts", "checkpoints"))
    write_run(run, s1=[row(step=1, prompt="Add 12 and 30.")])
    assert json_of(capsys, str(run), "Add 1 and 2.")["answers"][0]["prompt_text"] == "Add 1 and 2."


def test_a_single_completion_in_a_pipe_is_its_text_alone(capsys):
    asked = [str(QUICK_MODEL), "What is 1+2?", "--temperature", "0"]
    text = json_of(capsys, *asked)["answers"][0]["completions"][0]["text"]
    assert output_of(capsys, *asked) == text + "\n"
    shown = output_of(capsys, *asked, "--special")
    assert "<|im_start|>user" in shown
    assert f"{text}<|im_end|>" in shown
    several = output_of(capsys, *asked, "-n", "2").splitlines()
    assert [line.split()[0] for line in several if line.startswith("#")] == ["#1", "#2"]


def test_what_cannot_be_done_is_one_line(finished, tmp_path, capsys):
    empty = tmp_path / "empty.txt"
    empty.write_text("\n\n")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "x"}\n{"text": 1}\n')
    run = tmp_path / "begun"
    (run / "logs" / "attempt-1").mkdir(parents=True)
    shutil.copy(finished / "recipe.yaml", run)
    for arguments, code, told in [
        (["no/such/place", "x"], 2, "no/such/place: no such run, checkpoint or model folder."),
        ([str(tmp_path), "x"], 2, "is no run (no recipe.yaml), no checkpoint"),
        ([str(run), "x"], 2, "holds neither a final model nor a checkpoint yet."),
        ([str(SMOKE_MODEL), "x"], 2, "holds no weights"),
        ([str(finished), "x", "--checkpoint", "7"], 2, "there is no checkpoint"),
        ([str(QUICK_MODEL), "x", "--checkpoint", "7"], 2, "--checkpoint needs a run folder"),
        ([str(finished)], 2, "give a prompt, --file or --interactive."),
        ([str(finished), ""], 2, "a prompt is empty."),
        ([str(finished), "x", "--raw", "--system", "y"], 2, "a raw prompt has no system prompt"),
        ([str(finished), "--interactive"], 2, "--interactive needs a terminal"),
        ([str(finished), "x", "--interactive"], 2, "it asks for prompts itself"),
        ([str(finished), "--file", str(empty)], 3, "holds no prompts."),
        ([str(finished), "--file", str(tmp_path / "bad.jsonl")], 3, "bad.jsonl:2: expected"),
        ([str(finished), "--file", str(tmp_path / "none.txt")], 6, "none.txt: cannot be read"),
        ([str(finished), "x " * 4000], 5, "leaves no room in the model's context"),
    ]:
        lines = output_of(capsys, *arguments, code=code).splitlines()
        assert told in lines[-1], lines
        assert len(lines) == 1, lines


def test_a_damaged_checkpoint_is_not_used(finished, tmp_path, capsys):
    run = Path(shutil.copytree(finished, tmp_path / "run", ignore=shutil.ignore_patterns("final")))
    weights = run / "checkpoints" / "000002" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "cannot be used" in output_of(capsys, str(run), "x", "--checkpoint", "2", code=6)
    assert json_of(capsys, str(run), "x")["subject"] == f"step 1 of {run}"


def test_talking_goes_on_until_the_end_of_input(monkeypatch, capsys):
    typed = iter(["What is 1+2?", "x" * 5000, "What is 1+2?"])

    def read(prompt):
        assert prompt == "> "
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(builtins, "input", read)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert exit_code_of(["generate", str(QUICK_MODEL), "--interactive"]) == 0
    captured = capsys.readouterr()
    assert "leaves no room in the model's context" in captured.err
    assert len(captured.out.splitlines()) == 2  # the one that failed is left out
