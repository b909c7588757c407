"""The server engine against a TCP server that misbehaves: what is tried again, what is refused, and how long it takes."""

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time

import pytest
import scripted_server
import tiny
import torch

from rloo_cli.errors import EngineError, RecipeError
from rloo_cli.rollout import server_generation, server_handshake, vllm_server
from rloo_cli.rollout.engine import GenerationRequest, RandomKey, SamplingParams
from rloo_cli.rollout.server_client import ServerClient
from rloo_cli.rollout.vllm_sampling import row_seed
from rloo_cli.rollout.vllm_server import ModelIdentity, VllmServerEngine
from rloo_cli.types import FinishReason

CONFIG = tiny.qwen2().config
IDENTITY = scripted_server.identity_of(CONFIG)
GENERATE, INFO, UPDATE = "/inference/v1/generate", "/rloo/info", "/update_weights"
REQUESTS = [GenerationRequest(token_ids=(65 + i, 66), num_generations=3, first_row=3 * i) for i in range(5)]
PARAMS, KEY = SamplingParams(max_new_tokens=6), RandomKey(seed=1, step=2)
WEIGHTS = {"a.weight": torch.arange(6.0).view(2, 3), "b.bias": torch.ones(3)}
BUDGET = 1.5


@pytest.fixture(autouse=True)
def short_deadlines(monkeypatch):
    monkeypatch.setattr(vllm_server, "INFO_SECONDS", 1.0)
    for name, seconds in {"QUIET_SECONDS": 0.3, "STALL_SECONDS": 1.0, "STALL_SECONDS_A_TOKEN": 0.0}.items():
        monkeypatch.setattr(server_generation, name, seconds)
    monkeypatch.setattr(server_handshake.probe_generation, "__kwdefaults__", {"version": None, "seconds": 1.0})


@pytest.fixture
def make_engine(tmp_path):
    engines = []

    def make(address, **options):
        given = {
            "key": None,
            "tokenizer": None,
            "eos_ids": {tiny.EOS},
            "model_identity": ModelIdentity(config_hash=IDENTITY["config_hash"], vocab_size=260, dtype="float32"),
            "max_model_length": 64,
            "owner": f"{socket.gethostname()}:{os.getpid()}:/runs/a",
            "transfer": "file",
            "transfer_dir": tmp_path / "weights",
            "start_timeout": BUDGET,
            "retry_seconds": BUDGET,
        }
        engines.append(VllmServerEngine(base_url=address, **{**given, **options}))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def connected(make_engine):
    """An engine at a server with faults, connected, with the weights of version 1."""
    servers = []

    def make(*faults, **options):
        servers.append(scripted_server.ScriptedServer(IDENTITY, faults).__enter__())
        engine = make_engine(servers[-1].address, **options)
        engine.connect()
        engine.load_weights(WEIGHTS.items(), 1)
        return engine

    yield make
    for server in servers:
        server.kill()


@pytest.fixture(scope="module")
def expected():
    """What an undisturbed server answers."""
    state = scripted_server.State({"identity": IDENTITY, "faults": [], "key": None, "instance": None})
    rows = []
    for request in REQUESTS:
        params = {"seed": row_seed(KEY, request.first_row), "max_tokens": 6}
        rows.append(tuple(tuple(state.choice(list(request.token_ids), params, g)["token_ids"]) for g in range(3)))
    return rows


def tokens(groups):
    return [tuple(completion.token_ids for completion in group) for group in groups]


def strikes(kind, *, probe=1, **fault):
    """A fault at generation that leaves the one-token generation of the handshake alone."""
    return {"route": GENERATE, "kind": kind, "after": probe, **fault}


def test_groups_come_whole_in_order_with_the_version_of_their_weights(connected, expected):
    told = {}
    groups = connected().generate(REQUESTS, PARAMS, KEY, on_group=told.__setitem__)
    assert tokens(groups) == expected
    assert {i: told[i] for i in range(5)} == dict(enumerate(groups))
    assert {c.weights_version for group in groups for c in group} == {1}
    assert {c.finish_reason for group in groups for c in group} == {FinishReason.STOPPED, FinishReason.TRUNCATED}


PASSING = {
    "cut in the body": [strikes("cut", times=2)],
    "500 twice": [strikes("status", status=500, times=2)],
    "503 for three of five": [strikes("status", status=503, times=3)],
    "429": [strikes("status", status=429, times=2)],
    "no JSON": [strikes("garbage", times=1)],
    "closed without a word": [strikes("close", times=3)],
    "silent once": [strikes("silent", times=1)],
    "one byte a second, once": [strikes("drip", times=1)],
    "info cut, too": [strikes("close", times=1), {"route": INFO, "kind": "cut", "after": 1, "times": 1}],
}


@pytest.mark.parametrize("fault", list(PASSING))
def test_what_passes_is_tried_again_and_changes_no_completion(fault, connected, expected):
    engine, told = connected(*PASSING[fault], retry_seconds=20.0), []
    groups = engine.generate(REQUESTS, PARAMS, KEY, on_group=lambda index, group: told.append(index))
    assert tokens(groups) == expected
    assert sorted(told) == list(range(5)), "each group is told once"


REFUSED = {
    "500 for ever": (strikes("status", status=500, text="out of memory"), "HTTP 500 .*out of memory; tried for"),
    "silent": (strikes("silent"), "it is up, but does not generate: no answer"),
    "one byte a second": (strikes("drip"), "it is up, but does not generate: no answer"),
    "no JSON": (strikes("garbage"), "is no JSON"),
    "401": (strikes("status", status=401), r"refused our key \(HTTP 401\).*vllm_server_key_file.*RLOO_VLLM_KEY"),
    "400": (strikes("status", status=400, text="token_ids: too\nlong"), "HTTP 400 .*: token_ids: too long$"),
    "404": (strikes("status", status=404), "HTTP 404"),
    "200 MB": (strikes("huge", bytes=200 << 20), "more than 0.1 MiB"),
    "one too few": (strikes("count"), "answered 2 completions of 3 for request"),
    "a log-prob too few": (strikes("truncate"), "log-probs of other tokens"),
    "stale": (strikes("version", version="0"), "server on version 0, expected 1"),
}


@pytest.mark.parametrize("fault", list(REFUSED))
def test_what_does_not_pass_ends_in_time_with_address_and_cause_and_no_partial_group(fault, connected):
    engine, told = connected(REFUSED[fault][0]), []
    started = time.monotonic()
    with pytest.raises(EngineError, match=REFUSED[fault][1]) as raised:
        engine.generate(REQUESTS, PARAMS, KEY, on_group=lambda index, group: told.append(group))
    assert engine.address in raised.value.message
    assert "\n" not in raised.value.message
    assert time.monotonic() - started < 15
    assert all(len(group) == 3 for group in told)


def test_a_redirect_is_refused_and_its_target_never_hears_of_it(connected):
    with socket.create_server(("127.0.0.1", 0)) as decoy:
        decoy.settimeout(0.2)
        port = decoy.getsockname()[1]
        engine = connected(strikes("redirect", location=f"http://127.0.0.1:{port}/"))
        with pytest.raises(EngineError, match=f"redirects {GENERATE} to 127.0.0.1:{port}; redirects are not followed"):
            engine.generate(REQUESTS, PARAMS, KEY)
        with pytest.raises(TimeoutError):
            decoy.accept()


def test_a_port_where_nothing_listens_ends_within_the_budget_and_says_what_it_waits_for(make_engine):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    said = []
    engine = make_engine(f"http://127.0.0.1:{port}", start_timeout=4.0, say=said.append)
    started = time.monotonic()
    with pytest.raises(EngineError, match=rf"127.0.0.1:{port}: connection refused; tried for \d s \(vllm_server_timeout: 4\)"):
        engine.connect()
    assert time.monotonic() - started < 8
    assert "waiting for the vLLM server" in said[0]
    assert "connection refused" in said[0]


def test_a_silent_port_ends_within_the_budget(make_engine):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        engine = make_engine(f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(EngineError, match="no answer to GET /rloo/info within 1 s"):
            engine.connect()


WRONG_SERVERS = {
    "another structure": ({"config_hash": "00"}, "serves another model.*hash is 00, the trainer's"),
    "another vocabulary": ({"vocab_size": 32000}, "its vocabulary has 32000 tokens, the trainer's 260"),
    "another dtype": ({"dtype": "bfloat16"}, "computes in bfloat16, the trainer expects float32: start it with --dtype float32"),
    "another vLLM": ({"vllm": "0.19.1"}, "runs vLLM 0.19.1, whose weight updates this rloo does not speak"),
    "another rloo": ({"rloo": "0.0.1"}, "was started by rloo 0.0.1, this is rloo"),
    "too short a context": ({"max_model_len": 32}, "takes 32 tokens at most, the recipe needs 64: start it with --max-model-len 64"),
    "a field of another type": ({"world_size": "two"}, "something else than a server of `rloo vllm-serve`"),
}


@pytest.mark.parametrize("difference", list(WRONG_SERVERS))
def test_a_server_that_does_not_fit_is_refused_before_anything_is_loaded(difference, make_engine):
    changes, message = WRONG_SERVERS[difference]
    with scripted_server.ScriptedServer({**IDENTITY, **changes}) as server, pytest.raises(EngineError, match=message):
        make_engine(server.address).connect()


def test_a_server_in_float32_is_exact_enough_for_any_trainer(make_engine):
    with scripted_server.ScriptedServer(IDENTITY) as server:
        make_engine(
            server.address, model_identity=ModelIdentity(config_hash=IDENTITY["config_hash"], vocab_size=260, dtype="bfloat16")
        ).connect()


def test_a_plain_vllm_server_is_told_from_ours(make_engine):
    fault = {"route": INFO, "kind": "status", "status": 404}
    with (
        scripted_server.ScriptedServer(IDENTITY, [fault]) as server,
        pytest.raises(EngineError, match="was not started by `rloo vllm-serve`.*start the server with `rloo vllm-serve"),
    ):
        make_engine(server.address).connect()


def test_devices_that_both_use_are_refused_with_the_lines_to_use(monkeypatch, make_engine):
    monkeypatch.setattr(vllm_server, "own_devices", lambda: ("GPU-1", "GPU-2"))
    with (
        scripted_server.ScriptedServer({**IDENTITY, "devices": ["GPU-2", "GPU-3"]}) as server,
        pytest.raises(EngineError, match=r"a GPU that the trainer uses too \(GPU-2\).*CUDA_VISIBLE_DEVICES=1 rloo vllm-serve"),
    ):
        make_engine(server.address, device="cuda").connect()


def test_the_key_is_sent_and_a_wrong_one_is_named(make_engine):
    with scripted_server.ScriptedServer(IDENTITY, key="k" * 20) as server:
        make_engine(server.address, key="k" * 20).connect()
        with pytest.raises(EngineError, match="refused our key") as raised:
            make_engine(server.address, key="wrong").connect()
        assert "wrong" not in raised.value.message


def test_a_second_trainer_is_refused_by_the_name_of_the_first(make_engine):
    with scripted_server.ScriptedServer(IDENTITY) as server:
        first = make_engine(server.address)
        first.connect()
        second = make_engine(server.address, owner=f"{socket.gethostname()}:{os.getppid()}:/runs/b")
        with pytest.raises(EngineError, match=rf"serves another trainer \(.*:{os.getpid()}:/runs/a\)"):
            second.connect()
        first.close()
        second.connect()


def test_the_lease_of_a_trainer_that_was_killed_is_taken_over(make_engine):
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    with scripted_server.ScriptedServer(IDENTITY) as server:
        make_engine(server.address, owner=f"{socket.gethostname()}:{child}:/runs/a").connect()
        make_engine(server.address).connect()


def test_a_trainer_that_slept_through_its_lease_does_not_overwrite_the_next_ones_weights(make_engine):
    with scripted_server.ScriptedServer(IDENTITY) as server:
        first, second = make_engine(server.address), make_engine(server.address, owner=f"{socket.gethostname()}:{os.getppid()}:/runs/b")
        first.connect()
        first.load_weights(WEIGHTS.items(), 1)
        lease = {"owner": first._owner}
        asyncio.run(ServerClient(server.address, None).call("DELETE", "/rloo/lease", lease))  # as its end does
        second.connect()
        second.load_weights(WEIGHTS.items(), 7)
        with pytest.raises(EngineError, match=r"serves another trainer \(.*:/runs/b\)"):
            first.load_weights(WEIGHTS.items(), 2)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", "http://user:secret@h:1", "http://h:99999", "http://h/?a=b"])
def test_what_is_no_address_is_refused(url, make_engine):
    with pytest.raises(RecipeError, match="vllm_server_base_url") as raised:
        make_engine(url)
    assert "secret" not in raised.value.message


def test_a_stop_is_heard_within_a_second_in_every_wait(make_engine, connected):
    class Stop(Exception):
        pass

    def stopping_after(seconds):
        ends = time.monotonic() + seconds

        def check():
            if time.monotonic() > ends:
                raise Stop

        return check

    def seconds_until_stop(work):
        started = time.monotonic()
        with pytest.raises(Stop):
            work()
        return time.monotonic() - started - 0.3

    engine = connected(strikes("silent"), retry_seconds=60.0)
    assert seconds_until_stop(lambda: engine.generate(REQUESTS, PARAMS, KEY, check_stop=stopping_after(0.3))) < 1
    waiting = connected(strikes("status", status=503), retry_seconds=60.0)
    assert seconds_until_stop(lambda: waiting.generate(REQUESTS, PARAMS, KEY, check_stop=stopping_after(0.3))) < 1
    with socket.create_server(("127.0.0.1", 0)) as silent:
        engine = make_engine(f"http://127.0.0.1:{silent.getsockname()[1]}", start_timeout=60.0, check_stop=stopping_after(0.3))
        assert seconds_until_stop(engine.connect) < 1


def test_a_refused_update_tells_the_servers_own_words(connected):
    engine = connected({"route": UPDATE, "kind": "status", "status": 500, "text": "size mismatch for a.weight", "after": 1})
    with pytest.raises(EngineError, match="refuses the weights of step 2: HTTP 500 to /update_weights: size mismatch for a.weight"):
        engine.load_weights(WEIGHTS.items(), 2)


def test_an_update_that_is_cut_is_made_again(connected, tmp_path, expected):
    engine = connected({"route": UPDATE, "kind": "close", "after": 1, "times": 1}, retry_seconds=10.0)
    engine.load_weights(WEIGHTS.items(), 2)
    groups = engine.generate(REQUESTS, PARAMS, KEY)
    assert tokens(groups) == expected
    assert {c.weights_version for group in groups for c in group} == {2}
    assert len(list((tmp_path / "weights").iterdir())) == 1, "old weights are removed"
    engine.close()
    assert not list((tmp_path / "weights").iterdir())


def test_weights_that_were_announced_but_are_stale_are_refused(connected):
    engine = connected({"route": "/finish_weight_update", "kind": "stale", "after": 1})
    engine.load_weights(WEIGHTS.items(), 2)
    with pytest.raises(EngineError, match="server on version 1, expected 2"):
        engine.generate(REQUESTS, PARAMS, KEY)


@pytest.mark.parametrize("away", [0.0, 1.0])
def test_a_server_that_comes_back_gets_the_weights_again_and_gives_the_same_completions(away, make_engine, expected):
    said = []
    with scripted_server.ScriptedServer(IDENTITY, [strikes("silent", after=3)]) as first:
        engine = make_engine(first.address, retry_seconds=20.0, say=said.append)
        engine.connect()
        engine.load_weights(WEIGHTS.items(), 3)
        second = scripted_server.ScriptedServer(IDENTITY, port=first.port)

        def restart():
            first.kill()
            time.sleep(away)
            second.__enter__()

        threading.Timer(0.3, restart).start()
        groups = engine.generate(REQUESTS, PARAMS, KEY)
    try:
        assert tokens(groups) == expected
        assert any("was restarted: joining it again and giving it the weights of step 3" in line for line in said)
    finally:
        second.kill()


def test_a_restart_between_steps_is_noticed_by_the_version_of_the_answers(make_engine, expected):
    with scripted_server.ScriptedServer(IDENTITY) as first:
        engine = make_engine(first.address, retry_seconds=20.0)
        engine.connect()
        engine.load_weights(WEIGHTS.items(), 3)
    with scripted_server.ScriptedServer(IDENTITY, port=first.port):
        assert tokens(engine.generate(REQUESTS, PARAMS, KEY)) == expected
        engine.close()


def test_a_server_that_came_back_as_another_model_is_refused(make_engine):
    with scripted_server.ScriptedServer(IDENTITY) as first:
        engine = make_engine(first.address, retry_seconds=20.0)
        engine.connect()
        engine.load_weights(WEIGHTS.items(), 3)
    with (
        scripted_server.ScriptedServer({**IDENTITY, "vocab_size": 300}, port=first.port),
        pytest.raises(EngineError, match="its vocabulary has 300 tokens"),
    ):
        engine.generate(REQUESTS, PARAMS, KEY)


def test_greedy_groups_are_asked_for_row_by_row(connected):
    groups = connected().generate(REQUESTS, SamplingParams(max_new_tokens=6, temperature=0.0), KEY)
    assert [len(group) for group in groups] == [3] * 5


def test_a_prompt_that_leaves_no_room_is_refused(connected):
    request = GenerationRequest(token_ids=(65,) * 64, num_generations=2, first_row=0)
    with pytest.raises(EngineError, match="64 tokens leaves no room for a completion in 64"):
        connected().generate([request], PARAMS, KEY)


def test_close_is_safe_twice_and_nothing_can_be_asked_for_afterwards(connected):
    engine = connected()
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="closed|no weights"):
        engine.generate(REQUESTS, PARAMS, KEY)


def test_importing_the_engine_imports_no_vllm():
    code = "import sys, rloo_cli.rollout.vllm_server; print('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
