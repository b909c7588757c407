from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
spec = importlib.util.spec_from_file_location("static_gate", ROOT / "scripts" / "static_gate.py")
gate = importlib.util.module_from_spec(spec)
sys.modules["static_gate"] = gate  # dataclass looks its own module up
spec.loader.exec_module(gate)


def kinds(source: str, file: str = "rloo_cli/algorithm/x.py") -> list[str]:
    return [finding.kind for finding in gate.findings(source, file)]


def test_the_package_is_clean(capsys):
    code = gate.main()
    assert code == 0, capsys.readouterr().out


def test_every_exception_is_needed_and_has_a_reason():
    assert gate.unused() == []
    assert all(reason for reason in gate.ALLOWED.values())
    assert all((ROOT / place).exists() for place, _ in gate.ALLOWED)


PICKLE = [
    "import pickle",
    "import _pickle as p",
    "def f():\n    from dill import loads",
    "import multiprocessing.connection",
    "from multiprocessing import Queue",
    "import torch\ntorch.load(path)",
    "import torch\ntorch.load(path, weights_only=False)",
    "import torch\ntorch.load(path, weights_only=flag)",
    "import torch as t\nt.load(path)",
    "from torch import load\nload(path)",
    "from torch import load as read\nread(path, map_location='cpu')",
    "import numpy as np\nnp.load(path, allow_pickle=True)",
    "import pandas as pd\npd.read_pickle(path)",
    "import importlib\nimportlib.import_module('x')\nimport torch.distributed as dist\ndist.all_gather_object(out, x)",
]
EXEC = [
    "eval('1')",
    "exec(code)",
    "list(map(eval, texts))",
    "run = exec\nrun(code)",
    "import builtins\nbuiltins.eval(x)",
    "from builtins import eval as e\ne(x)",
    "getattr(__builtins__, 'x')\nimport builtins as b\ngetattr(b, 'exec')(x)",
    "compile(x, 'f', 'exec')",
    "import runpy\nrunpy.run_path(p)",
    "__import__(name)",
    "import importlib\nimportlib.import_module(name)",
    "from importlib import import_module as load\nload(name)",
]
SHELL = [
    "f(c, shell=True)",
    "f(c, shell=flag)",
    "import os\nos.system('ls')",
    "from os import system as s\ns('ls')",
    "import os as o\nrun = o.system\nrun('ls')",
    "import os\nf(os.popen)",
    "import os\ngetattr(os, 'system')('ls')",
    "__import__('os').system('ls')",
    "import asyncio\nasyncio.create_subprocess_shell(c)",
    "if (run := __import__('os').system):\n    run('ls')",
]
YAML = [
    "import yaml\nyaml.load(text)",
    "import yaml\nyaml.load(text, Loader=yaml.FullLoader)",
    "import yaml\nyaml.load(text, Loader=NotSafeLoader)",
    "import yaml\nyaml.load(text, yaml.Loader)",
    "from yaml import load as parse\nparse(text)",
    "import yaml\nyaml.unsafe_load(text)",
    "from yaml import full_load\nfull_load(text)",
    "import yaml\nclass L(yaml.UnsafeLoader): pass",
]
EXCEPT = [
    "try:\n    f()\nexcept Exception:\n    pass",
    "try:\n    f()\nexcept (ValueError, BaseException):\n    pass",
    "try:\n    f()\nexcept:\n    pass",
    "from builtins import Exception as E\ntry:\n    f()\nexcept E:\n    pass",
    "import contextlib\nwith contextlib.suppress(Exception):\n    f()",
    "from contextlib import suppress as s\nwith s(ValueError, BaseException):\n    f()",
]
WRITE = [
    "path.write_text('x')",
    "path.parent.mkdir()",
    "path.replace(other)",
    "path.rename(other)",
    "(a / b).unlink()",
    "Path(a).touch()",
    "path.symlink_to(b)",
    "open('f', 'w')",
    "open('f', mode)",
    "open('f', mode='r+')",
    "f = open\nf('f', 'ab')",
    "path.open(mode='ab')",
    "path.open('x')",
    "import io\nio.open(p, 'w')",
    "import gzip\ngzip.open(p, 'wb')",
    "import os\nos.replace(a, b)",
    "from os import remove as r\nr(a)",
    "import os\nos.open(path, os.O_WRONLY | os.O_CREAT)",
    "import os\nos.fdopen(fd, 'w')",
    "import shutil\nshutil.rmtree(p)",
    "from shutil import copyfile\ncopyfile(a, b)",
    "import tempfile\ntempfile.mkdtemp()",
    "import torch\ntorch.save(x, p)",
    "import json\njson.dump(x, f)",
    "from safetensors.torch import save_file as s\ns(x, p)",
    "import pyarrow.parquet as pq\npq.write_table(t, p)",
    "model.save_pretrained(p)",
    "archive.extractall(p)",
]
NETWORK = [
    "import socket",
    "from socket import create_connection",
    "import http.client",
    "from http import server",
    "import urllib.request as r",
    "from urllib import request",
    "import requests",
    "import httpx2",
    "from aiohttp import ClientSession",
    "from huggingface_hub import get_session\nget_session()",
    "import asyncio\nasyncio.start_server(f)",
]
PROCESS = [
    "import subprocess",
    "from subprocess import run",
    "import os\nos.fork()",
    "from os import execvp as e\ne(a, b)",
    "import os\nos.posix_spawn(a, b, c)",
    "import asyncio\nasyncio.create_subprocess_exec(c)",
    "import pty",
]


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (kind, source)
        for kind, sources in {
            "pickle": PICKLE,
            "exec": EXEC,
            "shell": SHELL,
            "yaml": YAML,
            "except": EXCEPT,
            "write": WRITE,
            "network": NETWORK,
            "process": PROCESS,
        }.items()
        for source in sources
    ],
)
def test_a_forbidden_construct_is_found(kind, source):
    assert kind in kinds(source)


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()",
        "'''eval(x) in a docstring'''",
        "import yaml\nyaml.load(text, Loader=yaml.SafeLoader)",
        "import yaml\nfrom yaml import CSafeLoader as L\nyaml.load(text, L)\nyaml.safe_load(text)",
        "import torch\ntorch.load(path, weights_only=True)",
        "import numpy as np\nnp.load(path)",
        "import re\nre.compile('x')",
        "torch.compile",
        "open('f')",
        "open('f', encoding='utf-8')",
        "path.open('rb')",
        "import os\nos.open(os.devnull, os.O_WRONLY)\nos.open(p, os.O_RDONLY)",
        "text.replace('a', 'b')",
        "import dataclasses\ndataclasses.replace(x)\nfrom dataclasses import replace\nreplace(x, a=1)",
        "now.replace(tzinfo=None)",
        "from rloo_cli.run import atomic\natomic.fs.unlink(path)\natomic.make_folder(path)",
        "try:\n    f()\nexcept ValueError:\n    pass",
        "f(['ls'], shell=False)",
        "try:\n    f()\nexcept BaseException:\n    tidy()\n    raise",
        "import shutil\nshutil.disk_usage('/')",
        "from urllib.parse import urlsplit",
        "from http import HTTPStatus",
        "import json\njson.dumps(x)",
        "import os\nos.path.exists(p)\nos.getpid()",
        "def system(): ...\nsystem()",
        "from x import load\nload(p)",
    ],
)
def test_what_looks_alike_is_left_alone(source):
    assert kinds(source) == []


def test_exceptions_hold_only_for_their_place():
    broad = "try:\n    f()\nexcept Exception:\n    pass"
    assert kinds(broad, "rloo_cli/cli/app.py") == []
    assert kinds(broad, "rloo_cli/client.py") == ["except"]
    assert kinds("import socket", "rloo_cli/serving/x.py") == []
    assert kinds("import socket", "rloo_cli/serving_x.py") == ["network"]


def test_a_finding_tells_its_place():
    (finding,) = gate.findings("import os\n\n\nos.system('ls')", "rloo_cli/x.py")
    assert str(finding) == "rloo_cli/x.py:4: shell: os.system goes through a shell: pass a list of arguments"
