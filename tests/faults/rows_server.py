"""Group F: the vLLM server, its clients, and what lies between them."""

from __future__ import annotations

import importlib.util
import time
from collections import Counter

from card import fault

HAS_VLLM = importlib.util.find_spec("vllm") is not None
LARGE = 129 << 20
"""Bytes; one more MiB than a request for completions may have."""
SLOW = 100
CROWD = 1000
LONGEST_STOP = 30.0


def fault_of_vllm(*arguments, **options):
    """`fault` where vLLM is installed; elsewhere the row is not on the card."""
    return fault(*arguments, **options) if HAS_VLLM else lambda row: row


def write_model(bench):
    """The scorecard's model with weights, which a server wants in its folder."""
    import bench as benches

    folder = bench.root / "model"

    def write():
        import tiny

        model = tiny.qwen2(num_attention_heads=2, num_key_value_heads=1)
        model.save_pretrained(folder)

    assert benches.in_child(write) == 0, "the model's weights could not be written"
    return folder


@fault_of_vllm("F5", "vllm-serve: sockets, keys, large headers and bodies, slow clients, garbage, a crowd")
def hostile_clients_of_the_server(bench):
    """It stays on the loopback, opens to nobody without the key, and still serves after each of them."""
    import hostile_clients as clients
    from served import KEY, serving

    model = write_model(bench)
    with serving(bench.root, model, key=KEY) as server:
        server.wait_until_ready()
        port = server.port

        def alive(after):
            bench.expect("nothing lost", clients.one_token(port, KEY), f"no token after {after}")

        sockets = server.listeners()
        far = [f"{ip}:{number} ({name})" for ip, number, name in sockets if not ip.startswith("127.") and ip != "::1"]
        bench.expect("message", not far, f"listens beyond the loopback: {far}")
        bench.note(f"{len(sockets)} listening sockets in {len(server.family())} processes, {len(far)} beyond the loopback")
        shown = [member.pid for member in server.family() if any(KEY in word for word in member.cmdline())]
        bench.expect("message", not shown, f"the key is on the command line of {shown}")
        open_routes(bench, clients, server)
        alive("requests without the key")

        bench.expect("message", clients.large_header(port, KEY) == 431, "a header of 1 MB was taken")
        alive("a header of 1 MB")
        found = clients.large_body(port, KEY, LARGE, clients.GENERATE)
        bench.expect("message", found == (413, 413), f"a body over the cap was answered {found}")
        alive("a body over the cap")
        with clients.slow_connections(port, KEY, SLOW) as connections:
            alive(f"{SLOW} slow connections, which still hang")
            hung = clients.seconds_until_closed(connections[1], 30)
        bench.expect("bounded time", hung is not None, "half a head of a request is waited for longer than 30 s")
        alive("slow connections")
        clients.garbage(port)
        alive("garbage")
        crowd = Counter(clients.thousand_at_once(port, KEY, CROWD))
        bench.expect("nothing lost", crowd == {200: CROWD}, f"{CROWD} at once were answered {dict(crowd)}")
        alive("a crowd")
        end_cleanly(bench, server)


def open_routes(bench, clients, server):
    """Expect 401 from every route that vLLM has, and ours, for whoever lacks the key; 404 from the closed ones for all."""
    from rloo_cli.serving.middleware import OPEN

    routes = sorted(OPEN | {("GET", path) for path in OTHER_ROUTES} | {("POST", path) for path in OTHER_ROUTES})
    given = {None: 0, "wrong": 0, KEY_PREFIX: 0}
    for key in given:
        answers = {
            (method, path): clients.raw(server.port, clients.head(way, path, key))
            for method, path in routes
            for way in (method, "HEAD", "OPTIONS")
        }
        opened = {what: status for what, status in answers.items() if status != 401}
        bench.expect("message", not opened, f"with the key {key!r}: {opened}")
        bench.expect(
            "message", clients.websocket(server.port, "/v1/realtime", key) == 401, f"a websocket with the key {key!r} was not refused"
        )
        given[key] = len(answers)
    closed = {path: clients.ask(server.port, path, server.key, method="POST", body=b"{}")[0] for path in OTHER_ROUTES}
    bench.expect("message", set(closed.values()) == {404}, f"open to the key, though unused: {closed}")
    bench.note(f"{len(routes)} routes, each with 3 methods and 3 wrong keys: 401; {len(closed)} unused ones: 404 with the key")
    bench.expect("message", server.key not in server.output, "the key is in the output")


def end_cleanly(bench, server):
    """Expect SIGTERM to end the command with 0, and nothing to be left of it."""
    family = server.family()
    started = time.monotonic()
    code = server.end()
    seconds = time.monotonic() - started
    left = [f"{member.pid} {member.name()}" for member in server.family()]
    bench.expect("exit code", code == 0, f"SIGTERM ended it with {code}: {server.output[-300:]}")
    bench.expect("bounded time", seconds < LONGEST_STOP, f"SIGTERM took {seconds:.1f} s")
    bench.note(f"SIGTERM: {seconds:.1f} s")
    bench.expect("nothing left behind", not left, f"of {len(family)} processes there are still {left}")
    scratch = [path.name for path in bench.root.glob("rloo-serve-*")]
    bench.expect("nothing left behind", not scratch, f"folders left: {scratch}")
    bench.expect("message", "Traceback" not in server.output, f"a traceback: {server.output[-500:]}")


KEY_PREFIX = "a-key-that-only-tests-kno"
OTHER_ROUTES = (
    "/",
    "/docs",
    "/redoc",
    "/openapi.json",
    "/load",
    "/kv_event_sources",
    "/tokenize",
    "/detokenize",
    "/v1/systemone",
    "/ping",
    "/invocations",
    "/reset_mm_cache",
    "/reset_encoder_cache",
    "/collective_rpc",
    "/server_info",
    "/sleep",
    "/release_kv_cache_memory",
    "/wake_up",
    "/is_sleeping",
    "/abort_requests",
    "/start_draft_weight_update",
    "/update_weight_version",
    "/weight_checker",
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/responses",
    "/v1/responses/x",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/generative_scoring",
    "/scale_elastic_ep",
    "/is_scaling_elastic_ep",
    "/v1/chat/completions/render",
    "/v1/completions/render",
    "/v1/completions/derender",
    "/v1/load_lora_adapter",
    "/start_profile",
    "/no-such-route",
    "//pause",
    "/health/",
)
"""What vLLM 0.32 serves in development mode beside what training needs, and some that nobody serves."""
