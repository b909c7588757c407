from __future__ import annotations

import re
import sys
import textwrap

import pytest

from rloo_cli.errors import RecipeError
from rloo_cli.rewards.modules import search_path
from rloo_cli.rewards.resolve import check_arguments, find_reward


def write(folder, **modules: str) -> None:
    """Modules by name; `__` stands for a folder: pkg__sub is pkg/sub.py, pkg__init is pkg/__init__.py."""
    for name, source in modules.items():
        parts = name.split("__")
        path = folder.joinpath(*parts[:-1], "__init__.py" if parts[-1] == "init" else f"{parts[-1]}.py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source), encoding="utf-8")


def signature(source):
    return source.parameters, source.required, source.takes_any_keyword


# --- what is found


def test_a_name_without_a_dot_is_a_built_in(tmp_path):
    source = find_reward("exact_match_reward", code_dir=tmp_path)
    assert (source.module, source.name) == ("rloo_cli.rewards", "exact_match_reward")
    assert source.file.endswith("rloo_cli/rewards/exact_match.py")
    assert source.has_check_rows
    assert "completions" in source.required


def test_a_function_below_the_code_folder(tmp_path):
    write(tmp_path, mine="\ndef score(completions, answer, *, scale, power=2, **kwargs): ...")
    source = find_reward("mine.score", code_dir=tmp_path)
    assert (source.file, source.line) == (str(tmp_path / "mine.py"), 2)
    assert signature(source) == (("completions", "answer", "scale", "power"), ("completions", "answer", "scale"), True)
    assert source.is_signature_known
    assert not source.is_async


def test_installed_packages_are_searched_too(tmp_path):
    assert find_reward("yaml.dump", code_dir=tmp_path).file.endswith("yaml/__init__.py")


def test_the_code_folder_comes_first(tmp_path):
    write(tmp_path, colorsys="def score(completions): ...")
    assert find_reward("colorsys.score", code_dir=tmp_path).file == str(tmp_path / "colorsys.py")


def test_folders_without_an_init_file_are_packages(tmp_path):
    write(tmp_path, a__b__c="def score(completions): ...")
    assert find_reward("a.b.c.score", code_dir=tmp_path).file == str(tmp_path / "a/b/c.py")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(completions): ...", (("completions",), ("completions",), False)),
        ("async def f(completions, **kw): ...", (("completions",), ("completions",), True)),
        ("f = lambda completions, x=1: []", (("completions", "x"), ("completions",), False)),
        ("def g(completions): ...\nf = g", (("completions",), ("completions",), False)),
        ("if True:\n    def f(a): ...\nelse:\n    f = None", None),
        ("try:\n    import nothing\nexcept ImportError:\n    def f(a): ...", (("a",), ("a",), False)),
        ("with open('x') as h:\n    def f(a): ...", (("a",), ("a",), False)),
        ("class C:\n    def __call__(self, completions, k=1): ...\nf = C()", (("completions", "k"), ("completions",), False)),
        ("class C:\n    async def __call__(self, completions): ...\nf = C()", (("completions",), ("completions",), False)),
        ("def f(a): ...\ndef f(b): ...", (("b",), ("b",), False)),
        ("def f(a, /, b): ...\nf.check_rows = print", None),
    ],
)
def test_signatures_are_read_from_source(tmp_path, source, expected):
    write(tmp_path, mine=source)
    if expected is None:
        with pytest.raises(RecipeError):
            find_reward("mine.f", code_dir=tmp_path)
    else:
        assert signature(find_reward("mine.f", code_dir=tmp_path)) == expected


@pytest.mark.parametrize(
    "source",
    [
        "@decorator\ndef f(a): ...",
        "f = functools.partial(g, 1)",
        "f, g = make()",
        "f = registry['f']",
        "from math import sqrt as f",
        "from nowhere import f",
    ],
)
def test_what_source_cannot_tell_is_left_open(tmp_path, source):
    write(tmp_path, mine=source)
    found = find_reward("mine.f", code_dir=tmp_path)
    assert not found.is_signature_known
    assert found.takes_any_keyword
    check_arguments(found, columns=[], kwargs={"anything": 1})


@pytest.mark.parametrize(
    "init",
    [
        "from .inner import score",
        "from pkg.inner import score",
        "from . import inner\nfrom .inner import other as score",
        "from .inner import *",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .inner import score\ndef __getattr__(name): ...",
    ],
)
def test_re_exports_are_followed(tmp_path, init):
    write(tmp_path, pkg__init=init, pkg__inner="async def score(completions): ...\nscore.check_rows = print\nother = score")
    source = find_reward("pkg.score", code_dir=tmp_path)
    assert (source.module, source.file) == ("pkg", str(tmp_path / "pkg/inner.py"))
    assert source.is_async
    assert source.has_check_rows


def test_re_exports_in_a_circle_end(tmp_path):
    write(tmp_path, a="from b import f", b="from a import f", c="f = g\ng = f")
    for function in ("a.f", "c.f"):
        assert not find_reward(function, code_dir=tmp_path).is_signature_known


def test_nothing_is_run(tmp_path):
    canary = tmp_path / "canary"
    touch = f"open({str(canary)!r}, 'w').close()\n"
    write(
        tmp_path,
        pkg__init=touch,
        pkg__sub__init=touch,
        pkg__sub__mod=touch + "def score(completions): ...",
        pkg__sub__re=touch + "from pkg.sub.mod import score",
    )
    before = set(sys.modules)
    for function in ("pkg.sub.mod.score", "pkg.sub.re.score"):
        assert find_reward(function, code_dir=tmp_path).file.endswith("mod.py")
    for wrong in ("pkg.sub.mod.scor", "pkg.sub.mud.score", "pkg.sub.mod"):
        with pytest.raises(RecipeError):
            find_reward(wrong, code_dir=tmp_path)
    assert not canary.exists()
    assert not {name for name in set(sys.modules) - before if name.startswith("pkg")}


# --- what is refused


@pytest.mark.parametrize(
    ("function", "fragments"),
    [
        ("acuracy_reward", ["no built-in reward `acuracy_reward`", "Did you mean `accuracy_reward`?", "think_format_reward"]),
        ("mine.scor", ["module `mine` (", "mine.py) has no `scor`", "Did you mean `score`?", "Its public functions: score, other."]),
        ("mine._hidden_one", ["has no `_hidden_one`"]),
        ("mine.LIMIT", ["mine.py:4) is a constant", "score, other"]),
        ("mine.TABLE", ["is a constant"]),
        ("mine.Scorer", ["is a class", "an instance"]),
        ("mine.system", ["is a module"]),
        ("mien.score", ["no module `mien` among the installed packages or below the folder `", "--code-dir", "Did you mean `mine`?"]),
        ("pkg.mine.score", ["package `pkg` has no module `mine`", "Did you mean `min`?"]),
        ("mine.score.deep", ["`mine` is a module, not a package", "score, other"]),
        ("mine", ["no built-in reward `mine`", "`module.function`"]),
        ("pkg.min", ["is a module; name a function in it", "least"]),
        ("not_installed.accuracy_reward", ["Did you mean the built-in `accuracy_reward`?"]),
        ("mine.py", ["looks like a file", "`my_rewards.score`"]),
        ("./mine.score", ["looks like a file"]),
        ("../other/mine.score", ["looks like a file"]),
        ("mine:score", ["looks like a file"]),
        ("my-rewards.score", ["is not a dotted path"]),
        (".score", ["is not a dotted path"]),
        ("mine..score", ["is not a dotted path"]),
        ("", ["is not a dotted path"]),
        ("math.sqrt", ["no Python source"]),
        ("broken.score", ["broken.py:2: "]),
        ("binary.score", ["null bytes"]),
        ("latin.score", ["latin"]),
        ("deep.score", ["deep"]),
        ("positional.score", ["`a` is positional-only"]),
    ],
)
def test_refusals_name_the_fault_and_the_candidates(tmp_path, function, fragments):
    write(
        tmp_path,
        mine="""
            def score(completions): ...
            async def other(completions): ...
            LIMIT = 3
            TABLE = {"a": score}
            class Scorer: ...
            import os as system
            def _hidden(): ...
        """,
        pkg__init="",
        pkg__min="def least(): ...",
        broken="x = 1\ndef score(:\n",
        binary="\0def score(): ...",
        deep="x = " + "(" * 5000 + ")" * 5000,
        positional="def score(a, /): ...",
    )
    (tmp_path / "latin.py").write_bytes(b"x = '\xe4'\ndef score(a): ...")
    with pytest.raises(RecipeError) as caught:
        find_reward(function, code_dir=tmp_path)
    message = caught.value.message
    for fragment in fragments:
        assert fragment in message
    assert "\n" not in message


def test_the_working_directory_is_outside(tmp_path, monkeypatch):
    here, recipes = tmp_path / "here", tmp_path / "recipes"
    recipes.mkdir()
    write(here, outside_rewards="def score(completions): ...")
    monkeypatch.chdir(here)
    monkeypatch.syspath_prepend(str(here))
    with pytest.raises(RecipeError, match=f"add `--code-dir {here}`"):
        find_reward("outside_rewards.score", code_dir=recipes)
    assert find_reward("outside_rewards.score", code_dir=here).line == 1
    monkeypatch.setenv("PYTHONPATH", str(here))
    assert str(here) in search_path(recipes)


def test_our_own_package_cannot_be_shadowed(tmp_path):
    write(tmp_path, rloo_cli__rewards__init="def exact_match_reward(completions): ...")
    assert not find_reward("exact_match_reward", code_dir=tmp_path).file.startswith(str(tmp_path))


# --- arguments against columns


def test_a_required_parameter_must_be_a_column(tmp_path):
    write(tmp_path, mine="def score(completions, answr, scale, log_metric, **kwargs): ...")
    source = find_reward("mine.score", code_dir=tmp_path)
    check_arguments(source, columns=["answr"], kwargs={"scale": 2})
    check_arguments(source, columns=None, kwargs={})
    with pytest.raises(RecipeError, match=r"needs `answr`.*columns: answer, level.*Did you mean `answer`\?"):
        check_arguments(source, columns=["answer", "level"], kwargs={"scale": 2})


def test_kwargs_must_be_taken(tmp_path):
    write(tmp_path, mine="def score(completions, scale=1): ...")
    source = find_reward("mine.score", code_dir=tmp_path)
    check_arguments(source, columns=["anything"], kwargs={"scale": 2})
    with pytest.raises(RecipeError, match=r"takes no `scal`\. Did you mean `scale`\? Its parameters: completions, scale\."):
        check_arguments(source, columns=None, kwargs={"scal": 2})
    with pytest.raises(RecipeError, match="cannot hold `completions`"):
        check_arguments(source, columns=None, kwargs={"completions": []})


def test_a_misspelt_argument_of_a_built_in_is_found_although_it_takes_any_column(tmp_path):
    source = find_reward("regex_reward", code_dir=tmp_path)
    check_arguments(source, columns=None, kwargs={"pattern": "a", "match": "full"})
    with pytest.raises(RecipeError, match="takes no `patern`. Did you mean `pattern`"):
        check_arguments(source, columns=None, kwargs={"patern": "a"})


@pytest.mark.parametrize(
    ("function", "kwargs", "fragment"),
    [
        ("subprocess.getoutput", {"cmd": "touch canary"}, "belongs to Python itself"),
        ("shutil.rmtree", {"path": "canary"}, "belongs to Python itself"),
        ("os.system", {"command": "touch canary"}, "belongs to Python itself"),
        ("builtins.exec", {}, "no Python source"),
        ("pytest.importorskip", {"modname": "canary"}, "takes no `completions`: it is no reward function. Its parameters: modname,"),
    ],
)
def test_a_recipe_cannot_call_whatever_is_installed(tmp_path, function, kwargs, fragment):
    with pytest.raises(RecipeError, match=re.escape(fragment)):
        check_arguments(find_reward(function, code_dir=tmp_path), columns=None, kwargs=kwargs)


def test_a_module_of_the_recipes_folder_may_have_the_name_of_one_of_pythons(tmp_path):
    (tmp_path / "statistics.py").write_text("def score(completions): return [1.0] * len(completions)")
    assert find_reward("statistics.score", code_dir=tmp_path).file == str(tmp_path / "statistics.py")
