"""Group F, the trainer's side: what a run does when its vLLM server fails, lies, dies or hangs.

F1 and a part of F4 have a scripted server; F2 to F4 have `rloo vllm-serve` with vLLM in it, where it is installed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from card import fault

HERE = Path(__file__).resolve().parent
GENERATE = "/inference/v1/generate"
STRIKES_AT = 7
"""Requests for completions before step 4: one token in the handshake, two prompts a step."""
SAVED = 3
RETRY_SECONDS = 3
START_SECONDS = 240.0

PASSING = {
    "cut in the body": {"kind": "cut", "times": 1},
    "500 twice": {"kind": "status", "status": 500, "times": 2},
    "429 once": {"kind": "status", "status": 429, "times": 1},
    "no JSON once": {"kind": "garbage", "times": 1},
    "closed without a word": {"kind": "close", "times": 2},
}
ENDING = {
    "silent": ({"kind": "silent"}, "does not generate"),
    "one byte a second": ({"kind": "drip"}, "does not generate"),
    "always cut": ({"kind": "cut"}, "connection lost"),
    "500 for ever": ({"kind": "status", "status": 500, "text": "out of memory"}, "out of memory"),
    "429 for ever": ({"kind": "status", "status": 429}, "HTTP 429"),
    "401": ({"kind": "status", "status": 401}, "RLOO_VLLM_KEY"),
    "no JSON": ({"kind": "garbage"}, "no JSON"),
    "200 MB": ({"kind": "huge", "bytes": 200 << 20}, "MiB"),
    "one completion too few": ({"kind": "count"}, "answered 3 completions of 4"),
    "wrong version": ({"kind": "version", "version": "2"}, "server on version 2, expected 3"),
}


@fault("F1", "server: refused, silent, cut, slow, 500, 429, 401, no JSON, 200 MB, wrong count, wrong version, redirect")
def answers_that_are_none(bench):
    """What passes is tried again and changes no bit; the rest ends the run with address and cause, and the last step saved."""
    with scripted(bench) as plain:
        settings = server_settings(plain.address)
        bench.gold(*settings)
        for name, what in PASSING.items():
            with scripted(bench, {"route": GENERATE, "after": STRIKES_AT, **what}) as server:
                outcome = bench.train(settings=server_settings(server.address))
            bench.check(outcome, code=0, where=f"{name}: ")
            bench.is_gold(outcome.folder, *settings, where=f"{name}: ")
        for name, (what, words) in ENDING.items():
            with scripted(bench, {"route": GENERATE, "after": STRIKES_AT, **what}) as server:
                outcome = bench.train(settings=server_settings(server.address))
            ends_saved(bench, outcome, settings, [server.address, words], where=f"{name}: ")
        refused_and_redirected(bench, settings)


def refused_and_redirected(bench, settings):
    with socket.create_server(("127.0.0.1", 0)) as decoy:
        port = decoy.getsockname()[1]
        with scripted(
            bench, {"route": GENERATE, "after": STRIKES_AT, "kind": "redirect", "location": f"http://127.0.0.1:{port}/"}
        ) as server:
            outcome = bench.train(settings=server_settings(server.address))
        ends_saved(bench, outcome, settings, [server.address, "redirects are not followed"], where="redirect: ")
        decoy.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            decoy.accept()
            bench.expect("message", False, "the redirect was followed")
    outcome = bench.train(settings=server_settings(f"http://127.0.0.1:{port}"))
    bench.check(outcome, code=5, says=[f"127.0.0.1:{port}", "connection refused", "rloo vllm-serve"], where="refused: ")
    bench.expect("nothing lost", not outcome.steps, f"refused at the start, and yet saved {outcome.steps}")


@fault("F2", "server: SIGKILL in generation, in an update, between steps; back at once, after 5 s, never; SIGSTOP")
def servers_that_die(bench):
    """A server that comes back is joined again, and the run ends as if nothing had happened; without it the last step is saved."""
    if not needs_vllm(bench):
        return
    with kept_server(bench, pause=0) as server:
        settings = [*server_settings(server.address, transfer="gloo", retry=START_SECONDS), "eval_strategy=steps", "eval_steps=2"]
        gold = bench.gold(*settings)
        again = bench.train(settings=settings)
        same(bench, gold, again, "undisturbed a second time: ")
        for name, inject in {"generation": kill_in_generation, "between steps": kill_in_training}.items():
            came_back(bench, gold, server, settings, inject, f"killed in {name}, back at once: ")
        server.set_pause(5)
        came_back(bench, gold, server, settings, kill_in_update, "killed in an update, back after 5 s: ")
        stopped(bench, gold, server, settings)
        server.set_pause(-1)
        outcome = bench.train(settings=quick_to_give_up(settings), inject=lambda: kill_in_generation(server.pids))
        ended = bench.check(outcome, code=5, says=[server.address, f"Step {SAVED} is saved"], where="never back: ")
        server.set_pause(0)
        server.wait_until_ready()
        if ended:
            resumed = bench.train("--resume", folder=outcome, settings=settings, timeout=START_SECONDS)
            same(bench, gold, resumed, "never back, resumed: ")


def came_back(bench, gold, server, settings, inject, where):
    """Expect the undisturbed bits, and a minute at most beside the server's own start."""
    pids, started = server.pids, server.starts
    outcome = bench.train(settings=settings, inject=lambda: inject(pids), timeout=2 * START_SECONDS)
    bench.expect("nothing lost", server.starts == started + 1, f"{where}the server was not killed")
    bench.check(outcome, code=0, within=60 + server.last_start, where=where)
    bench.note(f"{where}{outcome.seconds:.0f} s, of which the server took {server.last_start:.0f} s to start")
    same(bench, gold, outcome, where)


def stopped(bench, gold, server, settings):
    """SIGSTOP: every process of the server hangs, its port still takes connections."""
    pids = server.pids
    outcome = bench.train(settings=quick_to_give_up(settings), inject=lambda: kill_in_generation(pids, signal.SIGSTOP))
    bench.check(outcome, code=5, says=[server.address, "no answer", f"Step {SAVED} is saved"], where="SIGSTOP: ")
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    same(bench, gold, bench.train("--resume", folder=outcome, settings=settings), "SIGSTOP, resumed: ")


@fault("F3", "server: health 200, but the generation hangs")
def generation_hangs(bench):
    """Found by asking for one token, at the start and on the way."""
    with scripted(bench) as plain:
        settings = server_settings(plain.address)
        for name, after in {"at the start": 0, "in step 4": STRIKES_AT}.items():
            with scripted(bench, {"route": GENERATE, "after": after, "kind": "silent"}) as server:
                outcome = bench.train(settings=server_settings(server.address))
            if after:
                ends_saved(bench, outcome, settings, ["is up, but does not generate"], where=f"{name}: ")
            else:
                bench.check(outcome, code=5, says=[server.address, "is up, but does not generate"], where=f"{name}: ")
    if needs_vllm(bench):
        with kept_server(bench, pause=-1) as real:
            engine = real.engine
            os.kill(engine, signal.SIGSTOP)
            outcome = bench.train(settings=quick_to_give_up(server_settings(real.address, transfer="gloo")))
            os.kill(engine, signal.SIGCONT)
            bench.check(outcome, code=5, says=[real.address, "no answer"], where="vLLM with its engine stopped: ")


@fault("F4", "server: weights announced, but stale")
def stale_weights(bench):
    """Completions of other weights than the last ones are refused, whoever made them."""
    with scripted(bench) as plain:
        settings = server_settings(plain.address)
        with scripted(bench, {"route": "/finish_weight_update", "after": 3, "kind": "stale"}) as server:
            outcome = bench.train(settings=server_settings(server.address))
        ends_saved(bench, outcome, settings, [server.address, "server on version 2, expected 3"], where="scripted: ")
    if needs_vllm(bench):
        with kept_server(bench, pause=-1) as real:
            outcome = bench.train(settings=server_settings(real.address, transfer="gloo"), inject=announce_nothing)
            bench.check(outcome, code=5, says=["server on version 2, expected 3", f"Step {SAVED} is saved"], where="vLLM: ")


def ends_saved(bench, outcome, settings, says, where):
    """Expect exit 5 with the state after the last step, which is gone on with to the golden bits at a server that is well."""
    bench.check(outcome, code=5, says=[*says, f"Step {SAVED} is saved"], where=where)
    bench.expect("nothing lost", SAVED in outcome.steps, f"{where}checkpoints {outcome.steps}")
    bench.resume_is_gold(outcome, settings=settings, where=where)


def server_settings(address, *, transfer="file", retry=RETRY_SECONDS):
    return [
        "use_vllm=true",
        "vllm_mode=server",
        f"vllm_server_base_url={address}",
        f"vllm_weight_transfer={transfer}",
        f"vllm_group_port={free_port()}",
        f"vllm_server_timeout={RETRY_SECONDS}",
        f"vllm_server_retry_seconds={retry}",
    ]


def quick_to_give_up(settings):
    return [f"vllm_server_retry_seconds={RETRY_SECONDS}" if "retry" in setting else setting for setting in settings]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def scripted(bench, *faults):
    """A scripted server of the scorecard's model."""
    from scripted_server import ScriptedServer, identity_of
    from transformers import AutoConfig

    return ScriptedServer(identity_of(AutoConfig.from_pretrained(bench.root / "model")), faults)


def same(bench, gold, outcome, where):
    """Expect the tokens, rewards and weights of the golden run. vLLM's own log-probs may differ in their last digits with the batch."""
    import bench as benches

    if not bench.expect("nothing lost", outcome.code == 0, f"{where}ended with {outcome.code}: {outcome.output[-300:]}"):
        return
    ours = benches.read_gold(outcome.folder)
    rows = [[{k: v for k, v in row.items() if not k.startswith("sampling/")} for row in each.rows] for each in (gold, ours)]
    difference = benches.Gold(rows=rows[0], weights=gold.weights).difference(benches.Gold(rows=rows[1], weights=ours.weights))
    bench.expect("nothing lost", not difference, f"{where}{difference}")


# --- faults in the trainer's process ------------------------------------------------------------------------------------------


def kill_in_generation(pids, number=signal.SIGKILL):
    """As soon as the first prompt of step 4 has been sent."""
    from rloo_cli.rollout.server_client import ServerClient

    call, asked = ServerClient.call, 0

    async def calling(self, method, path, body=None, **options):
        nonlocal asked
        asked += path == GENERATE and "seed" in body["sampling_params"] and body["sampling_params"]["n"] > 1
        if asked == 2 * SAVED + 1:
            asked += 1000
            kill(pids, number)
        return await call(self, method, path, body, **options)

    ServerClient.call = calling


def kill_in_update(pids):
    """After the first buffer of step 3's weights."""
    from rloo_cli.rollout.weight_transfer import GroupTransfer

    broadcast, sent = GroupTransfer._broadcast, 0

    async def broadcasting(self, group, tensor, answer):
        nonlocal sent
        sent += 1
        if sent == 2 * SAVED + 2:  # a buffer and its checksum each time, from version 0 on
            kill(pids)
        await broadcast(self, group, tensor, answer)

    GroupTransfer._broadcast = broadcasting


def kill_in_training(pids):
    """While step 3 is trained."""
    from rloo_cli.training.update import Updater

    update = Updater.update

    def updating(self, experience, uses, step):
        if step == SAVED:
            kill(pids)
        return update(self, experience, uses, step)

    Updater.update = updating


def kill(pids, number=signal.SIGKILL):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def announce_nothing():
    """Push the weights of step 3 without saying that they are new."""
    from rloo_cli.rollout.server_client import ServerClient

    call = ServerClient.call

    async def calling(self, method, path, body=None, **options):
        if path == "/finish_weight_update" and body == {"weight_version": str(SAVED)}:
            body = {}
        return await call(self, method, path, body, **options)

    ServerClient.call = calling


# --- a server that is started again when it dies ---------------------------------------------------------------------------------


def needs_vllm(bench):
    if importlib.util.find_spec("vllm") is None:
        bench.note("without vLLM: it is not installed")
        return False
    return True


class KeptServer:
    """`server_keeper.py`: `rloo vllm-serve` in a process of its own that starts it again. What it says lies in a file."""

    def __init__(self, folder, pause):
        self.folder = folder
        self.port = free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        self.set_pause(pause)
        command = [sys.executable, str(HERE / "server_keeper.py"), str(folder), str(folder / "model"), str(self.port)]
        self.process = subprocess.Popen(command)

    def set_pause(self, seconds):
        """Seconds between death and new start; -1 = never."""
        (self.folder / "pause.new").write_text(str(seconds))
        (self.folder / "pause.new").rename(self.folder / "pause")

    def _said(self):
        return json.loads((self.folder / "keeper.json").read_text())

    @property
    def pids(self):
        return self._said()["pids"]

    @property
    def engine(self):
        return self._said()["engine"]

    @property
    def starts(self):
        return self._said()["starts"]

    @property
    def last_start(self):
        return self._said()["seconds"]

    def wait_until_ready(self):
        deadline = time.monotonic() + START_SECONDS
        while not ((self.folder / "keeper.json").exists() and all(Path(f"/proc/{pid}").exists() for pid in self.pids)):
            assert self.process.poll() is None, "the keeper ended"
            assert time.monotonic() < deadline, "no server"
            time.sleep(0.1)


@contextlib.contextmanager
def kept_server(bench, *, pause):
    """A ready server of the scorecard's model, with random weights of its own until it is given others."""
    server = KeptServer(bench.root, pause)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.process.terminate()
        server.process.wait(60)
