from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

uvicorn = pytest.importorskip("uvicorn", reason="comes with vLLM")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import hostile_clients as clients  # noqa: E402

from rloo_cli.serving.connections import guarded  # noqa: E402
from rloo_cli.serving.middleware import OPEN, Gate, Limits  # noqa: E402

KEY = "correct-horse-battery-staple"
LIMITS = Limits(body=300_000, control_body=100_000, held=1_000_000, body_seconds=0.6)
HEAD_SECONDS = 0.6
MOST_CONNECTIONS = 60


class Engine:
    """The part of vLLM's engine client that our routes talk to."""

    def __init__(self):
        self.version = "default"

    async def get_weight_version(self):
        return self.version

    async def update_weight_version(self, version):
        self.version = version


class Application:
    """An ASGI application that tells what reached it."""

    def __init__(self):
        self.seen = []
        self.state = type("State", (), {"engine_client": Engine()})()

    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan":
            while True:
                message = await receive()
                await send({"type": f"{message['type']}.complete"})
                if message["type"] == "lifespan.shutdown":
                    return
        message = await receive()
        self.seen.append((scope["method"], scope["path"], len(message.get("body", b"")), message.get("more_body", False)))
        if scope["path"] == "/pause":  # waits, as a generation does, for the client to leave
            assert (await receive())["type"] == "http.disconnect"
            self.seen.append("gone")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


class Served:
    """The application behind the gate, on a port."""

    def __init__(self, key, http):
        self.application = Application()
        gate = Gate(self.application, key=key, limits=LIMITS)

        async def entry(scope, receive, send):
            scope["app"] = self.application
            await gate(scope, receive, send)

        self.gate = gate
        config = uvicorn.Config(entry, host="127.0.0.1", port=0, log_level="critical", http=http, h11_max_incomplete_event_size=1 << 22)
        config.load()
        config.ws_protocol_class = None
        config.http_protocol_class = guarded(config.http_protocol_class, most=MOST_CONNECTIONS, head_seconds=HEAD_SECONDS)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]

    def close(self):
        self.server.should_exit = self.server.force_exit = True
        self.thread.join(10)


@pytest.fixture(scope="module", params=["httptools", "h11"])
def served(request):
    there = Served(KEY, request.param)
    yield there
    there.close()


@pytest.fixture(scope="module")
def without_key():
    there = Served(None, "httptools")
    yield there
    there.close()


OTHER_PATHS = ["/", "/docs", "/openapi.json", "/collective_rpc", "/nothing", "//pause", "/health/", "/%2e./health"]
PATHS = [*sorted({path for _, path in OPEN}), *OTHER_PATHS]


@pytest.mark.parametrize("given", [None, "wrong", KEY[:-1], KEY + "x", KEY[:1], KEY.upper()])
def test_every_route_and_method_wants_the_whole_key(served, given):
    served.application.seen.clear()
    answers = {
        (method, path): clients.raw(served.port, clients.head(method, path, given))
        for path in PATHS
        for method in ("GET", "POST", "HEAD", "OPTIONS", "DELETE")
    }
    assert set(answers.values()) == {401}, {what: status for what, status in answers.items() if status != 401}
    assert served.application.seen == []


@pytest.mark.parametrize(
    "line",
    [f"Authorization: Basic {KEY}", f"Authorization: {KEY}", f"Authorization: Bearer  {KEY}", f"X-Api-Key: {KEY}", "Authorization: Bearer"],
)
def test_the_key_counts_as_a_bearer_alone(served, line):
    assert clients.raw(served.port, clients.head("GET", "/health", None, line)) == 401


def test_two_keys_are_none(served):
    lines = [f"Authorization: Bearer {KEY}"] * 2
    assert clients.raw(served.port, clients.head("GET", "/health", None, *lines)) == 401


def test_a_websocket_wants_the_key_and_does_not_exist(served):
    assert clients.websocket(served.port, "/v1/realtime") == 401
    assert clients.websocket(served.port, "/v1/realtime", KEY) == 404


@pytest.mark.parametrize(("method", "path"), sorted(OPEN - {("POST", "/pause")} - {r for r in OPEN if r[1].startswith("/rloo/")}))
def test_what_training_needs_is_open_to_the_key(served, method, path):
    served.application.seen.clear()
    assert clients.ask(served.port, path, KEY, method=method, body=b"{}" if method == "POST" else None)[0] == 200
    assert served.application.seen == [(method, path, 2 if method == "POST" else 0, False)]


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", path) for path in ("/collective_rpc", "/sleep", "/wake_up", "/weight_checker", "/abort_requests", "/v1/load_lora_adapter")]
    + [("GET", path) for path in ("/docs", "/openapi.json", "/server_info", "/health/", "/HEALTH")]
    + [("HEAD", "/health"), ("OPTIONS", "/v1/completions"), ("GET", "/pause"), ("PUT", "/rloo/lease")],
)
def test_the_rest_is_closed_even_to_the_key(served, method, path):
    served.application.seen.clear()
    assert clients.ask(served.port, path, KEY, method=method)[0] == 404
    assert served.application.seen == []


def test_browsers_are_refused(served, without_key):
    assert clients.ask(served.port, "/health", KEY, headers={"Origin": "http://evil.example"})[0] == 403
    assert clients.ask(without_key.port, "/pause", method="POST", headers={"Origin": "null"})[0] == 403


def test_without_a_key_the_open_routes_are_open_and_the_closed_closed(without_key):
    assert clients.ask(without_key.port, "/health")[0] == 200
    assert clients.ask(without_key.port, "/collective_rpc", method="POST")[0] == 404


def test_the_refusal_says_what_to_send(served):
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=10)
    connection.request("GET", "/health")
    response = connection.getresponse()
    assert (response.getheader("www-authenticate"), response.getheader("connection")) == ("Bearer", "close")
    assert KEY not in response.read().decode()
    connection.close()


def test_bodies_have_a_limit_told_or_not(served):
    served.application.seen.clear()
    assert clients.large_body(served.port, KEY, 100_001) == (413, 413)
    assert clients.large_body(served.port, KEY, 300_001, clients.GENERATE) == (413, 413)
    assert served.application.seen == []
    assert clients.ask(served.port, clients.GENERATE, KEY, method="POST", body=b"x" * 300_000)[0] == 200
    assert served.application.seen == [("POST", clients.GENERATE, 300_000, False)]
    assert served.gate._held == 0


def test_a_large_body_without_the_key_is_not_read(served):
    assert clients.large_body(served.port, "wrong", 50 << 20, clients.GENERATE) == (401, 401)


def test_all_bodies_together_have_a_limit(served):
    part = clients.head("POST", clients.GENERATE, KEY, "Content-Length: 290000") + b"x" * 280_000
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(socket.create_connection(("127.0.0.1", served.port))).sendall(part)
        wait_until(lambda: served.gate._held > 800_000)
        assert clients.ask(served.port, clients.GENERATE, KEY, method="POST", body=b"x" * 290_000)[0] == 503
        assert clients.ask(served.port, clients.GENERATE, KEY, method="POST", body=b"x" * 1000)[0] == 200
    wait_until(lambda: served.gate._held == 0)


def test_a_body_that_does_not_come_is_not_waited_for(served):
    assert clients.raw(served.port, clients.head("POST", clients.GENERATE, KEY, "Content-Length: 10") + b"x") == 408
    assert served.gate._held == 0


def test_headers_have_a_limit(served):
    served.application.seen.clear()
    assert clients.large_header(served.port, KEY) in (431, 400)
    assert clients.large_header(served.port, "wrong") in (431, 400, 401)
    assert served.application.seen == []


def test_a_head_that_never_ends_is_closed_also_on_a_used_connection(served):
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        connection.sendall(b"GET /hea")
        assert clients.seconds_until_closed(connection, 5) is not None
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        connection.sendall(clients.head("GET", "/health", KEY))
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        connection.sendall(b"GET /hea")
        assert clients.seconds_until_closed(connection, 5) is not None


def test_a_silent_connection_is_closed(served):
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        assert clients.seconds_until_closed(connection, 5) is not None


def test_a_request_that_takes_long_is_not_cut_off(served):
    served.application.seen.clear()
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        connection.sendall(clients.head("POST", "/pause", KEY, "Content-Length: 0"))
        assert clients.seconds_until_closed(connection, 3 * max(HEAD_SECONDS, LIMITS.body_seconds)) is None
    wait_until(lambda: "gone" in served.application.seen)


def test_the_longest_silent_makes_room(served):
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", served.port))) for _ in range(MOST_CONNECTIONS + 5)]
        assert clients.ask(served.port, "/health", KEY)[0] == 200
        assert clients.seconds_until_closed(silent[0], 0.5) is not None


def test_a_burst_of_silent_connections_stays_within_the_limit(served):
    with contextlib.ExitStack() as stack:
        for _ in range(4 * MOST_CONNECTIONS):
            stack.enter_context(socket.create_connection(("127.0.0.1", served.port)))
        wait_until(lambda: 0 < len(served.server.server_state.connections) <= MOST_CONNECTIONS, seconds=HEAD_SECONDS / 2)


def test_garbage_and_a_crowd_leave_it_serving(served):
    clients.garbage(served.port)
    assert Counter(clients.thousand_at_once(served.port, KEY, count=MOST_CONNECTIONS - 10)) == {200: MOST_CONNECTIONS - 10}
    assert clients.ask(served.port, "/health", KEY)[0] == 200


def test_a_keep_alive_connection_takes_several_requests(served):
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=10)
    for size in (1000, 90_000, 0):
        connection.request("POST", "/resume", b"x" * size, {"Authorization": f"Bearer {KEY}"})
        response = connection.getresponse()
        assert (response.status, response.read()) == (200, b"{}")
    connection.close()


def test_one_trainer_at_a_time(served):
    def lease(method, **document):
        return clients.ask(served.port, "/rloo/lease", KEY, method=method, body=json.dumps(document).encode())

    assert lease("POST", owner="a:1:/x", seconds=60)[0] == 200
    assert lease("POST", owner="a:1:/x", seconds=30)[1]["lease"]["seconds_left"] <= 30
    status, document = lease("POST", owner="b:2:/y", seconds=60)
    assert (status, document["lease"]["owner"]) == (409, "a:1:/x")
    assert lease("DELETE", owner="b:2:/y")[0] == 409
    assert lease("DELETE", owner="a:1:/x")[0] == 200
    assert lease("POST", owner="b:2:/y", seconds=0.05)[0] == 200
    time.sleep(0.1)
    assert lease("POST", owner="c:3:/z", seconds=60)[0] == 200
    assert clients.ask(served.port, "/rloo/lease", KEY, method="DELETE") == (200, {"lease": None})


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'{"owner": ""}', b'{"owner": 3, "seconds": 60}', b'{"owner": "a", "seconds": true}', b"[" * 90_000]
)
def test_a_lease_wants_an_owner_and_seconds(served, body):
    assert clients.ask(served.port, "/rloo/lease", KEY, method="POST", body=body)[0] == 400


@pytest.mark.parametrize("seconds", ["0", "-1", "NaN", "Infinity", "1e9", '"60"'])
def test_a_lease_ends(served, seconds):
    body = f'{{"owner": "a", "seconds": {seconds}}}'.encode()
    assert clients.ask(served.port, "/rloo/lease", KEY, method="POST", body=body)[0] == 400


def test_the_weights_version_goes_to_the_engine(served):
    assert clients.ask(served.port, "/rloo/weights_version", KEY, method="POST", body=b'{"version": 7}') == (200, {"weights_version": 7})
    assert served.application.state.engine_client.version == "7"
    for wrong in (b'{"version": -1}', b'{"version": "7"}', b'{"version": true}', b"{}"):
        assert clients.ask(served.port, "/rloo/weights_version", KEY, method="POST", body=wrong)[0] == 400


def test_a_websocket_scope_is_refused_where_a_server_has_websockets():
    sent = []

    async def send(message):
        sent.append(message)

    gate = Gate(Application(), key=KEY)
    asyncio.run(gate({"type": "websocket", "headers": [], "path": "/", "extensions": {"websocket.http.response": {}}}, None, send))
    asyncio.run(gate({"type": "websocket", "headers": [], "path": "/"}, None, send))
    assert [(m["type"], m.get("status")) for m in sent] == [
        ("websocket.http.response.start", 401),
        ("websocket.http.response.body", None),
        ("websocket.close", None),
    ]


def wait_until(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "still not so"
        time.sleep(0.02)
