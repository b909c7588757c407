import os
import time
from pathlib import Path

import pytest

from rloo_cli.rewards import python_tests_reward
from rloo_cli.rewards.python_tests import check_rows, extract_code, split_tests

TESTS = ["assert f(1) == 2", "assert f(2) == 3", "assert f(3) == 5"]
RIGHT_TWICE = "```python\ndef f(x):\n    return x + 1\n```"


def outcome(code, tests=TESTS, **arguments):
    """Score and note of one program."""
    extras = {}
    [score] = python_tests_reward([code], tests=[tests], log_extra=extras.__setitem__, **arguments)
    return score, extras["python_tests"][0]


def test_fraction_and_all_or_nothing():
    assert python_tests_reward([RIGHT_TWICE], tests=[TESTS]) == [pytest.approx(2 / 3)]
    assert python_tests_reward([RIGHT_TWICE] * 2, tests=[TESTS, TESTS[:2]], score="all") == [0.0, 1.0]


def test_programs_do_not_see_each_other():
    assert python_tests_reward(["def f(x): return x + 1", "g = 1"], tests=[TESTS[:1]] * 2) == [1.0, 0.0]


def test_messages_and_another_column():
    completion = [{"role": "assistant", "content": RIGHT_TWICE}]
    assert python_tests_reward([completion], test_list=[TESTS[:2]], column="test_list") == [1.0]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\na\n```\nthen\n```python\nb\n```\nand\n```\nc\n```", "\nb\n"),
        ("```py\na\n```", "\na\n"),
        ("```python\na", "\na"),
        ("text\n```\na\n```\nmore", "a\n"),
        ("```text\na\n```", "a\n"),
        ("a = 1", "a = 1"),
    ],
)
def test_which_code_is_run(text, code):
    assert extract_code(text) == code


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (["x = 1\nassert x", " "], [("x = 1\nassert x", True)]),
        ("x = 1\nassert x\nassert x == 1", [("x = 1", False), ("assert x", True), ("assert x == 1", True)]),
        ("def check(f):\n    assert f\ncheck(f)", [("def check(f):\n    assert f\ncheck(f)", True)]),
        (None, []),
        ([], []),
        ("", []),
    ],
)
def test_what_counts_as_a_test(value, expected):
    assert split_tests(value) == [{"source": source, "is_test": is_test} for source, is_test in expected]


def test_a_row_without_tests_is_unscored():
    assert python_tests_reward(["x", "x"], tests=[[], None]) == [None, None]


@pytest.mark.parametrize(
    ("code", "note"),
    [
        ("def f(x): return 0", "AssertionError"),
        ("1/0", "ZeroDivisionError: division by zero"),
        ("def f(:", "SyntaxError"),
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("import os; os._exit(0)", "ended early"),
        ("import os; os.kill(os.getpid(), 11)", "ended early"),
        ("import ctypes; ctypes.string_at(0)", "ended early"),
        ("x = 'a' * 10**11", "MemoryError"),
        ("open('big', 'wb').write(bytes(10**8))", "File too large"),
        ("x = [open('/dev/null') for _ in range(1000)]", "Too many open files"),
        ("import os; os.kill(os.getppid(), 9)", "ended the process"),
        ("import sys\nfor fd in range(3, 30):\n  try: __import__('os').write(fd, b'passed\\n' * 3)\n  except OSError: pass", "NameError"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("\0", "null bytes"),
        ("\ud800", "surrogates"),
        ("9" * 10**6, "SyntaxError"),
        ("(" * 10**5, "SyntaxError"),
        ("class E(Exception):\n  def __str__(self): raise self\nraise E", "ended early"),
    ],
)
def test_code_that_fails_in_its_own_way(code, note):
    score, told = outcome(code)
    assert score == 0.0
    assert note in told


@pytest.mark.parametrize("code", ["while True: pass", "import time; time.sleep(60)", "import sys; sys.stdin.read(); input()"])
def test_code_that_does_not_end(code):
    begin = time.monotonic()
    assert outcome(code, seconds=1.0)[0] == 0.0
    assert time.monotonic() - begin < 10


def test_a_program_that_ends_the_runner_does_not_take_its_siblings_with_it():
    programs = ["import os; os.kill(os.getppid(), 9)", "def f(x): return x + 1"]
    assert python_tests_reward(programs, tests=[TESTS[:1]] * 2) == [0.0, 1.0]


def test_a_flood_of_output_is_harmless():
    assert outcome("print('x' * 10**7)\ndef f(x): return x + 1", TESTS[:1])[0] == 1.0


def test_the_program_has_an_empty_folder_and_a_bare_environment(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "secret")
    code = "import os\nassert os.listdir() == []\nassert 'MY_API_KEY' not in os.environ, 'seen'\nassert __name__ != '__main__'\nopen('left', 'w').write('x')"
    assert outcome(code, ["assert os.listdir() == ['left']"]) == (1.0, "1 of 1 passed")


def test_what_a_program_leaves_running_is_killed(tmp_path):
    pid_file = tmp_path / "pid"
    code = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        f"        open({str(pid_file)!r}, 'w').write(str(os.getpid()))\n"
        "        time.sleep(600)\n"
        "    os._exit(0)\n"
        f"while not os.path.exists({str(pid_file)!r}) or not open({str(pid_file)!r}).read(): time.sleep(0.01)\n"
    )
    if os.getuid() != 0:
        pytest.skip("the limit of processes already keeps a user's program from forking")
    outcome(code, ["assert True"], seconds=2.0)
    assert not Path(f"/proc/{pid_file.read_text()}").exists()


def test_no_folder_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    outcome("open('x', 'w').write('x')\nimport os; os.mkdir('d'); os.chmod('d', 0)")
    assert list(tmp_path.iterdir()) == []


def test_check_rows():
    assert check_rows({"tests": [TESTS, "assert True"]}) == []
    with pytest.raises(ValueError, match=r"2 of 3 rows of tests .*row 1: no tests; row 2: .*is not Python"):
        check_rows({"tests": [TESTS, [], ["assert ("]]})
    with pytest.raises(ValueError, match="no column 'cases' with tests"):
        check_rows({"tests": [TESTS]}, column="cases")


def test_unknown_score_is_told():
    with pytest.raises(ValueError, match="fraction or all"):
        python_tests_reward(["x"], tests=[TESTS], score="some")
