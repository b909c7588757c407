"""`rloo plan --no-model` on recipes that nobody should write: an exit code of 0, 2 or 3 and readable lines, in bounded time and memory."""

import pytest
from hostile_recipes import Outcome, case, outcomes


def broken(found: list[Outcome]) -> list[str]:
    return [f"case {outcome.number} ({outcome.kind}): {outcome.fault}\n{outcome.answer}" for outcome in found if outcome.fault]


def test_four_hundred_hostile_recipes_get_an_answer():
    found = list(outcomes(range(7, 20_000, 50)))
    assert len(found) == 400
    assert not broken(found)
    assert {outcome.code for outcome in found} == {0, 2}


@pytest.mark.slow
def test_twenty_thousand_hostile_recipes_get_an_answer():
    found = list(outcomes(range(20_000)))
    assert len(found) == 20_000
    assert not broken(found)


def test_a_megabyte_recipe_gets_an_answer():
    megabytes = [number for number in range(0, 20_000, 20) if case(number).kind == "megabyte"]
    assert len(megabytes) > 20
    assert not broken(list(outcomes(megabytes[:10])))


def test_a_case_is_the_same_each_time():
    assert case(123) == case(123)
    assert case(123) != case(124)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("while True: pass", "-27"),
        ("raise ValueError('x')", "exit code 1"),
        ("bytearray(1 << 30)", "exit code 1"),
        ("print('\\x1b[2J')", "control characters"),
    ],
)
def test_a_program_that_breaks_the_promise_is_found(body, told, monkeypatch):
    import hostile_recipes

    import rloo_cli.plan.prepare

    def breaks(*args, **kwargs):
        exec(body)
        return real(*args, **kwargs)

    real = rloo_cli.plan.prepare.check_recipe
    monkeypatch.setattr(rloo_cli.plan.prepare, "check_recipe", breaks)
    monkeypatch.setattr(hostile_recipes, "CPU_SECONDS", 0.5)
    (found,) = outcomes([7])
    assert told in found.fault
