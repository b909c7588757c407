"""Reward for completions whose final answer equals the row's gold answer, as mathematics or as words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from rloo_cli.rewards.answers import GoldForms, final_answer, is_balanced, normalise_text, read_gold, surely_parses, window
from rloo_cli.rewards.inputs import check_gold, completion_text, gold_string, gold_values
from rloo_cli.rewards.math_judge import ask_judge, require_math_verify

require_math_verify("accuracy_reward")

NO_ANSWER = "[no answer]"
TOO_SLOW = "[too slow]"
LONGEST_SHOWN = 200


def accuracy_reward(
    completions: list[Any],
    column: str | None = None,
    log_metric: Callable[[str, float], None] | None = None,
    log_extra: Callable[[str, list[Any]], None] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """1.0 for each completion whose final answer equals its row's gold answer, else 0.0; None where the gold cannot be read.

    The gold answer is `column`, or else the first of `solution`, `answer`, `ground_truth` that the row fills. Mathematics is
    parsed and compared by math-verify: the completion's answer has to be LaTeX, in \\boxed{…} or after "answer". Gold
    answers in words compare, without case and spacing, with what is boxed or follows "answer is".

    An answer that takes more than CPU_SECONDS or MEMORY_MB to compare is not right: 0.0, counted as `accuracy/too_slow`.
    `gold_parsed` and `answer_parsed` go to the rollouts.

    >>> accuracy_reward([r"It is \\boxed{\\frac{1}{3}}", r"\\boxed{1}"], solution=[r"\\frac{1}{3}", r"\\frac{1}{3}"])
    [1.0, 0.0]
    """
    golds = gold_values(kwargs, column)
    return score_answers([completion_text(completion) for completion in completions], golds, log_metric, log_extra)


def score_answers(
    texts: Sequence[str | None],
    golds: Sequence[Any],
    log_metric: Callable[[str, float], None] | None = None,
    log_extra: Callable[[str, list[Any]], None] | None = None,
) -> list[float | None]:
    """1.0, 0.0 or None a text, as accuracy_reward says; a text of None holds no answer: 0.0, whatever the gold is."""
    verdicts = [_verdict(text, gold, log_extra is not None) for text, gold in zip(texts, golds, strict=True)]
    if log_extra is not None:
        log_extra("gold_parsed", [_printable(shown_gold(gold)) for gold in golds])
        log_extra("answer_parsed", [_printable(shown) for _, shown in verdicts])
    if log_metric is not None:
        log_metric("accuracy/too_slow", sum(shown == TOO_SLOW for _, shown in verdicts) / max(1, len(verdicts)))
    return [score for score, _ in verdicts]


def _verdict(text: str | None, gold: Any, show: bool) -> tuple[float | None, str]:
    """The score, and what was read in the text."""
    if text is None:
        return 0.0, NO_ANSWER
    forms = _usable_forms(gold)
    if forms is None:
        return None, "[skipped]"
    if forms.text is not None:
        answer = final_answer(text)
        shown = NO_ANSWER if answer is None else normalise_text(answer)
        if shown == forms.text or not forms.math:
            return float(shown == forms.text), shown
    return _compared(forms.math, window(text), show)


@lru_cache(maxsize=1024)
def _compared(gold: tuple[str, ...], answer: str, show: bool) -> tuple[float, str]:
    """The score of a mathematical answer; remembered, since several rewards ask for the same and a slow one costs seconds."""
    verdict = ask_judge(gold=gold, answer=answer, show=show)
    if verdict is None:
        return 0.0, TOO_SLOW
    return verdict["score"], verdict["shown"] or "[unparseable]"


def shown_gold(gold: Any) -> str:
    """A gold answer as it was read."""
    forms = _usable_forms(gold)
    if forms is None:
        return "[unparseable]"
    return forms.text if forms.text is not None else _parsed_gold(forms.math)[1]


def _usable_forms(gold: Any) -> GoldForms | None:
    text = gold_string(gold)
    return None if text is None else _usable_forms_of(text)


@lru_cache(maxsize=65536)
def _usable_forms_of(gold: str) -> GoldForms | None:
    """How the gold is read, or None where it is neither mathematics nor words."""
    forms = read_gold(gold)
    if forms.text is not None or surely_parses(gold):
        return forms
    parsed, shown = _parsed_gold(forms.math)
    if parsed:
        return forms
    # Notation beyond the parser (\mathbb{Z}/2\mathbb{Z}) still compares as a string; half a formula compares with nothing.
    return GoldForms(math=(), text=normalise_text(gold)) if shown and is_balanced(gold) else None


@lru_cache(maxsize=4096)
def _parsed_gold(forms: tuple[str, ...]) -> tuple[bool, str]:
    reply = ask_judge(gold=forms)
    return (False, "") if reply is None else (reply["parsed"], reply["shown"])


def _printable(text: str) -> str:
    """The text as files can hold it: short, lone surrogates replaced."""
    return text[:LONGEST_SHOWN].encode("utf-8", "replace").decode()


def check_rows(columns: Mapping[str, Sequence[Any]], column: str | None = None, **kwargs: Any) -> list[str]:
    """Notices about gold answers that cannot be read. Raises ValueError where they are more than 1 %, or the column is missing."""
    values = gold_values(columns, column)
    unusable = {row: f"{value!r:.60}" for row, value in enumerate(values) if _usable_forms(value) is None}
    return check_gold(values, unusable, what="gold answers")


accuracy_reward.check_rows = check_rows  # type: ignore[attr-defined]
