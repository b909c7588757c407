import pytest

pytest.importorskip("math_verify")

from rloo_cli.rewards import accuracy_reward, math_judge
from rloo_cli.rewards.accuracy import check_rows

ORDINARY = [
    (r"\frac{1}{3}", r"My answer is \boxed{\frac{1}{3}}", 1.0),
    (r"\frac{1}{3}", r"My answer is \boxed{\frac{1}{2}}", 0.0),
    ("72", r"so \boxed{72}", 1.0),
    ("72", "The answer is $72$", 1.0),
    ("72", "no answer at all", 0.0),
    ("1,234", r"\boxed{1234}", 1.0),
    ("0.5", r"\boxed{\frac{1}{2}}", 1.0),
    ("$x^2+2x+1$", r"\boxed{(x+1)^2}", 1.0),
    (r"$\{1,2,3\}$", r"\boxed{3,2,1}", 1.0),
    (r"$x=3$", r"\boxed{3}", 1.0),
    ("3+4=7\n#### 7", r"\boxed{7}", 1.0),
    (r"\boxed{5}", r"\boxed{5}", 1.0),
    (r"\boxed{5}", r"\boxed{5", 0.0),
    ("10", r"\boxed{10\text{ cm}}", 1.0),
    ("4", r"first \boxed{4}, " + "no wait, that is wrong, I have to think again. " * 4 + r"\boxed{5}", 0.0),
]

# Where math-verify on its own takes a part of the gold answer for the whole, or cannot read it.
BETTER_READ = [
    (r"2\pi", r"\boxed{2\pi}", 1.0),
    (r"2\pi", r"\boxed{2}", 0.0),
    ("1, 2, 3", r"\boxed{1, 2, 3}", 1.0),
    ("1, 2, 3", r"\boxed{3}", 0.0),
    (r"\dfrac{1}{2}", r"\boxed{0.5}", 1.0),
    (r"(-\infty, 3]", r"\boxed{(-\infty, 3]}", 1.0),
    (r"\infty", r"\boxed{\infty}", 1.0),
    ("1e+22", r"\boxed{10^{22}}", 1.0),
    (7, r"\boxed{7}", 1.0),
    (0.25, r"\boxed{\frac{1}{4}}", 1.0),
]

WORDS = [
    ("Yes", r"\boxed{\text{yes}}", 1.0),
    ("Yes", r"\boxed{Yes}", 1.0),
    ("Yes", r"\boxed{No}", 0.0),
    ("Paris", "The answer is Paris.", 1.0),
    ("Paris", "Paris", 0.0),
    ("Paris", r"\boxed{sirap}", 0.0),
    ("xy", r"\boxed{yx}", 1.0),
    (r"\mathbb{Z}/2\mathbb{Z}", r"\boxed{\mathbb{Z}/2\mathbb{Z}}", 1.0),
    (r"\mathbb{Z}/2\mathbb{Z}", r"\boxed{\mathbb{Z}/3\mathbb{Z}}", 0.0),
]


@pytest.mark.parametrize(("gold", "completion", "score"), ORDINARY + BETTER_READ + WORDS)
def test_score(gold, completion, score):
    assert accuracy_reward([completion], answer=[gold]) == [score]


@pytest.mark.parametrize(("gold", "completion", "score"), ORDINARY)
def test_agrees_with_trl(gold, completion, score):
    trl = pytest.importorskip("trl.rewards")
    assert trl.accuracy_reward([[{"role": "assistant", "content": completion}]], [gold]) == [score]


@pytest.mark.parametrize("gold", [None, "", "  ", r"\frac{1}{", ["1"], float("nan")])
def test_a_gold_that_cannot_be_read_scores_nothing_even_against_itself(gold):
    assert accuracy_reward([rf"\boxed{{{gold}}}", "", str(gold)], answer=[gold] * 3) == [None] * 3


def test_messages_and_strings_score_alike():
    messages = [
        [{"role": "assistant", "content": r"\boxed{1}"}],
        [{"role": "assistant", "content": [{"type": "text", "text": r"\boxed{1}"}]}],
    ]
    assert accuracy_reward([*messages, r"\boxed{1}"], answer=["1"] * 3) == [1.0] * 3


@pytest.mark.parametrize(
    ("columns", "score"),
    [
        ({"solution": ["1"], "answer": ["2"]}, 1.0),
        ({"answer": ["1"], "ground_truth": ["2"]}, 1.0),
        ({"ground_truth": ["1"]}, 1.0),
        ({"solution": [None], "answer": ["1"]}, 1.0),
        ({"solution": ["2"], "gold": ["1"], "column": "gold"}, 1.0),
    ],
)
def test_where_the_gold_answer_is_looked_for(columns, score):
    assert accuracy_reward([r"\boxed{1}"], **columns) == [score]


def test_no_gold_column_is_told_with_the_columns_that_there_are():
    with pytest.raises(ValueError, match=r"no column solution, answer or ground_truth .*columns: label, prompts"):
        accuracy_reward(["1"], prompts=["p"], label=["1"])


def test_what_was_read_goes_to_the_rollouts():
    extras, metrics = {}, {}
    golds = [r"\frac12", "Yes", None]
    accuracy_reward([r"\boxed{0.5}", "?", "?"], answer=golds, log_extra=extras.__setitem__, log_metric=metrics.__setitem__)
    assert extras == {"gold_parsed": ["1/2", "yes", "[unparseable]"], "answer_parsed": ["0.500000000000000", "[unparseable]", "[skipped]"]}
    assert metrics == {"accuracy/too_slow": 0.0}


def test_an_answer_that_takes_too_long_is_not_right_and_the_next_is_scored(monkeypatch):
    monkeypatch.setattr(math_judge, "CPU_SECONDS", 0.5)
    math_judge._judge.cache_clear()
    metrics = {}
    scores = accuracy_reward([r"\boxed{9^{9^{9^{9}}}}", r"\boxed{4}"], answer=["4", "4"], log_metric=metrics.__setitem__)
    math_judge._judge.cache_clear()
    assert scores == [0.0, 1.0]
    assert metrics == {"accuracy/too_slow": 0.5}


def test_a_judge_that_dies_is_replaced():
    assert accuracy_reward([r"\boxed{x+1}"], answer=["1+x"]) == [1.0]
    judge = math_judge._judge(math_judge.os.getpid())
    judge._process.kill()
    assert accuracy_reward([r"\boxed{z+1}", r"\boxed{z+2}"], answer=["1+z"] * 2) == [1.0, 0.0]


def test_a_judge_that_cannot_run_is_an_error_and_no_score(monkeypatch):
    monkeypatch.setattr(math_judge.sys, "executable", "/bin/false")
    math_judge._judge.cache_clear()
    with pytest.raises(RuntimeError, match="compares mathematics ended"):
        accuracy_reward([r"\boxed{y+1}"], answer=["1+y"])
    math_judge._judge.cache_clear()


def test_check_rows_is_content_with_readable_answers():
    assert check_rows({"answer": ["1", r"\frac12", "Yes", "(1, 2)"]}) == []


def test_check_rows_shows_a_few_unreadable_answers():
    [notice] = check_rows({"answer": ["1"] * 400 + [None, r"\frac{1}{", "", "2"]})
    assert notice.startswith("3 of 404 gold answers cannot be used (row 400: None; row 401: ")
    assert notice.endswith("stay unscored")


def test_check_rows_refuses_a_data_set_with_many_unreadable_answers():
    with pytest.raises(ValueError, match=r"2 of 100 gold answers cannot be used .*more than 1 %"):
        accuracy_reward.check_rows({"gold": ["1"] * 98 + ["", None]}, column="gold")


def test_check_rows_wants_the_column():
    with pytest.raises(ValueError, match="no column 'gold'"):
        check_rows({"answer": ["1"]}, column="gold")
