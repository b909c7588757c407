"""How the launchers of several machines keep in touch: each counts up its own beat in the store, and reads what the others have to tell.

All of it happens in a thread with a connection of its own, so that whoever waits for ranks never waits for the network. What is told goes
into one list, in the order in which the store took it, which is the same on every machine.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import TCPStore

logger = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
COUNT = "told"

Told = Mapping[str, Any]
"""What a launcher tells: `kind`, `machine`, and what belongs to the kind."""


class Contact:
    """This launcher's line to the others, for the block.

    Args:
        connect: makes the thread's connection to the store.
        machine: which one this is.
        num_machines: of how many.
    """

    def __init__(self, connect: Callable[[], TCPStore], *, machine: int, num_machines: int) -> None:
        self._connect = connect
        self._machine = machine
        self._others = [other for other in range(num_machines) if other != machine]
        self._outgoing: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._incoming: queue.SimpleQueue[Told] = queue.SimpleQueue()
        self._unsent = 0
        self._heard: dict[int, tuple[bytes, float]] = {}
        self._wake, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._talk, name="contact with other machines", daemon=True)
        self.broken: str | None = None
        """Why the store cannot be reached any more; None = it can."""

    def __enter__(self) -> Contact:
        self.listen_anew()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closing.set()
        self._wake.set()
        self._thread.join(timeout=2 * BEAT_SECONDS)  # a thread that waits for a machine that is gone is left behind

    def tell(self, kind: str, **values: Any) -> None:
        """Put something into the list; returns at once."""
        self._unsent += 1
        self._outgoing.put(json.dumps({"kind": kind, "machine": self._machine, **values}))
        self._wake.set()

    def told(self) -> list[Told]:
        """What was put into the list since the last time, by this launcher as well."""
        news = []
        while not self._incoming.empty():
            news.append(self._incoming.get())
        return news

    def listen_anew(self) -> None:
        """Count silence from now on."""
        now = time.monotonic()
        self._heard = {other: (self._heard.get(other, (b"", now))[0], now) for other in self._others}

    def silence(self) -> dict[int, float]:
        """Seconds since each other launcher was last heard."""
        now = time.monotonic()
        return {other: now - when for other, (_, when) in self._heard.items()}

    def give_up(self, why: str) -> None:
        """Take the store for gone, though the thread may still wait for it."""
        self.broken = self.broken or why

    def is_all_sent(self) -> bool:
        """Whether everything that was to be told is in the list, or never will be."""
        return self._unsent == 0 or self.broken is not None

    def _talk(self) -> None:
        beat, read = 0, 0
        try:
            store = self._connect()
            while not self._closing.is_set() and self.broken is None:
                self._wake.clear()
                self._send(store)
                store.set(_beat(self._machine), str(beat))
                read = self._read(store, read)
                self._listen(store)
                beat += 1
                self._wake.wait(BEAT_SECONDS)
        except RuntimeError as error:  # torch's own kinds are such
            self.give_up((str(error).splitlines() or [""])[0])
            logger.info("no contact any more: %s", self.broken)

    def _send(self, store: TCPStore) -> None:
        while not self._outgoing.empty():
            text = self._outgoing.get()
            store.set(f"{COUNT}/{store.add(COUNT, 1)}", text)
            self._unsent -= 1

    def _read(self, store: TCPStore, read: int) -> int:
        """How many of the list have been read now."""
        count = store.add(COUNT, 0)
        while read < count and store.check([f"{COUNT}/{read + 1}"]):  # whoever took a number may not have written yet
            read += 1
            self._incoming.put(json.loads(store.get(f"{COUNT}/{read}")))
        return read

    def _listen(self, store: TCPStore) -> None:
        for other in self._others:
            if not store.check([_beat(other)]):
                continue
            beat, heard = store.get(_beat(other)), self._heard[other]
            if beat != heard[0]:
                self._heard[other] = (beat, time.monotonic())


def _beat(machine: int) -> str:
    return f"beat/{machine}"
