import random

import pytest

from rloo_cli.rewards import answers


@pytest.mark.parametrize(
    ("gold", "math", "text"),
    [
        ("72", ("72", "$72$"), None),
        ("$18", ("$18", "$$18$"), None),
        (r"2\pi", (r"$2\pi$", r"2\pi"), None),
        ("1, 2, 3", ("$1, 2, 3$", "1, 2, 3"), None),
        (r"so \boxed{5}", (r"so \boxed{5}", r"$so \boxed{5}$"), None),
        ("3+4=7\n#### 7", ("7", "$7$"), None),
        ("The final answer is 42", ("The final answer is 42",), None),
        ("1e+22", (r"$1 \times 10^{22}$",), None),
        ("Paris", (), "paris"),
        (r"\text{Yes}", (r"$\text{Yes}$",), "yes"),
        ("does not exist.", (), "does not exist"),
        ("x", ("$x$", "x"), None),
        ("pi", ("$pi$", "pi"), None),
    ],
)
def test_how_a_gold_answer_is_read(gold, math, text):
    assert answers.read_gold(gold) == answers.GoldForms(math=math, text=text)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{a} then \boxed{b_{1}}", "b_{1}"),
        (r"\boxed{a", None),
        ("The answer is: Paris\nreally", "Paris"),
        ("no mark", None),
    ],
)
def test_final_answer(text, answer):
    assert answers.final_answer(text) == answer


@pytest.mark.parametrize("text", [r"\text{Yes}", " YES. ", "**yes**", "$Yes$", "ｙｅｓ"])
def test_words_are_compared_without_dress(text):
    assert answers.normalise_text(text) == "yes"


def test_a_short_text_is_its_own_window():
    assert answers.window("a" * answers.WINDOW) == "a" * answers.WINDOW


@pytest.mark.parametrize("position", [0, 5_000, 500_000, 999_000])
def test_the_window_holds_the_box_wherever_it_stands(position):
    text = "x" * position + r"\boxed{7}" + "y" * (1_000_000 - position)
    assert r"\boxed{7}" in answers.window(text)
    assert len(answers.window(text)) <= answers.WINDOW


def test_the_window_of_a_long_text_without_a_box_is_its_end():
    assert answers.window("a" * 100_000 + "the answer is $3$").endswith("the answer is $3$")


@pytest.mark.parametrize(("text", "expected"), [("{a}{b}", True), ("{", False), ("}{", False), (r"\{", True)])
def test_balance_of_braces(text, expected):
    assert answers.is_balanced(text) is expected


@pytest.mark.parametrize("gold", [r"\frac{1}{", "x^2^3", r"\pix", "xy", "", "(", r"\sqrt{}", "a" * 61])
def test_nothing_doubtful_surely_parses(gold):
    assert not answers.surely_parses(gold)


def test_what_surely_parses_does_parse():
    pytest.importorskip("math_verify")
    from rloo_cli.rewards.math_judge import ask_judge

    random_ = random.Random(0)
    plain = {gold for gold in (_expression(random_, 3) for _ in range(80)) if answers.surely_parses(gold)}
    assert len(plain) > 30
    assert [gold for gold in plain if not ask_judge(gold=answers.read_gold(gold).math)["parsed"]] == []


def _expression(random_, depth):
    leaf = random_.choice([str(random_.randint(0, 999)), random_.choice("xyn"), r"\pi", "2.5"])
    if depth == 0:
        return leaf
    a, b = _expression(random_, depth - 1), _expression(random_, depth - 1)
    return random_.choice(
        [leaf, rf"\frac{{{a}}}{{{b}}}", rf"\dfrac{{{a}}}{{{b}}}", rf"\sqrt{{{a}}}", f"{leaf}^{{{a}}}", f"({a})^2", f"{a} + {b}", f"{a}-{b}"]
    )
