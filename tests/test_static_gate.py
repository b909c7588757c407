from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
spec = importlib.util.spec_from_file_location("static_gate", ROOT / "scripts" / "static_gate.py")
gate = importlib.util.module_from_spec(spec)
import sys  # noqa: E402

sys.modules["static_gate"] = gate  # dataclass looks its own module up
spec.loader.exec_module(gate)


def test_the_package_is_clean(capsys):
    code = gate.main()
    assert code == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("import pickle", "pickle"),
        ("def f():\n    from dill import loads", "pickle"),
        ("eval('1')", "exec"),
        ("exec(code)", "exec"),
        ("subprocess.run(c, shell=True)", "shell"),
        ("os.system('ls')", "shell"),
        ("yaml.load(text)", "yaml"),
        ("yaml.load(text, Loader=yaml.FullLoader)", "yaml"),
        ("torch.load(path)", "pickle"),
        ("torch.load(path, weights_only=False)", "pickle"),
        ("try:\n    f()\nexcept Exception:\n    pass", "except"),
        ("try:\n    f()\nexcept (ValueError, BaseException):\n    pass", "except"),
        ("try:\n    f()\nexcept:\n    pass", "except"),
        ("path.write_text('x')", "write"),
        ("open('f', 'w')", "write"),
        ("path.open(mode='ab')", "write"),
        ("path.open('x')", "write"),
        ("os.replace(a, b)", "write"),
        ("os.open(path, os.O_WRONLY | os.O_CREAT)", "write"),
    ],
)
def test_a_forbidden_construct_is_found(source, kind):
    assert [finding.kind for finding in gate.findings(source, "rloo_cli/data/x.py")] == [kind]


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()",
        "'''eval(x) in a docstring'''",
        "yaml.load(text, Loader=yaml.SafeLoader)",
        "torch.load(path, weights_only=True)",
        "open('f')",
        "path.open('rb')",
        "try:\n    f()\nexcept ValueError:\n    pass",
        "subprocess.run(['ls'])",
        "try:\n    f()\nexcept BaseException:\n    tidy()\n    raise",
    ],
)
def test_what_looks_alike_is_left_alone(source):
    assert gate.findings(source, "rloo_cli/data/x.py") == []


def test_exceptions_hold_only_for_their_place():
    broad = "try:\n    f()\nexcept Exception:\n    pass"
    assert gate.findings(broad, "rloo_cli/cli/app.py") == []
    assert gate.findings(broad, "rloo_cli/client.py") != []
