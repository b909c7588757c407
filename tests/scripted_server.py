"""A TCP server that speaks what `rloo vllm-serve` speaks, makes completions up, and misbehaves on request. Standard library alone.

    with ScriptedServer(identity, faults=[{"route": "/inference/v1/generate", "kind": "status", "status": 500, "times": 2}]) as server: …

It is a process of its own (`python scripted_server.py '{…}'`, which prints its port), so that a test that forks has no threads. Completions
are a pure function of (seed, prompt, number in the group). A fault has a route (a prefix of the path; "" = every one), `after` (requests
of this route to leave alone, 0), `times` (how often it strikes; absent = always), and a kind:

    silent      never answers                       status      answers `status`, body `text`
    cut         half the body, then closes          garbage     200 with what is no JSON
    drip        one byte a second                   huge        200 and `bytes` of body
    redirect    307 to `location`                   close       closes without a word
    count       one completion too few              version     completions of version `version`
    stale       takes new weights, keeps the old version                   truncate    a log-prob too few
"""

from __future__ import annotations

import json
import random
import secrets
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

EOS = 257


class ScriptedServer:
    """Starts the process, ends it; `port`, `address`."""

    def __init__(self, identity, faults=(), *, port=0, key=None, instance=None):
        self.options = {"identity": identity, "faults": list(faults), "port": port, "key": key, "instance": instance}

    def __enter__(self):
        self.process = subprocess.Popen([sys.executable, __file__, json.dumps(self.options)], stdout=subprocess.PIPE, text=True)
        self.port = int(self.process.stdout.readline())
        self.address = f"http://127.0.0.1:{self.port}"
        return self

    def __exit__(self, *error):
        self.kill()

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


def identity_of(config, *, dtype="float32", **changes):
    """What /rloo/info says of a model."""
    from rloo_cli import __version__
    from rloo_cli.serving.identity import config_hash

    return {
        "rloo": __version__,
        "vllm": "0.32.0",
        "torch": "2.13.0",
        "model": "scripted",
        "config_hash": config_hash(config.to_dict()),
        "vocab_size": config.vocab_size,
        "dtype": dtype,
        "max_model_len": 512,
        "devices": [],
        "world_size": 1,
        **changes,
    }


class State:
    """What the server knows; one lock for all threads."""

    def __init__(self, options):
        self.identity, self.faults, self.key = options["identity"], options["faults"], options["key"]
        self.instance = options["instance"] or secrets.token_hex(8)
        self.version, self.lease, self.paused, self.seen, self.lock = "default", None, False, {}, threading.Lock()

    def fault(self, path):
        """The fault that strikes this request, if any."""
        with self.lock:
            for number, fault in enumerate(self.faults):
                if not path.startswith(fault.get("route", "")):
                    continue
                seen = self.seen[number] = self.seen.get(number, 0) + 1
                start = fault.get("after", 0)
                if start < seen <= start + fault.get("times", 10**9):
                    return fault
        return {"kind": "none"}

    def answer(self, method, path, body, fault):
        """(status, document)."""
        route = path.partition("?")[0]
        if route == "/rloo/info":
            version = int(self.version) if self.version.isdecimal() else 0
            return 200, {**self.identity, "weights_version": version, "instance": self.instance, "lease": self.lease}
        if route == "/rloo/lease":
            return self.take_lease(method, body)
        if route == "/inference/v1/generate":
            return 200, self.generate(body, fault)
        if route == "/finish_weight_update" and fault["kind"] != "stale":
            self.version = body["weight_version"]
        if route in ("/pause", "/resume"):
            self.paused = route == "/pause"
        if route == "/update_weights" and not Path(body["update_info"].get("path", "")).is_file():
            return 500, {"error": {"message": "no such file"}}
        known = (
            "/version",
            "/is_paused",
            "/init_weight_transfer_engine",
            "/start_weight_update",
            "/update_weights",
            "/finish_weight_update",
        )
        if route in ("/pause", "/resume", "/reset_prefix_cache", *known):
            return 200, {"is_paused": self.paused, "success": True}
        return 404, {"detail": "Not Found"}

    def take_lease(self, method, body):
        with self.lock:
            if self.lease and self.lease["owner"] != body["owner"]:
                return 409, {"error": "taken", "lease": self.lease}
            self.lease = None if method == "DELETE" else {"owner": body["owner"]}
            return 200, {"lease": self.lease}

    def generate(self, body, fault):
        params = body["sampling_params"]
        choices = [self.choice(body["token_ids"], params, index) for index in range(params.get("n", 1))]
        if fault["kind"] == "count":
            choices.pop()
        if fault["kind"] == "version":
            choices[-1]["weight_versions"][0]["version"] = fault["version"]
        if fault["kind"] == "truncate":
            choices[-1]["logprobs"]["content"].pop()
        return {"request_id": "r", "choices": choices}

    def choice(self, prompt, params, index):
        draw = random.Random(f"{params.get('seed')} {prompt} {index}")
        longest = params["max_tokens"]
        tokens = [draw.randrange(32, 127) for _ in range(draw.randint(1, longest + 2))][:longest]
        ended = len(tokens) < longest
        tokens += [self.identity.get("eos", EOS)] * ended
        content = [{"token_id": token, "logprob": -1.5, "rank": 1, "top_logprobs": []} for token in tokens]
        versions = [{"version": self.version, "start": 0, "end": len(tokens)}]
        reason = "stop" if ended else "length"
        return {"index": index, "token_ids": tokens, "logprobs": {"content": content}, "finish_reason": reason, "weight_versions": versions}


def serve(connection, state):
    """Requests of one connection, one after the other."""
    file = connection.makefile("rb")
    while line := file.readline():
        method, path, _ = line.decode().split(" ", 2)
        headers = {}
        while (header := file.readline().strip()) != b"":
            name, _, value = header.decode().partition(":")
            headers[name.lower()] = value.strip()
        content = file.read(int(headers.get("content-length", 0)))
        fault = state.fault(path)
        if state.key and headers.get("authorization") != f"Bearer {state.key}":
            reply(connection, 401, {"error": "no key"})
        elif not misbehave(connection, fault):
            status, document = state.answer(method, path, json.loads(content) if content else {}, fault)
            if fault["kind"] in ("cut", "drip"):
                return trickle(connection, json.dumps(document).encode(), fault["kind"])
            reply(connection, status, document)
        elif fault["kind"] != "status":
            return None
    return None


def misbehave(connection, fault):
    """Whether the fault was the whole answer."""
    kind = fault["kind"]
    if kind == "silent":
        time.sleep(3600)
    elif kind == "status":
        reply(connection, fault["status"], {"error": {"message": fault.get("text", "scripted")}})
    elif kind == "garbage":
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n<html>\xff\x00!")
    elif kind == "redirect":
        connection.sendall(f"HTTP/1.1 307 x\r\nlocation: {fault['location']}\r\ncontent-length: 0\r\n\r\n".encode())
    elif kind == "huge":
        connection.sendall(f"HTTP/1.1 200 OK\r\ncontent-length: {fault['bytes']}\r\n\r\n".encode())
        for _ in range(fault["bytes"] >> 16):
            connection.sendall(b" " * (1 << 16))
    return kind in ("silent", "status", "garbage", "redirect", "huge", "close")


def trickle(connection, body, kind):
    connection.sendall(f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode())
    if kind == "cut":
        return connection.sendall(body[: len(body) // 2])
    for byte in body:
        connection.sendall(bytes([byte]))
        time.sleep(1)
    return None


def reply(connection, status, document):
    body = json.dumps(document).encode()
    connection.sendall(f"HTTP/1.1 {status} x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)


def handle(connection, state):
    with connection:
        try:
            serve(connection, state)
        except (OSError, ValueError):
            pass  # the client left
        finally:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


def main():
    options = json.loads(sys.argv[1])
    state = State(options)
    listener = socket.create_server(("127.0.0.1", options["port"]), backlog=128)
    print(listener.getsockname()[1], flush=True)
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=handle, args=(connection, state), daemon=True).start()


if __name__ == "__main__":
    main()
