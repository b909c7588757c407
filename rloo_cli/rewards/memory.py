"""How much memory there is for reward workers, and how much a worker and its children hold. Linux."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator
from pathlib import Path

LEAST_SHARE = 2 * 2**30
CGROUPS = Path("/sys/fs/cgroup")
_OWN = re.compile(rb"^(?:RssAnon|RssShmem):\s+(\d+) kB", re.MULTILINE)
_OWN_SHARE = re.compile(rb"^(?:Pss_Anon|Pss_Shmem):\s+(\d+) kB", re.MULTILINE)


def memory_share(num_workers: int) -> int:
    """Bytes that a worker may hold: what is available now, the trainer's part taken off, divided by the workers; at least 2 GiB."""
    import psutil

    available = min([psutil.virtual_memory().available, *_left_in_cgroups()])
    return max(LEAST_SHARE, available // (num_workers + 1))


def _left_in_cgroups() -> Iterator[int]:
    """What the container or batch job that this process runs in may still take, for each group above it that has a limit."""
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.decode().split(":", 2)
        root, limit, usage = CGROUPS, "memory.max", "memory.current"
        if controllers:
            root, limit, usage = CGROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        if controllers in ("", "memory"):
            folder = root / path.lstrip("/")
            for group in [folder, *folder.parents]:
                most, used, statistics = (_read(group / name) for name in (limit, usage, "memory.stat"))
                if most.strip().isdigit() and used.strip().isdigit():
                    cache = re.search(rb"^(?:total_)?inactive_file (\d+)", statistics, re.MULTILINE)  # goes when something else needs it
                    yield max(0, int(most) - int(used) + (int(cache[1]) if cache else 0))
                if group == root:
                    break


def held_by_family(pid: int) -> int:
    """Bytes of memory that a process and all its descendants hold: private or shared among processes, not files that they map."""
    return _sum(_family(pid), "status", _OWN)


def fair_held_by_family(pid: int) -> int:
    """The same, what several processes hold together counted once. Slower: the kernel looks at every page."""
    return _sum(_family(pid), "smaps_rollup", _OWN_SHARE)


def _family(pid: int) -> list[int]:
    """The process and its descendants; a worker adopts its orphans, so that they are among them."""
    family = [pid]
    for member in family:
        for tasks in _threads(member):
            family += [int(word) for word in _read(tasks / "children").split()]
    return family


def _threads(pid: int) -> list[Path]:
    with contextlib.suppress(OSError):
        return list(Path(f"/proc/{pid}/task").iterdir())
    return []


def _sum(family: Collection[int], file: str, pattern: re.Pattern[bytes]) -> int:
    return sum(1024 * int(count) for pid in family for count in pattern.findall(_read(Path(f"/proc/{pid}/{file}"))))


def _read(path: Path) -> bytes:
    """What a file holds; nothing where it cannot be read, as after the end of a process."""
    with contextlib.suppress(OSError):
        return path.read_bytes()
    return b""
