"""The trainer's side of a weight transfer: NCCL between GPUs, gloo between CPUs, or a file in a folder that both sides see.

A transfer joins the server's workers (again after each restart of the server) and sends all weights in one go. The server's HTTP answer
and the broadcast are watched together, with a deadline: where the server refuses, its words come back at once, and where it is gone the
broadcast is given up. `weight_file.py` has the way by a file; `serving/transfer.py` is the other side.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from datetime import timedelta
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from rloo_cli.errors import EngineError
from rloo_cli.rollout.server_client import ServerClient, TransientFault, leave
from rloo_cli.rollout.weight_group import MEET_SECONDS, GroupPlace, from_trainer, make_group, own_address
from rloo_cli.rollout.weight_wire import Plan, checksum, make_plan, packed

Tensors = Sequence[tuple[str, torch.Tensor, torch.dtype]]

UPDATE_SECONDS = 30.0
BYTES_A_SECOND = 20e6
"""A network slower than this is taken for a broken one; added to UPDATE_SECONDS for what is sent."""
POLL_SECONDS = 0.002
GRACE_SECONDS = 2.0  # after a failed broadcast, for the server's own words


class Transfer(Protocol):
    """One way for weights to reach the server."""

    name: str

    async def join(self, client: ServerClient, world_size: int) -> None:
        """Get in touch with all `world_size` workers of the server."""

    async def send(self, client: ServerClient, tensors: Tensors) -> None:
        """Send every tensor, between the server's start_weight_update and finish_weight_update."""

    def sent(self) -> None:
        """Hear that the server uses what was sent."""

    def close(self) -> None:
        """Release connections and files."""


class GroupTransfer:
    """A broadcast within a process group of this trainer (rank 0) and the server's workers."""

    def __init__(self, backend: str, *, address: str, port: int, device: torch.device) -> None:
        self.name = backend
        server = urlsplit(address)
        self._host, self._port, self._device = own_address(server.hostname, server.port or 80), port, device
        self._store: dist.TCPStore | None = None
        self._group: Any = None

    async def join(self, client: ServerClient, world_size: int) -> None:
        """Meet the workers at a port of this machine.

        Raises:
            TransientFault: they did not come in time, or the server declined.
            EngineError: the port is taken.
        """
        self._group = None
        store, prefix = self._listen(), secrets.token_hex(8)
        place = GroupPlace(transport=self.name, host=self._host, port=store.port, prefix=prefix, world_size=world_size + 1)
        body = {"init_info": asdict(place)}
        answer = asyncio.ensure_future(client.call("POST", "/init_weight_transfer_engine", body, seconds=MEET_SECONDS + GRACE_SECONDS))
        meeting = in_thread(lambda: make_group(place, store, rank=0, device=self._device))
        try:
            await _first_failure(
                answer, asyncio.wrap_future(meeting), f"the weight transfer's group ({self.name}, {self._host}:{store.port})"
            )
        finally:
            leave(answer)
        self._group = meeting.result()

    async def send(self, client: ServerClient, tensors: Tensors) -> None:
        """Broadcast buffer by buffer while the server's answer is watched."""
        assert self._group is not None
        group, self._group = self._group, None  # unusable unless all of it goes well
        plan = make_plan(tensors)
        seconds = update_seconds(plan)
        answer = asyncio.ensure_future(client.call("POST", "/update_weights", {"update_info": {"plan": plan.document()}}, seconds=seconds))
        try:
            async with asyncio.timeout(seconds):
                for buffer in packed(tensors, plan, self._device):
                    total = torch.tensor([checksum(buffer)], device=self._device)
                    await self._broadcast(group, buffer, answer)
                    await self._broadcast(group, total, answer)
                await answer
        except TimeoutError as error:
            raise TransientFault(f"the server took no weights for {seconds:.0f} s") from error
        finally:
            leave(answer)
        self._group = group

    def sent(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Drop group and store."""
        self._group = self._store = None

    def _listen(self) -> dist.TCPStore:
        """The store where the group meets; it listens at the one address that the server reaches."""
        if self._store is None:
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            listener = socket.socket(family, socket.SOCK_STREAM)
            try:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind((self._host, self._port))
            except OSError as error:
                listener.close()
                raise EngineError(
                    f"the weight transfer cannot listen at {self._host}:{self._port} ({error.strerror}): set vllm_group_port to a free port"
                ) from error
            port = listener.getsockname()[1]
            self._store = dist.TCPStore(
                self._host,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=MEET_SECONDS),
                master_listen_fd=listener.detach(),
            )
        return self._store

    async def _broadcast(self, group: Any, tensor: torch.Tensor, answer: asyncio.Future[Any]) -> None:
        try:
            work = group.broadcast([tensor], from_trainer())
            answered: float | None = None
            while not work.is_completed():
                if answer.done():
                    answer.result()
                    # The last worker may answer before gloo tells us that our own part is done.
                    answered = answered or time.monotonic()
                    if time.monotonic() - answered > GRACE_SECONDS:
                        raise TransientFault("the server answered before it had all weights")
                await asyncio.sleep(POLL_SECONDS)
            work.wait()
        except RuntimeError as error:
            await _own_words(answer)
            raise TransientFault(f"the broadcast of weights broke off ({first_line(error)})") from error


def update_seconds(plan: Plan) -> float:
    """The deadline of an update."""
    return UPDATE_SECONDS + sum(plan.sizes) / BYTES_A_SECOND


def in_thread(work: Callable[[], Any]) -> Future[Any]:
    """The future of work that cannot be broken off; a thread that nobody waits for does not hold the program up."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()  # from here on nobody can cancel it

    def run() -> None:
        try:
            result = work()
        except RuntimeError as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, daemon=True, name="rloo-weight-transfer").start()
    return future


def first_line(error: BaseException) -> str:
    """The first line of an error of torch's, not too long."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]


async def _first_failure(answer: asyncio.Future[Any], meeting: asyncio.Future[Any], what: str) -> None:
    """Return when both are done, or raise as soon as one has failed."""
    started = time.monotonic()
    pending: set[asyncio.Future[Any]] = {answer, meeting}
    try:
        while pending:
            left = max(0.0, MEET_SECONDS + GRACE_SECONDS - (time.monotonic() - started))
            done, pending = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise TransientFault(f"{what} did not come together within {MEET_SECONDS:g} s")
            for future in done:
                future.result()
    except RuntimeError as error:
        await _own_words(answer)
        raise TransientFault(f"{what} did not come together ({first_line(error)})") from error
    finally:
        leave(meeting)


async def _own_words(answer: asyncio.Future[Any]) -> None:
    """Raise what the server says about a failure, if it says it soon."""
    done, _ = await asyncio.wait({answer}, timeout=GRACE_SECONDS)
    if done:
        answer.result()


__all__ = ["GroupTransfer", "Transfer", "update_seconds"]
