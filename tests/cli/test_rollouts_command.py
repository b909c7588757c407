from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.cells import cell_len
from written_runs import FAMILY, HOSTILE, WIDE, row, write_failed_facts, write_run

from rloo_cli.cli.app import exit_code_of
from rloo_cli.types import EncodedImage, FinishReason

ROOT = Path(__file__).resolve().parent.parent.parent


def output_of(capsys, *arguments: str, code: int = 0) -> str:
    found = exit_code_of(["rollouts", *arguments])
    captured = capsys.readouterr()
    assert found == code, captured.err
    return captured.out if code == 0 else captured.err


def json_of(capsys, *arguments: str):
    return json.loads(output_of(capsys, *arguments, "--json"))


CONTROL_SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
ON_TERMINAL = """
import json, sys
from rloo_cli.cli.app import exit_code_of
for command in json.loads(sys.argv[1]):
    assert exit_code_of(command) == 0, command
"""


def on_terminal(width: int, *commands: list[str]) -> str:
    """What a terminal of this width is sent, colours and all."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(width), "TERM": "xterm-256color"}
    process = subprocess.Popen(
        [sys.executable, "-c", ON_TERMINAL, json.dumps(commands)], stdout=theirs, stderr=theirs, stdin=theirs, env=environment, cwd=ROOT
    )
    os.close(theirs)
    chunks = []
    try:
        while chunk := os.read(ours, 65536):
            chunks.append(chunk)
    except OSError:
        pass  # how Linux tells that the other end is closed
    os.close(ours)
    output = b"".join(chunks).decode()
    assert process.wait(60) == 0, output
    return output


# --- a real run ------------------------------------------------------------------------------------------------------------------


def test_ls_has_a_line_a_file_of_the_run(finished, capsys):
    lines = [line.split("\t") for line in output_of(capsys, "ls", str(finished)).splitlines()]
    assert lines[0] == ["step", "prompts", "completions", "reward", "tokens", "ended"]
    assert [line[0] for line in lines[1:]] == ["1", "2", "eval-2"]
    assert [line[1:3] for line in lines[1:]] == [["2", "8"], ["2", "8"], ["4", "4"]]


def test_stats_agree_with_the_metrics_of_the_run(finished, capsys):
    metrics = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    for summary, step in zip(json_of(capsys, "stats", str(finished), "--step", "1-2"), metrics, strict=False):
        assert summary["step"] == step["step"]
        assert summary["reward"]["mean"] == pytest.approx(step["reward"])
        assert summary["reward_std"] == pytest.approx(step["reward_std"])
        assert summary["lengths"]["mean"] == pytest.approx(step["completions/mean_length"])
        assert summary["rewards"]["share_of_letters"]["mean"] == pytest.approx(step["rewards/share_of_letters/mean"])
        assert summary["finish_reasons"].get("truncated", 0) / summary["completions"] == step["completions/clipped_ratio"]


def test_show_tells_everything_about_a_group(finished, capsys):
    text = output_of(capsys, "show", str(finished), "--step", "1")
    group = json_of(capsys, "show", str(finished), "--step", "1")["groups"][0]
    assert len(group["completions"]) == 4
    for completion in group["completions"]:
        assert f"{completion['reward']:.3f}" in text
        assert f"{completion['advantage']:+.3f}" in text
    for words in ("share_of_letters", "think_format_reward", "truncated", "KL", group["prompt"]):
        assert words in text


def test_best_and_worst_are_the_ends_of_the_step(finished, capsys):
    def mean(*which: str) -> float:
        (group,) = json_of(capsys, "show", str(finished), "--step", "2", *which)["groups"]
        return sum(completion["reward"] for completion in group["completions"]) / 4

    everything = json_of(capsys, "show", str(finished), "--step", "2", "-n", "99")["groups"]
    assert len(everything) == 2
    assert mean("--best") > mean("--worst")


def test_special_tokens_come_from_the_runs_own_tokenizer(finished, capsys):
    shown = output_of(capsys, "show", str(finished), "--step", "eval", "--special", "--full")
    assert "prompt" in shown
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "rloo_cli", "rollouts", "show", str(finished), "--special"],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0
    assert not [line for line in result.stderr.splitlines() if line.rpartition("|")[2].strip() in ("torch", "transformers", "datasets")]


def test_diff_pairs_the_same_prompts(finished, tmp_path, capsys):
    pairs = json_of(capsys, "diff", str(finished), "eval-2", "eval", "--other", str(finished))
    assert len(pairs) == 4
    assert {pair["change"] for pair in pairs} == {0.0}
    assert "4 prompts in common" in output_of(capsys, "diff", str(finished), "eval-2", "eval")


def test_rescoring_with_the_same_function_finds_the_same_rewards(finished, capsys):
    found = json_of(capsys, "rescore", str(finished), "--reward", "smoke.reward.share_of_letters", "--against", "share_of_letters")
    assert found["total"]["correlation"] == pytest.approx(1.0)
    assert found["total"]["signs"] == {"same": 16, "flipped": 0, "gained": 0, "lost": 0}
    assert found["total"]["old_mean"] == found["total"]["new_mean"]
    assert found["examples"] == []
    assert set(found["steps"]) == {"1", "2"}


def test_rescoring_with_the_opposite_function_flips_every_sign(finished, tmp_path, capsys):
    (tmp_path / "opposite.py").write_text(
        "def score(completions, prompts, completion_ids, trainer_state):\n"
        "    assert trainer_state.step == 2 and len(completion_ids[0]) == 16\n"
        "    return [-sum(c.isalpha() for c in text) / max(1, len(text)) for text in completions]\n"
    )
    command = ["rescore", str(finished), "-r", "opposite.score", "--code-dir", str(tmp_path), "-s", "2", "--against", "share_of_letters"]
    found = json_of(capsys, *command)
    assert found["total"]["correlation"] == pytest.approx(-1.0)
    assert found["total"]["ordered_alike"] == 0.0
    assert found["total"]["signs"]["flipped"] == 8
    assert len(found["examples"]) == 2  # one a group
    text = output_of(capsys, *command)
    assert "correlation          -1.000" in text
    assert "8 flipped" in text


def test_what_a_new_reward_needs_is_said_before_it_runs(finished, capsys):
    assert "needs `max_len`" in output_of(capsys, "rescore", str(finished), "-r", "cosine_length_reward", code=2)
    assert "no built-in reward `nope`" in output_of(capsys, "rescore", str(finished), "-r", "nope", code=2)


def test_a_function_that_fails_everywhere_is_a_reward_error_and_leaves_no_process(finished, tmp_path, capsys):
    (tmp_path / "wrong.py").write_text("def score(completions):\n    raise KeyError('boom')\n")
    message = output_of(capsys, "rescore", str(finished), "-r", "wrong.score", "--code-dir", str(tmp_path), code=4)
    assert message.startswith("error: reward `score` failed on every completion of step 1: KeyError")
    assert len(message.splitlines()) == 1


def test_columns_are_found_by_the_prompt_where_row_numbers_have_moved(tmp_path, capsys):
    run = write_run(tmp_path / "run", s1=[row(prompt_row=p, prompt=f"prompt {p + 1}", completion=str(p + 1), reward=1.0) for p in range(3)])
    data = tmp_path / "data.jsonl"  # row 0 was too long and was left out: the rollouts number what came after it from 0
    data.write_text("".join(json.dumps({"prompt": f"prompt {p}", "answer": str(p)}) + "\n" for p in range(4)))
    command = ["rescore", str(run), "-r", "exact_match_reward", "--data", str(data)]
    assert json_of(capsys, *command)["total"]["new_mean"] == 1.0
    data.write_text(data.read_text().replace("prompt 2", "prompt two"))
    message = output_of(capsys, *command, code=3)
    assert "data.jsonl has changed since: prompt row 1 of the rollouts is not in it" in message


def test_failures_of_some_completions_are_counted_after_the_table(tmp_path, capsys):
    write_run(tmp_path / "run", s1=[row(), row(completion="bad", reward=0.0)])
    (tmp_path / "some.py").write_text(
        "def score(completions):\n    return [float('bad' not in c[0]['content']) or 1 / 0 for c in completions]\n"
    )
    code = exit_code_of(["rollouts", "rescore", str(tmp_path / "run"), "-r", "some.score", "--code-dir", str(tmp_path)])
    captured = capsys.readouterr()
    assert code == 4
    assert "0 do not apply · 1 failed" in captured.out
    assert "failed on 1 of 2 completions, at first: ZeroDivisionError" in captured.err


# --- written runs ----------------------------------------------------------------------------------------------------------------


def test_what_a_terminal_would_obey_is_spelled_out(tmp_path, capsys):
    run = write_run(
        tmp_path / "run",
        s3=[row(completion=HOSTILE, prompt=HOSTILE, prompt_text=HOSTILE, extras={"seen": HOSTILE}, rewards={HOSTILE: 1.0})],
    )
    for arguments in (["show", "--full"], ["show", "--json"], ["ls"], ["stats"], ["show", "--special"]):
        if "--special" in arguments:
            continue
        shown = output_of(capsys, arguments[0], str(run), *arguments[1:])
        assert not set(shown) & set("\x1b\x07\x9b\r\u202e"), arguments
    assert "\\x1b[2J" in output_of(capsys, "show", str(run))
    assert json_of(capsys, "show", str(run))["groups"][0]["completions"][0]["text"] == HOSTILE


@pytest.mark.parametrize("width", [80, 140])
def test_a_terminal_gets_no_line_wider_than_itself(tmp_path, width):
    texts = [WIDE, FAMILY, "x" * 500, "", "a\n" * 60, HOSTILE]
    rewards = {"correct": 1.0, "the_format_of_the_answer": 0.0, "length": -0.25, "another_long_name": 1.0}
    run = write_run(tmp_path / "run", s3=[row(completion=text, rewards=rewards) for text in texts], eval_3=[row(completion=WIDE)])
    commands = [["show", "--step", "3"], ["ls"], ["stats"], ["diff", "3", "eval"], ["rescore", "-r", "think_format_reward", "--no-data"]]
    shown = on_terminal(
        width,
        *([["rollouts", name, str(run), *rest] for name, *rest in commands]),
        ["rewards", "ls"],
        ["rewards", "check", str(ROOT / "recipes" / "smoke.yaml")],
    )
    assert "\x1b[1m" in shown  # bold: rich knows that it is a terminal
    lines = [CONTROL_SEQUENCE.sub("", line.rpartition("\r")[2]).rstrip() for line in shown.replace("\r\n", "\n").split("\n")]
    assert max(cell_len(line) for line in lines) <= width
    assert any("[bold]markup[/bold] :smile:" in line for line in lines)
    assert any(line.startswith("  │ 数学の問題") for line in lines)


def test_a_failed_batch_shows_what_is_absent_as_absent(tmp_path, capsys):
    nothing = {"completion": None, "completion_ids": None, "logprobs": None, "finish_reason": None, "reward": None, "advantage": None}
    run = write_run(
        tmp_path / "run",
        s3=[row(), row()],
        failed_4=[row(step=4, prompt_row=p, **(nothing if p else {"logprobs": (float("nan"),) * 3, "reward": None})) for p in (0, 0, 1, 1)],
    )
    write_failed_facts(run, 4, row=3, message="step 4, prompt row 1: a logit is nan.")
    by_file = output_of(capsys, "show", str(run / "failed" / "step-000004.parquet"))
    assert by_file == output_of(capsys, "show", str(run), "--step", "failed")
    assert "the run stopped here: step 4, prompt row 1: a logit is nan." in by_file
    assert "prompt row 1 · group 2 of 2" in by_file  # the group with the fault, not the first
    assert "#2  reward —  the run stopped at this one" in by_file
    assert "(none was stored)" in by_file
    assert "0.000" not in by_file
    document = json_of(capsys, "show", str(run), "--step", "failed-4", "-n", "2")
    assert document["groups"][0]["completions"][0]["text"] is None
    assert document["groups"][1]["completions"][0]["logprobs"] == ["nan", "nan", "nan"]
    assert "failed-4\t2\t4\t—\t3.0\t50% stopped, 2 unknown" in output_of(capsys, "ls", str(run))


def test_one_file_alone_and_one_with_the_least_of_columns(tmp_path, capsys):
    pq.write_table(pa.table({"completion": ["x"], "prompt_row": [1]}), tmp_path / "least.parquet")
    assert "reward —" in output_of(capsys, "show", str(tmp_path / "least.parquet"))
    run = write_run(tmp_path / "run", s3=[row()])
    assert "reward 1.000" in output_of(capsys, "show", str(run / "rollouts" / "000003.parquet"))


def test_groups_are_found_by_text_by_end_and_by_prompt(tmp_path, capsys):
    run = write_run(
        tmp_path / "run",
        s3=[row(prompt_row=1), row(prompt_row=2, completion="hm"), row(prompt_row=3, finish_reason=FinishReason.TRUNCATED)],
    )
    for arguments, found in ((["--contains", "hm"], 2), (["--ended", "truncated"], 3), (["--prompt", "1"], 1)):
        assert [group["prompt_row"] for group in json_of(capsys, "show", str(run), *arguments)["groups"]] == [found]


def test_two_groups_of_one_prompt_stay_two(finished, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text((finished / "recipe.yaml").read_text())  # 4 completions a prompt
    run = write_run(tmp_path / "run", s3=[row() for _ in range(8)])
    assert [len(group["completions"]) for group in json_of(capsys, "show", str(run), "-n", "9")["groups"]] == [4, 4]


def test_diff_shows_the_best_of_each_side_and_what_got_worse(tmp_path, capsys):
    run = write_run(
        tmp_path / "run",
        eval_0=[row(prompt_row=p, prompt=f"prompt {p}", completion=f"old {p}", reward=float(p == 1)) for p in range(3)],
        eval_9=[row(prompt_row=p, prompt=f"prompt {p}", completion=f"new {p}", reward=float(p != 1)) for p in range(3)],
    )
    text = output_of(capsys, "diff", str(run), "eval-0", "eval", "--worst", "-n", "1")
    assert "3 prompts in common" in text
    assert "better 2 · same 0 · worse 1" in text
    assert "old 1" in text
    assert "new 1" in text
    assert "new 0" not in text


def test_diff_pairs_a_prompt_that_comes_twice_in_turn(tmp_path, capsys):
    run = write_run(
        tmp_path / "run",
        s1=[row(prompt_row=p, prompt="same" if p != 1 else "other", completion=f"a{p}") for p in range(3)],
        s2=[row(prompt_row=p, prompt="same" if p != 1 else "other", completion=f"b{p}") for p in range(3)],
    )
    pairs = json_of(capsys, "diff", str(run), "1", "2")
    texts = sorted((pair["before"]["completions"][0]["text"], pair["after"]["completions"][0]["text"]) for pair in pairs)
    assert texts == [("a0", "b0"), ("a1", "b1"), ("a2", "b2")]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["ls", "nope"], 2, "nope: no such run folder or file."),
        (["ls", "empty"], 2, "empty is no run folder: it holds no rollouts/."),
        (["ls", "begun"], 2, "begun holds no rollouts yet"),
        (["ls", "run/rollouts"], 2, "name the run: run"),
        (["ls", "note.txt"], 2, "is no rollout file"),
        (["show", "foreign.parquet"], 2, "holds no rollouts: it has no column `prompt_row`"),
        (["show", "numbers.parquet"], 2, "its column `completion` is int64, not string"),
        (["show", "run", "--step", "99"], 2, "no rollouts of step `99`; there are: 3, 4, eval-3."),
        (["show", "run", "--step", "3-4"], 2, "`3-4` means 2 steps"),
        (["show", "run", "--prompt", "99"], 2, "step 4 has no prompt 99; its prompts are rows 7."),
        (["show", "run", "--contains", "zzz"], 2, "no completion of step 4 is like that"),
        (["show", "run", "--best", "--worst"], 2, "one of them at a time"),
        (["show", "run", "--special"], 2, "special tokens need the run's tokenizer"),
        (["show", "broken"], 6, "not a readable rollout file"),
        (["diff", "run", "3", "eval"], 2, "have no prompt in common. Steps with prompts of step 3: 4."),
        (["rescore", "run", "-r", "exact_match_reward"], 2, "no recipe.yaml lies beside"),
        (["rescore", "run", "-r", "regex_reward", "--kwargs", "pattern"], 2, "expected a mapping"),
        (["rescore", "run", "-r", "regex_reward", "--kwargs", "{a: &b 1}"], 2, "--kwargs"),
        (["rescore", "run", "-r", "think_format_reward", "--no-data", "--against", "nope"], 2, "there are: correct, style."),
    ],
)
def test_what_cannot_be_shown_is_one_line_and_a_code(arguments, code, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_run(Path("run"), s3=[row()], s4=[row(step=4)], eval_3=[row(prompt="another")])
    write_run(Path("broken"), s1=[row()])
    Path("broken/rollouts/000001.parquet").write_bytes(b"PAR1 nonsense PAR1")
    Path("empty").mkdir()
    Path("begun/logs").mkdir(parents=True)
    Path("note.txt").write_text("x")
    pq.write_table(pa.table({"a": [1]}), "foreign.parquet")
    pq.write_table(pa.table({"completion": [1], "prompt_row": [1]}), "numbers.parquet")
    error = output_of(capsys, *arguments, code=code)
    assert message in error
    assert len(error.splitlines()) == 1
    assert "Traceback" not in error


def test_a_damaged_file_does_not_hide_the_other_steps(tmp_path, capsys):
    run = write_run(tmp_path / "run", s1=[row()], s2=[row()], s3=[row()])
    whole = (run / "rollouts" / "000002.parquet").read_bytes()
    (run / "rollouts" / "000002.parquet").write_bytes(whole[: len(whole) // 2])
    assert exit_code_of(["rollouts", "ls", str(run)]) == 6
    captured = capsys.readouterr()
    assert [line.split("\t")[0] for line in captured.out.splitlines()] == ["step", "1", "3"]
    assert "000002.parquet" in captured.err


@pytest.mark.parametrize("command", ["ls", "stats"])
def test_what_is_named_like_a_rollout_file_and_is_none_does_not_hide_the_steps(command, tmp_path, capsys):
    run = write_run(tmp_path / "run", s1=[row()], s3=[row()])
    pq.write_table(pa.table({"a": [1]}), run / "rollouts" / "000002.parquet")
    os.mkfifo(run / "rollouts" / "000004.parquet")
    (run / "rollouts" / "000005.parquet").mkdir()
    assert exit_code_of(["rollouts", command, str(run)]) == 6
    captured = capsys.readouterr()
    assert [line.split("\t")[0] for line in captured.out.splitlines()] == ["step", "1", "3"]
    assert "000002.parquet is a parquet file, but holds no rollouts" in captured.err
    assert captured.err.endswith("The other steps are shown. Not readable either: 000004.parquet, 000005.parquet.\n")


def test_a_pipe_is_not_waited_for(tmp_path, capsys):
    run = write_run(tmp_path / "run", s1=[row()], failed_2=[row()])
    os.mkfifo(run / "rollouts" / "000004.parquet")
    os.mkfifo(tmp_path / "pipe.parquet")
    os.mkfifo(run / "failed" / "step-000002.json")
    assert "000004.parquet: not a readable rollout file (a folder, a pipe" in output_of(capsys, "show", str(run), code=6)
    assert "is a pipe or a device" in output_of(capsys, "show", str(tmp_path / "pipe.parquet"), code=2)
    assert "step failed-2" in output_of(capsys, "show", str(run), "--step", "failed")


def test_a_file_without_rows_says_so(tmp_path, capsys):
    run = write_run(tmp_path / "run", s1=[row()])
    file = run / "rollouts" / "000001.parquet"
    pq.write_table(pq.read_table(file).slice(0, 0), file)
    assert "step 1 holds no rows" in output_of(capsys, "show", str(run), code=2)


def test_reasons_that_are_as_frequent_stand_in_one_order(tmp_path, capsys):
    both = [row(finish_reason=FinishReason.TRUNCATED), row()]
    run = write_run(tmp_path / "run", s1=both, s2=both[::-1])
    ended = [line["finish_reasons"] for line in json_of(capsys, "ls", str(run))]
    assert list(ended[0]) != list(ended[1])
    lines = output_of(capsys, "ls", str(run)).splitlines()[1:]
    assert [line.split("\t")[-1] for line in lines] == ["50% stopped, 50% truncated"] * 2


def test_a_pager_that_leaves_early_is_no_error(tmp_path):
    run = write_run(tmp_path / "run", s1=[row(prompt_row=p, completion="word " * 2000) for p in range(200)])
    command = f"set -o pipefail; {sys.executable} -m rloo_cli rollouts show {run} -n 200 --full | head -1"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert result.returncode == 141
    assert result.stderr == ""
    assert result.stdout.startswith("step 1 · prompt row 0 · group 1 of 200")


def test_looking_changes_nothing(finished, capsys):
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    for command in (["ls"], ["stats"], ["show"]):
        output_of(capsys, *command, str(finished))
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before


def test_show_names_the_images_of_a_prompt_and_their_places(tmp_path, capsys):
    image = EncodedImage(data=b"abc", name="cats/a.png", digest="unused")
    prompt = [{"role": "user", "content": [{"type": "text", "text": "Is "}, {"type": "image"}, {"type": "text", "text": " a cat?"}]}]
    write_run(tmp_path / "run", s3=[row(prompt=prompt, images=(image,)), row(prompt=prompt)])
    shown = output_of(capsys, "show", str(tmp_path / "run"), "--step", "3")
    assert "Is [image] a cat?" in shown
    assert "image 1  cats/a.png, 3 bytes, sha256 ba7816bf8f01" in shown  # of "abc"
