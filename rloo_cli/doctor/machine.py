"""Memory, cores, limits and clock of this machine, and of the container or batch job that this process is in. Linux."""

from __future__ import annotations

import contextlib
import resource
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from rloo_cli.doctor.check import Check, judged
from rloo_cli.run.environment import usable_cores

GIB = 1 << 30
LEAST_MEMORY = 2 * GIB
LEAST_SHARED = GIB
"""Docker gives 64 MiB unless told otherwise; NCCL and vLLM want more."""
LEAST_FILES = 4096
"""A server's client has hundreds of connections, a data set a descriptor a file."""
NOT_BEFORE = 1_767_225_600.0
"""1 January 2026: an earlier clock is wrong."""
CGROUPS = Path("/sys/fs/cgroup")
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108
MEETING_PORTS = {29500: "torch.distributed", 51216: "weight transfer to a vLLM server"}


def look_at_memory(root: Path = CGROUPS, own: Path = Path("/proc/self/cgroup")) -> Check:
    """Memory and cores, with the limits of the control group."""
    memory = psutil.virtual_memory()
    limit, quota = _memory_limit(root, own), _cpu_quota(root, own)
    total = min(memory.total, limit or memory.total)
    cores = usable_cores()
    words = [f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free", f"{cores} cores"]
    words += [f"this group may take {limit / GIB:.1f} GiB"] if limit is not None and limit < memory.total else []
    words += [f"and {quota:.1f} cores of time"] if quota is not None and quota < cores else []
    return judged(
        "memory",
        ", ".join(words),
        remedy="end what else runs here, or raise the limit of the container or job",
        warns=min(memory.available, total) < LEAST_MEMORY or (quota is not None and quota < 1),
        total_bytes=memory.total,
        available_bytes=memory.available,
        limit_bytes=limit,
        cores=cores,
        cpu_quota=quota,
    )


def look_at_shared_memory(folder: Path = SHARED_MEMORY) -> Check:
    """Shared memory, by which NCCL and vLLM's processes talk."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        return judged("shared mem", f"{folder}: {error.strerror}", remedy="mount a tmpfs there", warns=True)
    return judged(
        "shared mem",
        f"{folder}: {usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free",
        remedy="docker run --shm-size=8g (or --ipc=host); NCCL and vLLM fail without it",
        warns=usage.free < LEAST_SHARED,
        total_bytes=usage.total,
        free_bytes=usage.free,
    )


def look_at_limits(limits: Mapping[str, int] | None = None) -> Check:
    """What `ulimit` allows: open files, address space."""
    found = {"files": resource.RLIMIT_NOFILE, "address_space": resource.RLIMIT_AS, "locked": resource.RLIMIT_MEMLOCK}
    soft: dict[str, Any] = {name: resource.getrlimit(kind)[0] for name, kind in found.items()} if limits is None else dict(limits)
    few = 0 <= soft["files"] < LEAST_FILES
    narrow = soft["address_space"] != resource.RLIM_INFINITY
    words = [f"{_shown(soft['files'])} open files", f"address space {_shown(soft['address_space'])}"]
    remedy = " and ".join(
        [*(["ulimit -n 65536"] if few else []), *(["ulimit -v unlimited (CUDA reserves far more than it uses)"] if narrow else [])]
    )
    return judged("limits", ", ".join(words), remedy=remedy, warns=few or narrow, **soft)


def look_at_clock(now: float | None = None) -> Check:
    """Whether the time can be right."""
    now = time.time() if now is None else now
    return judged(
        "clock",
        time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now)),
        remedy="set the clock (timedatectl set-ntp true): certificates and locks depend on it",
        warns=now < NOT_BEFORE,
        seconds=now,
    )


def look_at_ports(ports: Mapping[int, str] = MEETING_PORTS) -> Check:
    """Whether processes can meet: a free port on the loopback, and those that are taken unless something else is said."""
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
    except OSError as error:
        return judged(
            "ports", f"no port can be opened on 127.0.0.1 ({error.strerror})", remedy="allow the loopback in this sandbox", fails=True
        )
    taken = {port: use for port, use in ports.items() if not _is_free(port)}
    said = f"{', '.join(map(str, ports))} are free" if not taken else ", ".join(f"{port} ({use}) is taken" for port, use in taken.items())
    remedy = "only where a run of several machines or a vLLM server needs it: --main-process-port, or vllm_group_port"
    return judged("ports", said, remedy=remedy, warns=bool(taken), taken=list(taken))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            probe.bind(("", port))
            return True
    return False


def _shown(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"


def _memory_limit(root: Path, own: Path) -> int | None:
    """Bytes that the control groups of this process may take together; None without a limit."""
    names = {"": "memory.max", "memory": "memory.limit_in_bytes"}
    found = [int(text) for text in _values(root, own, names) if text.isdecimal()]
    return min((limit for limit in found if limit < 1 << 60), default=None)


def _cpu_quota(root: Path, own: Path) -> float | None:
    """Cores' worth of time that they may take; None without a limit."""
    quotas = []
    for text in _values(root, own, {"": "cpu.max"}):
        quota, _, period = text.partition(" ")
        if quota.isdecimal() and period.isdecimal() and int(period):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _values(root: Path, own: Path, names: Mapping[str, str]) -> Iterator[str]:
    """What a file of these control groups says, from this process' own group up; `names`: by controller, empty for version 2."""
    for line in _text(own).splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        name = next((names[key] for key in controllers.split(",") if key in names), None)
        if name is None:
            continue
        top = root / controllers if controllers else root
        folder = top / path.lstrip("/")
        for group in [folder, *folder.parents]:
            yield _text(group / name).strip()
            if group == top:
                break


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
