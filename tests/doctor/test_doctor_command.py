from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from scripted_server import ScriptedServer, identity_of
from transformers import AutoConfig

from rloo_cli.cli.app import exit_code_of
from rloo_cli.doctor import examine as examining
from rloo_cli.doctor.check import Level
from rloo_cli.doctor.server import look_at_server

ROOT = Path(__file__).resolve().parent.parent.parent
NO_PROBE = "from rloo_cli.doctor import examine\nexamine.TorchProbe = type('P', (), {'__init__': lambda s, e: None, 'checks': lambda s: iter(())})\n"
CODE = """
import sys
from rloo_cli.cli.app import exit_code_of
code = exit_code_of(["doctor", *sys.argv[1:]])
print("torch" in sys.modules, code, file=sys.stderr)
"""
KEY = "k" * 24


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "80", **environment}
    return subprocess.run([sys.executable, "-c", CODE, *arguments], capture_output=True, text=True, env=environment, cwd=ROOT, timeout=120)


@pytest.fixture(scope="module")
def identity():
    return identity_of(AutoConfig.from_pretrained(ROOT / "recipes" / "quickstart" / "model"))


@pytest.fixture
def quick(monkeypatch):
    """Without the processes that import torch: one test has them."""

    class NoProbe:
        def __init__(self, environ):
            pass

        def checks(self):
            return iter(())

    monkeypatch.setattr(examining, "TorchProbe", NoProbe)


def output_of(capsys, *arguments: str, code: int = 0) -> str:
    found = exit_code_of(["doctor", *arguments])
    captured = capsys.readouterr()
    assert found == code, captured.out + captured.err
    return captured.out


def checks_of(capsys, *arguments: str, code: int = 0) -> dict[str, dict]:
    return {check["name"]: check for check in json.loads(output_of(capsys, *arguments, "--json", code=code))["checks"]}


def test_all_of_it_for_an_issue(tmp_path):
    secret = "hf_abcdefghijklmnop"
    result = run("quickstart", "--json", "-o", str(tmp_path), HF_TOKEN=secret, MY_API_KEY="topsecretvalue", HOME=str(tmp_path))
    assert result.stderr.split() == ["False", "0"], result.stderr
    document = json.loads(result.stdout)
    checks = {check["name"]: check for check in document["checks"]}
    assert document["counts"]["fail"] == 0
    assert checks["gloo"]["level"] == checks["torch"]["level"] == checks["recipe"]["level"] == "ok", checks
    assert checks["bf16"]["facts"]["speed"] > 0 or checks["gpus"]["facts"]["gpus"]
    assert checks["hub"]["facts"]["has_token"] is True
    assert str(tmp_path) not in result.stdout
    assert secret not in result.stdout
    assert "topsecretvalue" not in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_lines_fit_into_eighty_columns(quick, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("RANK", "0")
    lines = output_of(capsys, "-o", str(tmp_path), code=2).splitlines()
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if line.startswith("fail ")] == [next(line for line in lines if "launcher" in line)]
    assert "→ unset RANK" in " ".join(lines)
    assert lines[-1].split(", ")[0] == "1 fail"


def test_what_a_recipe_needs(quick, capsys, monkeypatch, tmp_path):
    from rloo_cli.plan import extras

    monkeypatch.chdir(tmp_path)
    assert checks_of(capsys, "gsm8k")["recipe"]["level"] == "ok"
    monkeypatch.setattr(extras, "find_spec", lambda module: None)
    assert "needs math-verify" in checks_of(capsys, "gsm8k", code=2)["recipe"]["said"]
    bad = tmp_path / "bad.yaml"
    bad.write_text("model: {}\n")
    recipe = checks_of(capsys, str(bad), code=2)["recipe"]
    assert f"{bad}:1:1: model.model_name_or_path: required" in recipe["said"]
    assert "Did you mean" in checks_of(capsys, "quickstar", code=2)["recipe"]["said"]


def test_a_server_that_works(quick, identity, capsys, monkeypatch):
    with ScriptedServer(identity, key=KEY) as server:
        monkeypatch.setenv("RLOO_VLLM_KEY", KEY)
        found = checks_of(capsys, "--server", server.address)["server"]
        assert (found["level"], found["facts"]["vllm"], found["facts"]["model"]) == ("ok", "0.32.0", "scripted")
        assert "the key is right, and it generates" in found["said"]
        assert KEY not in json.dumps(found)
        monkeypatch.setenv("RLOO_VLLM_KEY", "x" * 24)
        assert "refused our key" in checks_of(capsys, "--server", server.address, code=2)["server"]["said"]


def test_a_recipes_own_server_and_key(quick, identity, capsys, tmp_path):
    key = tmp_path / "key"
    key.write_text(KEY)
    key.chmod(0o600)
    with ScriptedServer(identity, key=KEY) as server:
        recipe = tmp_path / "served.yaml"
        generation = f"{{use_vllm: true, vllm_mode: server, vllm_server_base_url: '{server.address}', vllm_server_key_file: key}}"
        recipe.write_text(f"extends: {ROOT / 'recipes' / 'gsm8k.yaml'}\ngeneration: {generation}\n")
        assert checks_of(capsys, str(recipe))["server"]["level"] == "ok"
        key.chmod(0o644)
        assert "others can read" in checks_of(capsys, str(recipe), code=2)["server"]["said"]


@pytest.mark.parametrize(
    ("changes", "faults", "told"),
    [
        ({"vllm": "0.31.0"}, [], "runs vLLM 0.31.0"),
        ({"rloo": "9.9"}, [], "was started by rloo 9.9"),
        ({}, [{"route": "/rloo/info", "kind": "status", "status": 404, "text": "no"}], "was not started by `rloo vllm-serve`"),
        ({}, [{"route": "/rloo/info", "kind": "garbage"}], "is no JSON"),
        ({}, [{"route": "/inference", "kind": "status", "status": 500, "text": "engine is dead"}], "does not generate: HTTP 500"),
    ],
)
def test_a_server_that_does_not(changes, faults, told, identity):
    with ScriptedServer({**identity, **changes}, faults=faults) as server:
        found = look_at_server(server.address, None)
    assert (found.level, told in found.said) == (Level.FAIL, True), found.said


def test_no_server_at_all():
    found = look_at_server("http://127.0.0.1:9", None)
    assert (found.level, found.said) == (Level.FAIL, "http://127.0.0.1:9: connection refused")
    assert look_at_server("http://me:secret1@host:8000", None).said.startswith("vllm_server_base_url: a name or password stands in it")
    assert look_at_server("nonsense", None).level is Level.FAIL


def test_colours_are_for_terminals(tmp_path):
    ours, theirs = pty.openpty()
    script = NO_PROBE + CODE
    process = subprocess.Popen([sys.executable, "-c", script, "-o", str(tmp_path)], stdout=theirs, stderr=subprocess.DEVNULL, cwd=ROOT)
    os.close(theirs)
    chunks = []
    try:
        while chunk := os.read(ours, 65536):
            chunks.append(chunk)
    except OSError:
        pass  # how Linux tells that the other end is closed
    os.close(ours)
    assert process.wait(60) == 0
    assert b"\x1b[32mok" in b"".join(chunks)
