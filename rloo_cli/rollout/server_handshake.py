"""What has to be true of a vLLM server before anything is trained with it, and again whenever another process answers at its address."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rloo_cli import __version__
from rloo_cli.errors import EngineError
from rloo_cli.rollout.server_client import LeaseTakenError, ServerClient, TransientFault

VLLM_VERSIONS = ("0.32",)
"""Whose weight-update protocol `vllm_server.py` and `serving/transfer.py` speak; it has changed shape before."""
LEASE_SECONDS = 60
PROBE_SECONDS = 20.0
"""For one token: a server whose engine hangs still answers /health."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """The model as one side knows it.

    Example: `ModelIdentity(config_hash="9f…", vocab_size=260, dtype="float32")`
    """

    config_hash: str
    """Of the canonical config; see serving/identity.py."""
    vocab_size: int
    dtype: str
    """What the server computes in, `bfloat16`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """What /rloo/info says."""

    rloo: str
    vllm: str
    model: str
    identity: ModelIdentity
    max_model_len: int
    devices: tuple[str, ...]
    """UUIDs of its GPUs; empty on CPUs."""
    world_size: int
    """Workers that take part in a weight transfer."""
    weights_version: int
    instance: str
    """Names this process of the server: another one has other weights."""


async def read_info(client: ServerClient, *, seconds: float) -> ServerInfo:
    """What the server says of itself.

    Raises:
        TransientFault: it does not answer, or is not up yet.
        EngineError: it is a server of another kind, or the key is wrong.
    """
    try:
        document = await client.call("GET", "/rloo/info", seconds=seconds)
    except EngineError as error:
        if "HTTP 404" not in error.message:
            raise
        raise EngineError(
            f"what listens at {client.address} was not started by `rloo vllm-serve` (it has no /rloo/info): "
            "start the server with `rloo vllm-serve --model …`, or correct the address"
        ) from error
    try:
        return _info(document)
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(
            f"what listens at {client.address} answers /rloo/info with something else than a server of `rloo vllm-serve` does ({error!r:.80})"
        ) from error


def _info(document: Any) -> ServerInfo:
    texts = {name: document[name] for name in ("rloo", "vllm", "model", "config_hash", "dtype", "instance")}
    numbers = {name: document[name] for name in ("vocab_size", "max_model_len", "world_size", "weights_version")}
    devices = document["devices"]
    if not all(isinstance(value, str) for value in texts.values()) or not all(type(value) is int for value in numbers.values()):
        raise TypeError("a field of another type")
    if not isinstance(devices, list) or not all(isinstance(device, str) for device in devices):
        raise TypeError("devices")
    return ServerInfo(
        rloo=texts["rloo"],
        vllm=texts["vllm"],
        model=texts["model"],
        identity=ModelIdentity(config_hash=texts["config_hash"], vocab_size=numbers["vocab_size"], dtype=texts["dtype"]),
        max_model_len=numbers["max_model_len"],
        devices=tuple(devices),
        world_size=numbers["world_size"],
        weights_version=numbers["weights_version"],
        instance=texts["instance"],
    )


def check_info(address: str, info: ServerInfo, ours: ModelIdentity, *, max_model_length: int | None, own_devices: Sequence[str]) -> None:
    """Nothing, where this server can serve this trainer.

    Raises:
        EngineError: it cannot; both sides of the difference are named.
    """
    problem = (
        _wrong_version(info) or _wrong_model(info, ours) or _too_short(info, max_model_length) or _shared_devices(info.devices, own_devices)
    )
    if problem:
        raise EngineError(f"vLLM server {address} {problem}")


def _wrong_version(info: ServerInfo) -> str | None:
    if ".".join(info.vllm.split(".")[:2]) not in VLLM_VERSIONS:
        return (
            f"runs vLLM {info.vllm:.40}, whose weight updates this rloo does not speak (it speaks those of {', '.join(VLLM_VERSIONS)}): "
            "install `rloo-cli[vllm]` there"
        )
    if info.rloo != __version__:
        return f"was started by rloo {info.rloo:.40}, this is rloo {__version__}: use the same version on both sides"
    return None


EXACT_DTYPE = "float32"
"""What a server may compute in whatever the trainer samples in: it loses nothing."""


def _wrong_model(info: ServerInfo, ours: ModelIdentity) -> str | None:
    theirs = info.identity
    start = f"serves another model ({info.model:.200})"
    if theirs.vocab_size != ours.vocab_size:
        return f"{start}: its vocabulary has {theirs.vocab_size} tokens, the trainer's {ours.vocab_size}; start it with the model of the recipe"
    if theirs.config_hash != ours.config_hash:
        return f"{start}: its config's hash is {theirs.config_hash:.12}, the trainer's {ours.config_hash:.12}; start it with the model of the recipe"
    if theirs.dtype not in (ours.dtype, EXACT_DTYPE):
        return f"computes in {theirs.dtype:.20}, the trainer expects {ours.dtype}: start it with --dtype {ours.dtype}"
    return None


def _too_short(info: ServerInfo, max_model_length: int | None) -> str | None:
    if max_model_length is None or info.max_model_len >= max_model_length:
        return None
    return (
        f"takes {info.max_model_len} tokens at most, the recipe needs {max_model_length}: start it with --max-model-len {max_model_length}"
    )


def _shared_devices(theirs: Sequence[str], ours: Sequence[str]) -> str | None:
    shared = sorted(set(theirs) & set(ours))
    if not shared:
        return None
    return (
        f"runs on a GPU that the trainer uses too ({', '.join(shared)}): give each its own, "
        "such as `CUDA_VISIBLE_DEVICES=0 rloo train …` and `CUDA_VISIBLE_DEVICES=1 rloo vllm-serve …`; "
        "on a single GPU use `vllm_mode: colocate`"
    )


def own_devices() -> tuple[str, ...]:
    """UUIDs of the GPUs that this process sees; never run where there is none."""
    return tuple(str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count()))


async def take_lease(client: ServerClient, owner: str) -> None:
    """Make this trainer the only one that uses the server, for a minute; a lease of a process of this machine that ended is taken over.

    Raises:
        EngineError: another trainer holds it.
    """
    body = {"owner": owner, "seconds": LEASE_SECONDS}
    try:
        await client.call("POST", "/rloo/lease", body)
    except LeaseTakenError as taken:
        if not _has_ended(taken.owner):
            raise EngineError(
                f"vLLM server {client.address} serves another trainer ({taken.owner}): end that one first, or start a second server"
            ) from taken
        await client.call("DELETE", "/rloo/lease", {"owner": taken.owner})
        await client.call("POST", "/rloo/lease", body)


def _has_ended(owner: str) -> bool:
    """Whether `host:pid:folder` names a process of this machine that is no more."""
    host, _, rest = owner.partition(":")
    pid = rest.partition(":")[0]
    if host != socket.gethostname() or not pid.isdecimal():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    return False


async def probe_generation(client: ServerClient, token: int, *, version: int | None = None, seconds: float = PROBE_SECONDS) -> None:
    """One token, or a fault that says that the server generates nothing, whatever its /health says; by the weights of `version`, if given.

    Raises:
        TransientFault: no token came in time, or one by other weights.
    """
    body = {"token_ids": [token], "sampling_params": {"n": 1, "max_tokens": 1, "temperature": 0.0, "detokenize": False}}
    try:
        document = await client.call("POST", "/inference/v1/generate", body, seconds=seconds)
    except TransientFault as fault:
        raise TransientFault(f"it is up, but does not generate: {fault.cause}") from fault
    choices = document.get("choices") if isinstance(document, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict) or not choices[0].get("token_ids"):
        raise TransientFault("it is up, but answered no token when asked for one")
    spans = choices[0].get("weight_versions")
    if version is not None and not (isinstance(spans, list) and [_version(span) for span in spans] == [str(version)]):
        raise TransientFault(f"it is up, but does not generate by the weights of step {version} yet")


def _version(span: Any) -> str:
    return str(span.get("version")) if isinstance(span, dict) else ""


__all__ = ["ModelIdentity", "ServerInfo", "check_info", "own_devices", "probe_generation", "read_info", "take_lease"]
