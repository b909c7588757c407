"""A worker: reads one request after the other from its socket, calls reward functions, answers. Forked by `forkserver`.

request  {"rows": […], "state": [step, max_steps], "units": [{"functions": [0], "items": null, "seeds": [7]}, …]}
answer   {"results": […], "seconds": 0.01}, one for each unit, in order; `calls` tells what a result is
request  {"check_rows": 0, "columns": {…}}, one answer
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from rloo_cli.rewards import calls
from rloo_cli.rewards.calls import CallRows, LoadedReward
from rloo_cli.rewards.home import Home
from rloo_cli.rewards.processes import adopt_orphans, be_killed_first, default_signals, die_with, leave_signals_to_the_trainer
from rloo_cli.rewards.protocol import encode, read_message
from rloo_cli.types import TrainerState


def run(
    connection: socket.socket, rewards: Mapping[int, LoadedReward] | None, config: Mapping[str, Any], output: int, parent: int
) -> NoReturn:
    """Serve until the trainer hangs up. `rewards`: imported before the fork; None = imported here first."""
    code = 1
    try:
        os.setsid()
        die_with(parent)
        adopt_orphans()  # until it ends itself: then they are the fork server's
        be_killed_first()
        leave_signals_to_the_trainer()
        os.register_at_fork(after_in_child=default_signals)
        home = Home(folder=config["folder"], output=output)
        loaded = rewards if rewards is not None else load_rewards(connection, config["functions"])
        connection.sendall(encode({"ready": True, "pid": os.getpid()}))
        _serve(connection, loaded, home)
        code = 0
    except OSError:
        pass  # the trainer is gone, or user code closed our socket: either way nobody listens
    except BaseException:  # the edge: it must not climb into the fork server's code
        traceback.print_exc()
    finally:
        # Not sys.exit: the exit handlers of the user's modules have no time limit.
        os._exit(code)


def load_rewards(connection: socket.socket, functions: Sequence[Mapping[str, Any]]) -> dict[int, LoadedReward]:
    """The reward functions by their `index`. Each is announced before its import, so that whoever waits knows which one hangs.

    A failure is told and ends the process.
    """
    random.seed(0)  # what a module draws while it is imported is the same in every run
    loaded = {}
    for i, entry in enumerate(functions):
        connection.sendall(encode({"loading": i}))
        reward = calls.load_or_fail(entry)
        if isinstance(reward, dict):
            connection.sendall(encode({"failed": i, **reward}))
            os._exit(1)
        loaded[entry["index"]] = reward
    return loaded


def _serve(connection: socket.socket, rewards: Mapping[int, LoadedReward], home: Home) -> None:
    process = os.getpid()
    loop = asyncio.new_event_loop() if any(reward.is_async for reward in rewards.values()) else None
    while (request := read_message(connection)) is not None:
        for answer in _answers(request, rewards, home, loop):
            if os.getpid() != process:
                os._exit(0)  # user code forked, and its child came back from the call
            connection.sendall(encode(answer))


def _answers(request: Mapping[str, Any], rewards: Mapping[int, LoadedReward], home: Home, loop: asyncio.AbstractEventLoop | None) -> Any:
    if "check_rows" in request:
        home.restore()
        yield calls.check_rows(rewards[request["check_rows"]], request["columns"])
        return
    state = TrainerState(step=request["state"][0], max_steps=request["state"][1])
    for unit in request["units"]:
        home.restore()
        rows = expand_rows(request["rows"], unit["items"])
        chosen = [rewards[k] for k in unit["functions"]]
        started = time.perf_counter()
        results = _run_unit(chosen, rows, state, unit["seeds"], loop)
        yield {"results": results, "seconds": time.perf_counter() - started}


def _run_unit(
    chosen: Sequence[LoadedReward], rows: CallRows, state: TrainerState, seeds: Sequence[int], loop: asyncio.AbstractEventLoop | None
) -> list[dict[str, Any]]:
    async def together() -> list[dict[str, Any]]:
        return await asyncio.gather(*(calls.call_async(reward, rows, state, seed=seed) for reward, seed in zip(chosen, seeds, strict=True)))

    try:
        if loop is not None and all(reward.is_async for reward in chosen):
            return loop.run_until_complete(together())
        return [calls.call(reward, rows, state, seed=seed, loop=loop) for reward, seed in zip(chosen, seeds, strict=True)]
    except BaseException as error:  # what `call` lets through for the trainer's sake
        return [calls.failure(error) for _ in chosen]


def expand_rows(groups: Sequence[Mapping[str, Any]], items: Sequence[int] | None) -> CallRows:
    """The rows of these groups, one after the other, or those at the positions `items`."""
    flat = [(group, g) for group in groups for g in range(len(group["texts"]))]
    chosen = flat if items is None else [flat[i] for i in items]
    names = dict.fromkeys(name for group, _ in chosen for name in group["columns"])
    return CallRows(
        prompts=[group["prompt"] for group, _ in chosen],
        completions=[group["texts"][g] for group, g in chosen],
        is_chat=[not isinstance(group["prompt"], str) for group, _ in chosen],
        completion_ids=[group["ids"][g] if group["ids"] else [] for group, g in chosen],
        columns={name: [group["columns"].get(name) for group, _ in chosen] for name in names},
    )
