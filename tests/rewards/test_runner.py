from __future__ import annotations

import datetime
import decimal
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from running import STATE, child_processes, group, rewards, runner, wait_until

from rloo_cli.errors import DataError, RecipeError, RewardError
from rloo_cli.recipe.schema import RewardEntry
from rloo_cli.rewards.runner import RewardRunner
from rloo_cli.run.metrics import find_metric
from rloo_cli.types import TrainerState

# --- values and arguments


def test_values_come_back_by_function_and_key(tmp_path):
    source = """
    def first(completions, answer): return [float(c == a) for c, a in zip(completions, answer)]
    async def second(completions, **kwargs): return [None if c == "b" else len(c) for c in completions]
    """
    with runner(tmp_path, source, "first", "second", workers=2) as started:
        assert started.names == ("first", "second")
        one, two = rewards(started, group(7, ["a", "b"], answer="a"), group(9, ["ccc", "b"], answer="b"))
        assert one.values == ((1.0, 0.0), (1.0, None))
        assert two.values == ((0.0, 1.0), (3.0, None))
        assert one.failures == ()
        assert 0 < one.seconds < 5
        assert started.collect() == {}
        started.submit(12, group(1, ["a"], answer="a"), STATE)
        assert list(started.collect()) == [12]


def test_everything_is_offered_and_no_more_than_is_asked_for(tmp_path):
    source = """
    def everything(**kwargs):
        kwargs["log_extra"]("names", [",".join(sorted(kwargs))] * 2)
        kwargs["log_extra"]("shown", [repr((kwargs["prompts"], kwargs["completion_ids"], kwargs["level"], kwargs["scale"]))] * 2)
        state = kwargs["trainer_state"]
        return [float(state.step), state.max_steps + state.global_step / 10]
    def little(completion_ids, scale=1): return [scale * sum(ids) for ids in completion_ids]
    """
    with runner(tmp_path, source, "everything", "little", kwargs={"scale": 2}) as started:
        (one,) = rewards(started, group(0, ["x", "y"], ids=[(1, 2), (3,)], level={"n": [1]}))
    assert one.extras["names"][0] == "completion_ids,completions,level,log_extra,log_metric,prompts,scale,trainer_state"
    assert one.extras["shown"][0] == repr((["What?", "What?"], [[1, 2], [3]], [{"n": [1]}, {"n": [1]}], 2))
    assert one.values == ((3.0, 10.2), (6.0, 6.0))


def test_message_prompts_get_message_completions(tmp_path):
    source = """
    def score(prompts, completions):
        assert prompts[0] == [{"role": "user", "content": "hi"}], prompts
        return [float(c == [{"role": "assistant", "content": "yo"}]) for c in completions]
    """
    with runner(tmp_path, source) as started:
        (one,) = rewards(started, group(0, ["yo", "no"], content=({"role": "user", "content": "hi"},)))
    assert one.values == ((1.0, 0.0),)


def test_a_function_may_change_its_arguments(tmp_path):
    source = """
    def spoil(prompts, completions, tags, **kwargs):
        for c, t in zip(completions, tags):
            c[0]["content"] = "spoilt"
            t.append("spoilt")
        prompts.clear()
        return [0.0] * len(tags)
    def after(completions, tags, **kwargs): return [float(c[0]["content"] == "yo" and t == ["x"]) for c, t in zip(completions, tags)]
    """
    with runner(tmp_path, source, "spoil", "after") as started:
        (one,) = rewards(started, group(0, ["yo", "yo"], content=[{"role": "user", "content": "hi"}], tags=["x"]))
    assert one.values[1] == (1.0, 1.0)


def test_hostile_text_arrives_as_it_is(tmp_path):
    texts = ["\ud800 lone", "nul \0 in it", "é🙂\u2028\u0085", '"}]\\', ""]
    source = f"""
    def score(completions, column):
        print(completions)
        return [float(c == e and column[0] == e0) for c, e, e0 in zip(completions, {texts!r}, [{texts[0]!r}] * 5)]
    """
    with runner(tmp_path, source, log_dir=tmp_path) as started:
        (one,) = rewards(started, group(0, texts, column=texts[0]))
    assert one.values == ((1.0,) * 5,)


def test_columns_keep_the_types_of_data_sets(tmp_path):
    values = {
        "raw": b"\0\xff",
        "when": datetime.datetime(2024, 5, 1, 12, tzinfo=datetime.UTC),
        "day": datetime.date(2024, 5, 1),
        "clock": datetime.time(1, 2),
        "money": decimal.Decimal("1.10"),
        "nothing": None,
        "nested": {"a": [1, 2.5, float("inf")]},
    }
    source = f"""
    import datetime
    from decimal import Decimal
    inf = float("inf")
    def score(completions, **columns): return [float(all(columns[k][0] == v and type(columns[k][0]) is type(v) for k, v in {values!r}.items()))]
    """
    with runner(tmp_path, source) as started:
        (one,) = rewards(started, group(0, ["x"], **values))
    assert one.values == ((1.0,),)


def test_a_column_that_cannot_be_sent_is_a_data_error(tmp_path):
    source = "def score(completions, **kwargs): return [1.0]\ndef blind(completions): return [1.0]"
    with (
        runner(tmp_path, source) as started,
        pytest.raises(DataError, match=r"prompt row 4: a column holds a builtins\.object.*run_in: trainer"),
    ):
        rewards(started, group(4, ["x"], thing=object()))
    with runner(tmp_path, source, "blind") as started:
        assert rewards(started, group(4, ["x"], thing=object()))[0].values == ((1.0,),)


def test_metrics_are_means_and_extras_are_columns(tmp_path):
    source = """
    def one(completions, log_metric, log_extra):
        for c in completions: log_metric("length", len(c))
        log_metric("nothing", float("nan"))
        log_extra("shouted", [c.upper() for c in completions])
        return [0.0] * len(completions)
    def two(completions, log_metric, log_extra):
        log_metric("length", 10)
        log_extra("odd", [{1: object} if c == "a" else (1, None) for c in completions])
        return [0.0] * len(completions)
    """
    with runner(tmp_path, source, "one", "two") as started:
        (one,) = rewards(started, group(0, ["a", "bbb"]))
    assert one.metrics == {"length": (1 + 3 + 10) / 3}
    assert one.extras == {"shouted": ["A", "BBB"], "odd": [{"1": "<class 'object'>"}, [1, None]]}


def test_log_extra_of_the_wrong_length_is_a_failure(tmp_path):
    source = "def score(completions, log_extra):\n    log_extra('x', [1])\n    return [0.0] * len(completions)"
    with runner(tmp_path, source, on_error="unscored") as started:
        (one,) = rewards(started, group(0, ["a", "b"]))
    assert one.values == ((None, None),), "not called one by one, where the length would be right"
    assert "LogExtraError: log_extra('x', …): 1 values for 2 completions (mine.py:2)" in one.failures[0]


@pytest.mark.parametrize("values", ["5", "'ab'", "{1: 2, 3: 4}", "(x for x in completions)"])
def test_log_extra_takes_lists_alone(tmp_path, values):
    source = f"def score(completions, log_extra):\n    log_extra('x', {values})\n    return [0.0] * len(completions)"
    with runner(tmp_path, source) as started, pytest.raises(RewardError, match=r"is not a list of 2 values, one a completion"):
        rewards(started, group(0, ["a", "b"]))


@pytest.mark.parametrize("name", ["", "acc\\n", "two words", "a\\x1b[2J", "n\\ud800", "x" * 101])
@pytest.mark.parametrize("run_in", ["worker", "trainer"])
def test_a_metric_has_a_word_for_a_name(tmp_path, name, run_in):
    source = f"def score(completions, log_metric):\n    log_metric('{name}', 1.0)\n    return [0.0] * len(completions)"
    with (
        runner(tmp_path, source, run_in=run_in) as started,
        pytest.raises(RewardError, match=r"^reward `score`: .*LogMetricError: log_metric\('.*: a name is 1 to 100 letters"),
    ):
        rewards(started, group(0, ["a", "b"]))
    with runner(tmp_path, source, run_in=run_in, on_error="unscored") as started:
        (one,) = rewards(started, group(0, ["a", "b"]))
    assert (one.values, one.metrics, len(one.failures)) == (((None, None),), {}, 2)


def test_a_metric_s_name_is_a_key_of_the_table(tmp_path):
    source = "def score(completions, log_metric):\n    log_metric('a-b_c.d/é@4', 1e30)\n    return [0.0] * len(completions)"
    with runner(tmp_path, source) as started:
        one, two = rewards(started, group(0, ["a"]), group(1, ["a"]))
    assert one.metrics == two.metrics == {"a-b_c.d/é@4": 1e30}
    assert all(find_metric(f"custom/{name}") for name in one.metrics)


def test_a_metric_that_is_not_finite_is_left_out_and_told_once(tmp_path, caplog):
    source = """
    def score(completions, log_metric):
        log_metric("m", float("nan")); log_metric("m", 2); log_metric("n", float("inf")); log_metric("huge", 1e308)
        return [0.0] * len(completions)
    """
    with runner(tmp_path, source) as started:
        one, two = rewards(started, group(0, ["a", "b"]), group(1, ["a"]))
    assert one.metrics == two.metrics == {"m": 2.0}
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert told == [
        "reward `score`: step 3, prompt row 0: log_metric('m', nan) is left out: not a finite number. It is not told again for this metric.",
        "reward `score`: step 3, prompt row 0: log_metric('n', inf) is left out: not a finite number. It is not told again for this metric.",
        "reward `score`: step 3, prompt row 0: log_metric('huge', 1e+308) is left out: beyond 1e+30. It is not told again for this metric.",
    ]


# --- who is called, when and where


def test_coroutine_functions_of_a_group_overlap(tmp_path):
    source = "import asyncio\n" + "\n".join(
        f"async def f{i}(completions):\n    await asyncio.sleep(0.4)\n    return [{i}.0] * len(completions)" for i in range(4)
    )
    with runner(tmp_path, source, "f0", "f1", "f2", "f3") as started:
        begun = time.monotonic()
        (one,) = rewards(started, group(0, ["a"]))
        assert time.monotonic() - begun < 1.2
    assert one.values == ((0.0,), (1.0,), (2.0,), (3.0,))


def test_groups_spread_over_the_workers_as_soon_as_they_are_submitted(tmp_path):
    source = "import os, time\ndef score(completions):\n    time.sleep(0.4)\n    return [os.getpid()]"
    with runner(tmp_path, source, workers=3) as started:
        for key in range(3):
            started.submit(key, group(key, ["a"]), STATE)
        time.sleep(0.5)
        begun = time.monotonic()
        collected = started.collect()
        assert time.monotonic() - begun < 0.3
    assert len({one.values for one in collected.values()}) == 3


def test_a_batch_call_gets_everything_at_once(tmp_path):
    source = """
    def batch(completions, answer, log_extra):
        log_extra("position", list(range(len(completions))))
        return [float(len(completions)) if c == a else None for c, a in zip(completions, answer)]
    def each(completions): return [float(len(completions))] * len(completions)
    """
    entries = [RewardEntry(function="mine.batch", call="batch"), RewardEntry(function="mine.each")]
    with runner(tmp_path, source, *entries, workers=2) as started:
        one, two = rewards(started, group(0, ["a", "b"], answer="a"), group(1, ["c", "d", "e"], answer="e"))
    assert one.values == ((5.0, None), (2.0, 2.0))
    assert two.values == ((None, None, 5.0), (3.0, 3.0, 3.0))
    assert (one.extras["position"], two.extras["position"]) == ([0, 1], [2, 3, 4])


@pytest.mark.parametrize("call", ["group", "batch"])
def test_a_function_may_run_in_the_trainer(tmp_path, monkeypatch, call):
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("mine", None)
    source = """
    import os
    calls = []
    def score(completions, thing, **kwargs):
        calls.append(len(completions))
        if len(completions) > 1 and "bad" in completions: raise ValueError("boom")
        return [float(os.getpid() if c == "a" else thing[0].value) if c != "worse" else float("nan") for c in completions]
    """

    class Thing:
        value = 5.0

    with runner(tmp_path, source, run_in="trainer", call=call, on_error="unscored") as started:
        one, two = rewards(started, group(0, ["a", "b"], thing=Thing()), group(1, ["bad", "worse"], thing=Thing()), check_stop=lambda: None)
        assert one.values == ((float(os.getpid()), 5.0),)
        assert two.values == ((5.0, None),)
        assert two.failures == ("score: prompt row 1, completion 1: returned nan, not a finite float or None",)
        assert sys.modules["mine"].calls == ([2, 2, 1, 1] if call == "group" else [4, 1, 1, 1, 1])
        assert not child_processes()
    sys.modules.pop("mine")


def test_the_trainer_keeps_its_interrupt_while_it_calls(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("mine", None)
    with runner(tmp_path, "def score(completions): raise KeyboardInterrupt", run_in="trainer") as started, pytest.raises(KeyboardInterrupt):
        rewards(started, group(0, ["a"]))
    sys.modules.pop("mine")


def test_rewards_do_not_depend_on_the_number_of_workers(tmp_path):
    source = """
    import random, numpy, time
    def score(completions, **kwargs):
        time.sleep(random.random() / 50)
        return [random.random() + float(numpy.random.rand()) + len(",".join({"a", "b", "c", c})) for c in completions]
    def order(completions): return [float("abc".index(next(iter({"a", "b", "c"})))) for c in completions]
    """
    groups = [group(row, ["x", "yy"]) for row in range(8)]
    seen = []
    for workers in (1, 4, 4):
        with runner(tmp_path, source, "score", "order", workers=workers) as started:
            seen.append([one.values for one in rewards(started, *groups)])
            again = [one.values for one in rewards(started, *groups, state=TrainerState(step=4, max_steps=10))]
    assert seen[0] == seen[1] == seen[2]
    assert len({values[0] for values in seen[0]}) == 8, "every group has its own numbers"
    assert again != seen[0], "and every step"


def test_workers_are_light_and_have_one_thread(tmp_path):
    source = """
    import sys, os
    def score(completions): return [float("torch" in sys.modules or "pydantic" in sys.modules), float(os.environ["OMP_NUM_THREADS"])]
    """
    with runner(tmp_path, source) as started:
        assert rewards(started, group(0, ["a", "b"]))[0].values == ((0.0, 1.0),)


def test_secrets_stay_with_the_trainer(tmp_path, monkeypatch):
    for name in (
        "HF_TOKEN",
        "OPENAI_API_KEY",
        "MY_SECRET",
        "AWS_ACCESS_KEY_ID",
        "PGPASSWORD",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "JUDGE_API_KEY",
        "HARMLESS",
    ):
        monkeypatch.setenv(name, "value")
    source = """
    import os
    at_import = sorted(os.environ)
    def score(completions, log_extra):
        log_extra("names", [sorted({*os.environ, *at_import})])
        return [0.0]
    """
    with runner(tmp_path, source, env=["JUDGE_API_KEY", "NOT_SET"]) as started:
        names = rewards(started, group(0, ["a"]))[0].extras["names"][0]
    assert {"JUDGE_API_KEY", "HARMLESS", "PATH"} <= set(names)
    assert not {"HF_TOKEN", "OPENAI_API_KEY", "MY_SECRET", "AWS_ACCESS_KEY_ID", "PGPASSWORD", "GOOGLE_APPLICATION_CREDENTIALS"} & set(names)


# --- the beginning: imports


@pytest.mark.parametrize(
    ("source", "fragments"),
    [
        (
            "import nothing_like_this\ndef score(completions): ...",
            ["importing `mine` for the reward `score` failed", "ModuleNotFoundError", "nothing_like_this", "(mine.py:1)"],
        ),
        ("1 / 0\ndef score(completions): ...", ["ZeroDivisionError: division by zero (mine.py:1)"]),
        ("def make(): return 3\nscore = make()", ["mine.score is 3, not a function"]),
        ("def make(): return int\nscore = make()", ["not a function"]),
        ("from os import nothing as score", ["ImportError", "nothing"]),
        ("import sys; sys.exit(3)\ndef score(completions): ...", ["SystemExit: 3"]),
        ("import os; os._exit(3)\ndef score(completions): ...", ["importing `mine` ended its process: exit code 3"]),
        ("import os; os.kill(os.getpid(), 11)\ndef score(completions): ...", ["ended its process: signal 11 (SIGSEGV)"]),
        ("while True: pass\ndef score(completions): ...", ["importing `mine` took longer than 1 s"]),
        ("import time; time.sleep(60)\ndef score(completions): ...", ["importing `mine` took longer than 1 s"]),
        ("x = bytearray(2**40)\ndef score(completions): ...", ["MemoryError"]),
        ("def decorate(f): return lambda completions: []\n@decorate\ndef score(): ...", None),
        ("def decorate(f):\n    def g(x, /): ...\n    return g\n@decorate\ndef score(): ...", ["`x` is positional-only"]),
    ],
)
def test_an_import_that_fails_is_a_recipe_error(tmp_path, source, fragments):
    begun = time.monotonic()
    if fragments is None:
        with runner(tmp_path, source):
            return
    with pytest.raises(RecipeError) as caught, runner(tmp_path, source, load_timeout=1.0 if "1 s" in fragments[0] else 50.0):
        pass
    assert time.monotonic() - begun < 8
    for fragment in fragments:
        assert fragment in caught.value.message
    assert "\n" not in caught.value.message
    assert not child_processes()


def test_kwargs_are_checked_against_the_real_signature(tmp_path):
    source = "def decorate(f): return lambda completions: [1.0]\n@decorate\ndef score(**kwargs): ..."
    with pytest.raises(RecipeError, match="takes no `scale`"), runner(tmp_path, source, kwargs={"scale": 1}):
        pass
    with runner(tmp_path, source) as started:
        assert started.sources[0].parameters == ("completions",)
        assert started.sources[0].is_signature_known


def test_two_rewards_of_one_name_are_refused(tmp_path):
    (tmp_path / "mine.py").write_text("def score(completions): return [1.0]")
    entries = [RewardEntry(function="mine.score"), RewardEntry(function="mine.score")]
    with pytest.raises(RecipeError, match="two rewards are named `score`"):
        RewardRunner(entries, code_dir=tmp_path, num_workers=1, log_dir=None)
    entries[1] = RewardEntry(function="mine.score", name="other")
    assert RewardRunner(entries, code_dir=tmp_path, num_workers=1, log_dir=None).names == ("score", "other")


def test_the_working_directory_is_not_imported_from(tmp_path, monkeypatch):
    here, recipes = tmp_path / "here", tmp_path / "recipes"
    here.mkdir()
    recipes.mkdir()
    (here / "outside_module.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')")
    (here / "json.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')")
    monkeypatch.chdir(here)
    with pytest.raises(RecipeError, match="outside_module"), runner(recipes, "import outside_module\ndef score(completions): ..."):
        pass
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("run_in", ["worker", "trainer"])
def test_nothing_beside_a_recipe_of_built_in_rewards_is_imported(tmp_path, run_in):
    (tmp_path / "string.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')\nraise ValueError")
    (tmp_path / "json.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')\nraise ValueError")
    entry = RewardEntry(function="exact_match_reward", run_in=run_in)
    with RewardRunner([entry], code_dir=tmp_path, num_workers=1, log_dir=None) as started:
        started.start()
        assert rewards(started, group(0, ["a"], answer="a"))[0].values == ((1.0,),)
    assert not (tmp_path / "canary").exists()
    assert str(tmp_path) not in sys.path


def test_a_module_that_starts_threads_is_imported_by_each_worker(tmp_path):
    source = """
    import os, threading, time
    importer = os.getpid()
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    def score(completions, **kwargs):
        if completions == ["die"]: os._exit(1)
        return [float(importer == os.getpid() and threading.active_count() == 2)]
    """
    with runner(tmp_path, source, workers=2, on_error="unscored") as started:
        values = [one.values[0][0] for one in rewards(started, group(0, ["a"]), group(1, ["die"]), group(2, ["b"]))]
    assert values == [1.0, None, 1.0]


def test_slow_imports_happen_once(tmp_path):
    source = "import os, time\ntime.sleep(1)\ndef score(completions):\n    if completions[0] == 'die': os._exit(1)\n    return [1.0]"
    with runner(tmp_path, source, workers=2, on_error="unscored") as started:
        begun = time.monotonic()
        rewards(started, *[group(row, ["die"]) for row in range(4)])
        assert time.monotonic() - begun < 2, "eight workers died and were replaced"


# --- check_rows


def test_check_rows_notices_and_refuses(tmp_path):
    source = """
    import warnings
    def score(completions, answer, scale=1): return [1.0]
    def check(columns, scale):
        if None in columns["answer"]: raise ValueError(f"row {columns['answer'].index(None)} has no answer")
        warnings.warn("take care")
        return [f"{scale} of {len(columns['answer'])}"]
    score.check_rows = check
    def plain(completions): return [1.0]
    """
    with runner(tmp_path, source, "plain", RewardEntry(function="mine.score", kwargs={"scale": 3})) as started:
        assert started.check_rows({"answer": ["x", "y"]}) == ("reward `score`: 3 of 2", "reward `score`: take care")
        with pytest.raises(DataError, match="reward `score`: row 1 has no answer"):
            started.check_rows({"answer": ["x", None]})
        with pytest.raises(RecipeError, match=r"needs `answer`, which is no column of the data set \(columns: solution\)"):
            started.check_rows({"solution": ["x"]})
        assert rewards(started, group(0, ["a"], answer="x"))[0].values == ((1.0,), (1.0,))


@pytest.mark.parametrize(
    ("body", "fragment"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("__import__('time').sleep(60)", "no answer within 1 s"),
        ("__import__('os')._exit(2)", "its worker died: exit code 2"),
    ],
)
def test_check_rows_may_fail(tmp_path, body, fragment):
    source = f"def score(completions): return [1.0]\ndef check(columns): {body}\nscore.check_rows = check"
    with runner(tmp_path, source, timeout=0.5) as started:
        with pytest.raises(RewardError, match=rf"reward `score`: its check_rows failed: {fragment}"):
            started.check_rows({"answer": ["x", "y"]})
        assert rewards(started, group(0, ["a"]))[0].values == ((1.0,),)


def test_check_rows_in_the_trainer(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("mine", None)
    source = "class C:\n    def __call__(self, completions): return [1.0]\n    def check_rows(self, columns): return 'seen'\nscore = C()"
    with runner(tmp_path, source, run_in="trainer") as started:
        assert started.check_rows({"answer": [1]}) == ("reward `score`: seen",)
    sys.modules.pop("mine")


# --- stopping, and what is left


def test_a_stop_is_honoured_while_a_reward_hangs(tmp_path):
    class Stop(Exception):
        pass

    source = "import time\ndef score(completions):\n    if completions[0] == 'hang': time.sleep(60)\n    return [1.0]"
    with runner(tmp_path, source, workers=2) as started:
        begun = time.monotonic()

        def check_stop():
            if time.monotonic() - begun > 0.3:
                raise Stop

        started.submit(0, group(0, ["hang"]), STATE)
        with pytest.raises(Stop):
            started.collect(check_stop)
        assert time.monotonic() - begun < 0.8
        started.discard()
        assert rewards(started, group(0, ["a"]), group(1, ["b"]))[1].values == ((1.0,),)


def test_discard_forgets_what_waits_and_what_is_in_flight(tmp_path):
    source = "import time\ndef score(completions):\n    time.sleep(0.2)\n    return [float(len(completions[0]))]"
    with runner(tmp_path, source) as started:
        for key in range(4):
            started.submit(key, group(key, ["old"]), STATE)
        started.discard()
        begun = time.monotonic()
        assert rewards(started, group(0, ["x"]))[0].values == ((1.0,),)
        assert time.monotonic() - begun < 1.0


def test_close_leaves_no_process(tmp_path):
    with runner(tmp_path, "import time\ndef score(completions): time.sleep(60)", workers=2) as started:
        started.submit(0, group(0, ["a"]), STATE)
        family = child_processes(recursive=True)
        assert len(family) == 3
        begun = time.monotonic()
    assert time.monotonic() - begun < 2
    assert not child_processes()
    assert not [process for process in family if process.is_running()]
    started.close()


SCRIPT = """
import sys, time, os, signal
from pathlib import Path
sys.path.insert(0, {tests!r})
from running import *
import psutil
signal.signal(signal.SIGINT, lambda *_: None)
signal.signal(signal.SIGTERM, lambda *_: None)
with runner(Path({folder!r}), open({folder!r} + "/source.py").read(), workers=2) as started:
    started.submit(0, group(0, ["a"]), STATE)
    print(*[process.pid for process in psutil.Process().children(recursive=True)], flush=True)
    print(started.collect()[0].values, flush=True)
"""


def script(tmp_path, source):
    (tmp_path / "source.py").write_text(source)
    text = SCRIPT.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True, start_new_session=True)
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 3
    return process, pids


def test_workers_die_with_a_killed_trainer(tmp_path):
    process, pids = script(tmp_path, "def score(completions):\n    while True: pass")
    process.kill()
    process.wait()
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    process.stdout.close()


def test_signals_to_everybody_are_the_trainers_to_answer(tmp_path):
    process, pids = script(tmp_path, "import time\ndef score(completions):\n    time.sleep(1)\n    return [5.0]")
    os.killpg(process.pid, 2)
    for pid in pids:
        os.kill(pid, 2)
        os.kill(pid, 15)
        os.kill(pid, 10)
    assert process.stdout.read() == "((5.0,),)\n"
    assert process.wait(10) == 0
    process.stdout.close()


# --- cost


def test_the_trainer_pays_little_for_a_group(tmp_path):
    source = "def score(completions, answer, **kwargs): return [float(a in c) for c, a in zip(completions, answer)]"
    groups = [group(row, ["some text of a usual length, more or less " * 4] * 8, ids=[range(48)] * 8, answer="x") for row in range(16)]
    with runner(tmp_path, source, workers=2) as started:
        rewards(started, *groups)
        begun = time.process_time()
        for _ in range(20):
            rewards(started, *groups, check_stop=lambda: None)
        assert (time.process_time() - begun) / 320 < 0.0015, "0.2 ms on a quiet machine"


def test_waiting_costs_no_cpu(tmp_path):
    with runner(tmp_path, "import time\ndef score(completions):\n    time.sleep(1.0)\n    return [1.0]") as started:
        begun = time.process_time()
        rewards(started, group(0, ["a"]), check_stop=lambda: None)
        assert time.process_time() - begun < 0.2


def test_large_batches_do_not_block(tmp_path):
    source = "def score(completions, **kwargs): return [float(len(c)) for c in completions]"
    with runner(tmp_path, source, call="batch", timeout=30.0) as started:
        collected = rewards(started, *[group(row, ["x" * 100_000] * 4) for row in range(32)])
    assert {one.values for one in collected} == {((100_000.0,) * 4,)}


def test_a_heartbeat_tells_what_is_waited_for(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("rloo_cli.rewards.runner.HEARTBEAT_SECONDS", 0.2)
    caplog.set_level(logging.INFO, "rloo_cli")
    with runner(tmp_path, "import time\ndef score(completions):\n    time.sleep(0.5)\n    return [1.0]") as started:
        rewards(started, group(8, ["a"]), check_stop=lambda: None)
    assert "waiting since 0 s for reward `score`, step 3, prompt row 8, and 0 more calls" in caplog.text
