"""Where files go: the folder of runs, with its speed and space, and the cache of the Hugging Face hub."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from rloo_cli.doctor.check import Check, judged
from rloo_cli.errors import StorageError
from rloo_cli.run import atomic

GIB = 1 << 30
SAMPLE = 16 << 20
"""Bytes that are written, made durable and removed again."""
SLOW = 20e6
"""Bytes a second below which checkpoints keep a run waiting."""
LEAST_SPACE, LITTLE_SPACE = GIB // 2, 10 * GIB
SKEW = 5.0
"""Seconds by which a file server's clock may be off."""
HOME_CACHE = "~/.cache/huggingface"
OFF = ("", "0", "false", "no", "off")


def look_at_output(folder: Path) -> Check:
    """Whether the folder of runs can be written, how fast, and how much there is room for. One file is written and removed."""
    place = nearest(folder)
    try:
        started = time.perf_counter()
        file = atomic.temporary_path(place / "doctor")
        atomic.write_file(file, os.urandom(SAMPLE))  # random: some file systems compress
        seconds = time.perf_counter() - started
        skew = file.stat().st_mtime - time.time() + 0.0
        atomic.remove_file(file)
        usage = shutil.disk_usage(place)
    except (StorageError, OSError) as error:
        return judged("output", f"{place}: {error}", remedy="make it writable, or choose another --output-dir", fails=True)
    speed = SAMPLE / max(seconds, 1e-9)
    words = f"{place}: {speed / 1e6:,.0f} MB/s written and made durable, {usage.free / GIB:,.1f} GiB free"
    off = f", whose file server's clock is {abs(skew):.0f} s {'ahead' if skew > 0 else 'behind'}" if abs(skew) > SKEW else ""
    return judged(
        "output",
        words + off,
        remedy=_output_remedy(usage.free, speed, has_skew=bool(off)),
        fails=usage.free < LEAST_SPACE,
        warns=usage.free < LITTLE_SPACE or speed < SLOW or bool(off),
        bytes_per_second=round(speed),
        free_bytes=usage.free,
        clock_skew_seconds=round(skew, 1),
    )


def _output_remedy(free: int, speed: float, *, has_skew: bool) -> str:
    if free < LITTLE_SPACE:
        return "make room: a checkpoint of a model in float32 takes 12 bytes a parameter (save_total_limit bounds their number)"
    if has_skew:
        return "set both clocks by NTP: which of two runs is alive is told by times"
    return "a larger save_steps saves less often; a local disk is faster" if speed < SLOW else ""


def nearest(folder: Path) -> Path:
    """The folder itself, or the nearest above it that exists."""
    folder = folder.absolute()
    return next(path for path in [folder, *folder.parents] if path.is_dir())


def look_at_hub(environ: Mapping[str, str]) -> Check:
    """The cache of models and data, whether the hub may be asked, and whether there is a token; never the token."""
    home = Path(environ.get("HF_HOME") or HOME_CACHE).expanduser()
    cache = Path(environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE") or home / "hub").expanduser()
    is_offline = any(environ.get(name, "").lower() not in OFF for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    has_token = bool(environ.get("HF_TOKEN") or environ.get("HUGGING_FACE_HUB_TOKEN")) or (home / "token").is_file()
    place = nearest(cache)
    is_closed = not os.access(place, os.W_OK)
    free = shutil.disk_usage(place).free
    words = [
        f"cache {cache}, {free / GIB:,.1f} GiB free",
        "offline: from the cache alone" if is_offline else "offline mode not set (whether the hub answers was not tried)",
        f"{'a' if has_token else 'no'} token",
    ]
    remedy = f"{place} cannot be written: set HF_HOME to a folder that can" if is_closed else "make room, or set HF_HOME to a larger disk"
    return judged(
        "hub",
        ", ".join(words),
        remedy=remedy,
        warns=(is_closed or free < LITTLE_SPACE) and not is_offline,
        cache=str(cache),
        offline=is_offline,
        has_token=has_token,
        free_bytes=free,
    )
