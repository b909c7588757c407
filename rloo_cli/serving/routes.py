"""The routes that are ours: what the server is and serves, who trains with it, and which weights it has.

GET    /rloo/info              {"rloo", "vllm", "torch", "model", "config_hash", "vocab_size", "dtype", "max_model_len", "devices",
                                "world_size", "weights_version", "instance", "lease"}
POST   /rloo/lease             {"owner": "host:pid:folder", "seconds": 60}  → 200, or 409 naming the owner
DELETE /rloo/lease             {"owner": …} or nothing                      → 200, or 409
POST   /rloo/weights_version   {"version": 3}                               → 200
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import math
import secrets
from typing import Any

from rloo_cli import __version__
from rloo_cli.serving.lease import LONGEST_OWNER, LONGEST_SECONDS, Lease

ENGINE_SECONDS = 30.0
"""How long the engine may take to tell its weights' version; it answers between two steps."""
UNSET_VERSION = 0
"""vLLM calls the weights it loaded at the start `default`; a trainer begins to count there."""


class BadRequest(Exception):
    """A body that these routes cannot use; becomes a 400."""


class Routes:
    """Answers (status, document) to requests for our routes."""

    def __init__(self) -> None:
        self.instance = secrets.token_hex(8)
        """Another one after every start, so that a trainer notices a server that came back with the old weights."""
        self.lease = Lease()
        self._facts: dict[str, Any] | None = None

    async def answer(self, method: str, path: str, body: bytes, state: Any) -> tuple[int, dict[str, Any]]:
        """What goes back; `state` is the application's, where vLLM keeps its engine."""
        try:
            if path == "/rloo/info":
                return await self._info(state)
            if path == "/rloo/weights_version":
                return await self._set_version(_document(body), state)
            return self._release(_document(body or b"{}")) if method == "DELETE" else self._take(_document(body))
        except BadRequest as error:
            return 400, {"error": str(error)}
        except TimeoutError:
            return 503, {"error": f"the engine did not answer within {ENGINE_SECONDS:.0f} s"}

    async def _info(self, state: Any) -> tuple[int, dict[str, Any]]:
        if self._facts is None:
            self._facts = server_facts(state.engine_client)
        version = await asyncio.wait_for(state.engine_client.get_weight_version(), ENGINE_SECONDS)
        return 200, {
            **self._facts,
            "weights_version": int(version) if str(version).isdecimal() else UNSET_VERSION,
            "instance": self.instance,
            "lease": self.lease.describe(),
        }

    async def _set_version(self, document: dict[str, Any], state: Any) -> tuple[int, dict[str, Any]]:
        version = document.get("version")
        if not isinstance(version, int) or isinstance(version, bool) or version < 0:
            raise BadRequest("version: a number from 0 on")
        await asyncio.wait_for(state.engine_client.update_weight_version(str(version)), ENGINE_SECONDS)
        return 200, {"weights_version": version}

    def _take(self, document: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        owner, seconds = _owner(document), document.get("seconds")
        if owner is None:
            raise BadRequest("owner: a text")
        if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 < seconds <= LONGEST_SECONDS:
            raise BadRequest(f"seconds: a number up to {LONGEST_SECONDS:.0f}")
        if not self.lease.take(owner, seconds):
            return 409, {"error": f"{self.lease.owner} trains with this server", "lease": self.lease.describe()}
        return 200, {"lease": self.lease.describe(), "instance": self.instance}

    def _release(self, document: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if not self.lease.release(_owner(document)):
            return 409, {"error": f"{self.lease.owner} trains with this server", "lease": self.lease.describe()}
        return 200, {"lease": None}


def _document(body: bytes) -> dict[str, Any]:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest("the body is not JSON") from error
    if not isinstance(document, dict):
        raise BadRequest("the body is not a JSON object")
    if any(isinstance(value, float) and not math.isfinite(value) for value in document.values()):
        raise BadRequest("NaN and Infinity are no numbers")
    return document


def _owner(document: dict[str, Any]) -> str | None:
    owner = document.get("owner")
    if owner is not None and not (isinstance(owner, str) and 0 < len(owner) <= LONGEST_OWNER and owner.isprintable()):
        raise BadRequest(f"owner: a text of at most {LONGEST_OWNER} characters")
    return owner


def server_facts(engine: Any) -> dict[str, Any]:
    """What stays the same as long as the server lives, from vLLM's engine client."""
    import vllm

    from rloo_cli.serving.identity import config_hash

    model = engine.model_config
    return {
        "rloo": __version__,
        "vllm": vllm.__version__,
        "torch": importlib.metadata.version("torch"),
        "model": model.model,
        "config_hash": config_hash(model.hf_config.to_dict()),
        "vocab_size": model.get_vocab_size(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "max_model_len": model.max_model_len,
        "devices": _device_ids(engine.vllm_config.parallel_config.world_size_across_dp),
        "world_size": engine.vllm_config.parallel_config.world_size_across_dp,
    }


def _device_ids(count: int) -> list[str]:
    """The UUIDs of the GPUs that the workers use; empty on CPUs."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return []
    return [str(current_platform.get_device_uuid(device)) for device in range(count)]
