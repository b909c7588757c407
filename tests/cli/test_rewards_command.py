from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from written_runs import HOSTILE, row, write_run

from rloo_cli import rewards
from rloo_cli.cli.app import exit_code_of

ROOT = Path(__file__).resolve().parent.parent.parent

MODULE = '''
import time


def right(completions, answer, **kwargs):
    """1.0 where the answer comes last."""
    return [float(c[-1]["content"].endswith(str(a))) for c, a in zip(completions, answer)]


def short(completions, limit=10, **kwargs):
    return [float(len(c[-1]["content"]) < limit) for c in completions]


def constant(completions):
    return [0.5] * len(completions)


def nothing(completions):
    return [None] * len(completions)


def last_word(completions, answer):
    return [float(c[-1]["content"].split()[-1] == str(a)) for c, a in zip(completions, answer)]


def not_a_number(completions):
    return [float("nan")] * len(completions)


def junk(completions, answer):
    return [float("green" in c[-1]["content"]) for c in completions]


def slow(completions):
    time.sleep(0.15 * len(completions))
    return [float(len(c[-1]["content"])) for c in completions]


def hangs(completions):
    time.sleep(600)


def talks(completions):
    print("seen", repr(completions[0][-1]["content"]), "\\x1b[31m")
    return [float(len(c[-1]["content"])) for c in completions]


async def later(completions, log_metric, log_extra, trainer_state):
    log_metric("seen", len(completions))
    return [float(len(c[-1]["content"])) for c in completions]


def _private(completions):
    return []


def helper(text):
    return text


def strict(completions, answer):
    return right(completions, answer)


def check(columns):
    raise ValueError("row 2: no such answer")


strict.check_rows = check
'''


@pytest.fixture
def task(tmp_path, monkeypatch) -> Path:
    """A folder with a module of rewards and three rows of data, and the working directory in it."""
    (tmp_path / "mine.py").write_text(MODULE)
    rows = [{"prompt": [{"role": "user", "content": f"{a} + {a}?"}], "answer": 2 * a, "topic": "sums"} for a in (6, 7, 8)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rows))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capsys, *arguments: str, code: int = 0) -> tuple[str, str]:
    found = exit_code_of(["rewards", *arguments])
    captured = capsys.readouterr()
    assert found == code, captured.out + captured.err
    return captured.out, captured.err


def checked(capsys, name: str, *arguments: str, code: int = 0):
    output, _ = run(capsys, "check", name, "--data", "prompts.jsonl", "--json", *arguments, code=code)
    (reward,) = json.loads(output)["rewards"]
    return reward


def by_kind(reward, position: int = 0) -> dict[str, float | None]:
    tried = reward["rows"][position]
    return {probe["kind"]: value for probe, value in zip(tried["probed"]["probes"], tried["values"], strict=True)}


# --- ls --------------------------------------------------------------------------------------------------------------------------


def test_ls_has_every_built_in_with_a_line(capsys):
    output, errors = run(capsys, "ls")
    rows = [line.split("\t") for line in output.splitlines()[1:]]
    assert [row[0] for row in rows] == sorted(rewards.__all__)
    assert all(row[2].endswith(".") for row in rows)
    assert errors == ""


def test_ls_finds_your_own_and_names_what_is_no_python(task, capsys):
    (task / "deeper").mkdir()
    (task / "deeper" / "more.py").write_text("def other(prompts, completions, *, words):\n    '''Said.'''\n")
    (task / "broken.py").write_text("def x(:\n")
    output, errors = run(capsys, "ls", "--code-dir", ".")
    names = [line.split("\t")[0] for line in output.splitlines()]
    assert "mine.right" in names
    assert "deeper.more.other" in names
    assert {"mine._private", "mine.helper", "mine.check"} & set(names) == set()
    assert "broken.py:1: invalid syntax" in errors


# --- check -----------------------------------------------------------------------------------------------------------------------


def test_check_tells_what_each_kind_of_completion_gets(task, capsys):
    reward = checked(capsys, "mine.right")
    assert by_kind(reward) == {"gold": 1.0, "boxed": 0.0, "thought": 0.0, "junk": 0.0, "empty": 0.0, "cut off": 0.0}
    assert len(reward["rows"]) == 3
    assert reward["warnings"] == []
    assert reward["arguments"][1] == ["answer", "column `answer`"]
    assert reward["arguments"][2][1].endswith("columns: topic")
    output, _ = run(capsys, "check", "mine.right", "--data", "prompts.jsonl", "-n", "2")
    assert "nothing looks wrong" in output
    assert "1.0 where the answer comes last." in output
    assert "2 rows of prompts.jsonl; gold answers: column `answer`" in " ".join(output.split())


@pytest.mark.parametrize(
    ("name", "warning"),
    [
        ("short", "rewards the empty answer: it gets as much as the best other one in 3 of 3 rows"),
        ("constant", "constant: every one of these completions gets 0.5"),
        ("nothing", "None for every completion"),
        ("junk", "junk gets as much as the gold answer in 3 of 3 rows"),
        ("slow", "slow: 0."),
    ],
)
def test_check_warns(task, capsys, name, warning):
    assert any(line.startswith(warning) for line in checked(capsys, f"mine.{name}")["warnings"])


@pytest.mark.parametrize(("name", "is_told"), [("accuracy_reward", True), ("exact_match_reward", False), ("think_format_reward", False)])
def test_check_tells_where_a_bare_gold_answer_is_not_enough(task, capsys, name, is_told):
    line = (
        "the bare gold answer is paid nothing, and the same in a box is (3 of 3 rows): it wants \\boxed{12}; "
        "see that the prompts ask for that form"
    )
    assert (line in checked(capsys, name)["warnings"]) == is_told


@pytest.mark.parametrize(
    ("name", "failed", "line"),
    [
        ("last_word", 3, "prompts.jsonl:1, empty: IndexError: list index out of range (mine.py:"),
        ("not_a_number", 18, "prompts.jsonl:1, gold: returned nan, not a finite float or None"),
    ],
)
def test_what_would_stop_a_run_is_exit_code_4_after_the_table(task, capsys, name, failed, line):
    output, errors = run(capsys, "check", f"mine.{name}", "--data", "prompts.jsonl", code=4)
    assert errors.startswith(f"error: reward `{name}` fails: {line}")
    assert len(errors.splitlines()) == 1
    assert f"fails on {failed} of 18 completions" in output
    assert "Traceback" not in output


def test_a_function_that_hangs_is_ended_and_no_further_row_tried(task, capsys):
    reward = checked(capsys, "mine.hangs", "--timeout", "0.05", code=4)
    assert len(reward["rows"]) == 1
    assert reward["failures"][0] == "prompts.jsonl:1, gold: no answer within 0.05 s, its worker was killed"
    assert "tried on 1 of 3 rows only: the last one took too long" in reward["warnings"]
    assert reward["seconds"] is None


def test_what_it_prints_is_shown_and_not_obeyed(task, capsys):
    output, _ = run(capsys, "check", "mine.talks", "--data", "prompts.jsonl", "-n", "1")
    assert "seen '12' \\x1b[31m" in output
    assert "\x1b" not in output


def test_coroutine_functions_and_metrics(task, capsys):
    reward = checked(capsys, "mine.later")
    assert reward["metrics"] == {"seen": 6.0}
    assert by_kind(reward)["gold"] == 2.0


def test_its_own_check_of_the_data_is_asked(task, capsys):
    output, errors = run(capsys, "check", "mine.strict", "--data", "prompts.jsonl", code=3)
    assert "refused" in output
    assert errors == "error: reward `strict`: row 2: no such answer\n"


def test_a_misspelt_argument_is_told_of(task, capsys):
    reward = checked(capsys, "mine.short", "--kwargs", "{limt: 3}")
    assert reward["warnings"][0] == "kwargs: it has no parameter `limt`, so that **kwargs takes it; did you mean `limit`?"
    assert by_kind(checked(capsys, "mine.short", "--kwargs", "{limit: 3}"))["boxed"] == 0.0


def test_completions_of_your_own(task, capsys):
    (task / "given.jsonl").write_text('{"completion": "it is 14", "prompt_row": 1}\n{"completion": "it is 15", "prompt_row": 1}\n')
    reward = checked(capsys, "mine.right", "--completions", "given.jsonl")
    (tried,) = reward["rows"]
    assert tried["probed"]["row"] == 1
    assert tried["values"][-2:] == [1.0, 0.0]
    assert "it is 15" in run(capsys, "check", "mine.right", "--data", "prompts.jsonl", "--completions", "given.jsonl")[0]


def test_rollouts_serve_as_completions(task, capsys):
    write_run(task / "run", s3=[row(prompt_row=2, completion="it is 16"), row(prompt_row=2, completion=HOSTILE)])
    output, _ = run(capsys, "check", "mine.right", "--data", "prompts.jsonl", "--completions", "run/rollouts/000003.parquet")
    assert "it is 16" in output
    assert not set(output) & set("\x1b\x07\x9b\r\u202e")


def test_a_recipe_is_checked_with_all_its_rewards_and_its_own_tokens(capsys):
    output, _ = run(capsys, "check", "quickstart", "-n", "2", "--json")
    (reward,) = json.loads(output)["rewards"]
    assert by_kind(reward)["boxed"] == by_kind(reward)["thought"] == 1.0
    assert by_kind(reward)["gold"] == by_kind(reward)["cut off"] == 0.0
    output, _ = run(capsys, "check", str(ROOT / "recipes" / "smoke.yaml"), "-n", "1")
    assert "share_of_letters" in output
    assert "think_format_reward" in output


def test_a_run_is_checked_like_its_recipe(finished, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    output, _ = run(capsys, "check", str(finished), "-n", "1", "--json")
    assert [reward["name"] for reward in json.loads(output)["rewards"]] == ["share_of_letters", "think_format_reward"]


def test_gold_answers_of_the_column_that_is_named(task, capsys):
    (task / "other.jsonl").write_text('{"prompt": "1+1?", "final": "2", "answer": "three"}\n')
    output, _ = run(capsys, "check", "exact_match_reward", "--data", "other.jsonl", "--column", "final", "--json")
    document = json.loads(output)
    assert document["gold_column"] == "final"
    assert by_kind(document["rewards"][0])["gold"] == 1.0  # the function was told of the column as well


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["check", "mine.right"], 2, "name the prompts that it is tried on: --data FILE"),
        (["check", "mine.rigth", "--data", "prompts.jsonl"], 2, "has no `rigth`. Did you mean `right`?"),
        (["check", "mine.py", "--data", "prompts.jsonl"], 2, "looks like a file"),
        (["check", "nope.yaml"], 2, "nope.yaml"),
        (["check", "quickstart", "--data", "prompts.jsonl"], 2, "a recipe has its own"),
        (["check", "mine.right", "--data", "nope.jsonl"], 2, "no such file or folder: nope.jsonl"),
        (["check", "mine.right", "--data", "empty.jsonl"], 3, "holds no rows"),
        (["check", "mine.right", "--data", "prompts.jsonl", "--split", "test"], 2, "has no split `test`"),
        (["check", "mine.right", "--data", "prompts.jsonl", "--column", "gold"], 3, "no column `gold`; it has: prompt, answer, topic"),
        (["check", "mine.right", "--data", "prompts.jsonl", "--prompt-column", "q"], 3, "no column `q`"),
        (["check", "mine.right", "--data", "plain.jsonl"], 2, "needs `answer`, which is no column"),
        (["check", "mine.right", "--data", "prompts.jsonl", "--code-dir", "nope"], 2, "--code-dir nope: no such folder"),
        (["check", "mine.right", "--data", "prompts.jsonl", "--kwargs", "["], 2, "--kwargs"),
        (["check", "mine.right", "--data", "prompts.jsonl", "--completions", "prompts.jsonl"], 3, "no column `completion`"),
        (
            ["check", "mine.right", "--data", "prompts.jsonl", "--completions", "far.jsonl"],
            3,
            "belongs to row 7 of the data, which has 3 rows",
        ),
        (["check", "mine.right", "--data", "nul.jsonl"], 3, "nul.jsonl:1"),
        (["ls", "--code-dir", "nope"], 2, "no such folder"),
        (["new", "my reward"], 2, "is no name for a reward function"),
        (["new", "../up"], 2, "is no name for a reward function"),
        (["new", "json"], 2, "a module of Python itself"),
        (["new", "mine"], 2, "mine.py exists already, and nothing was written"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_nothing_is_left(task, capsys, arguments, code, message):
    (task / "empty.jsonl").write_text("")
    (task / "plain.jsonl").write_text('{"prompt": "x"}\n')
    (task / "nul.jsonl").write_text('{"prompt": null, "answer": 1}\n')
    (task / "far.jsonl").write_text('{"completion": "x", "prompt_row": 7}\n')
    before = sorted(path.name for path in task.iterdir())
    output, error = run(capsys, *arguments, code=code)
    assert message in error
    assert len(error.splitlines()) == 1
    assert output == ""
    assert [path.name for path in sorted(task.iterdir()) if path.name != "__pycache__"] == [
        name for name in before if name != "__pycache__"
    ]


# --- new -------------------------------------------------------------------------------------------------------------------------


def test_new_writes_a_function_that_passes_its_own_test_and_the_check(task, capsys):
    output, _ = run(capsys, "new", "my_reward", "--dir", "rewards_of_mine")
    folder = task / "rewards_of_mine"
    assert sorted(path.name for path in folder.iterdir()) == ["my_reward.py", "test_my_reward.py"]
    tests = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)], capture_output=True, text=True)
    assert tests.returncode == 0, tests.stdout
    assert "4 passed" in tests.stdout
    reward = checked(capsys, "my_reward.my_reward", "--code-dir", str(folder))
    assert reward["warnings"] == []
    assert by_kind(reward)["gold"] == 1.0
    assert "rloo rewards check my_reward.my_reward --code-dir rewards_of_mine" in output


def test_new_never_overwrites(task, capsys):
    run(capsys, "new", "words.score")
    assert "def score(" in (task / "words.py").read_text()
    (task / "words.py").unlink()
    kept = (task / "test_words.py").read_text()
    run(capsys, "new", "words.score", code=2)
    assert not (task / "words.py").exists()
    assert (task / "test_words.py").read_text() == kept


def test_what_new_writes_is_tidy(task, capsys):
    run(capsys, "new", "my_reward")
    ruff = subprocess.run(
        [
            sys.executable,
            "-m",
            "ruff",
            "check",
            "--isolated",
            "--select",
            "E,F,I,B,UP",
            "--line-length",
            "140",
            "my_reward.py",
            "test_my_reward.py",
        ],
        capture_output=True,
        text=True,
    )
    assert ruff.returncode == 0, ruff.stdout
