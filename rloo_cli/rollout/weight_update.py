"""One weight update in the words of vLLM's own protocol (0.32): the only file that knows its routes and their order.

    pause?mode=keep → start_weight_update → update_weights → finish_weight_update(weight_version) → reset_prefix_cache → resume

It has changed shape before; `server_handshake.VLLM_VERSIONS` says for which versions this is right.
"""

from __future__ import annotations

from typing import Any

from rloo_cli.errors import EngineError
from rloo_cli.rollout.server_client import ServerClient
from rloo_cli.rollout.weight_transfer import Tensors, Transfer

STEP_SECONDS = 30.0
"""For each step but the transfer itself; requests of others may have to come to the end of a decode step first."""


async def push_weights(client: ServerClient, transfer: Transfer, tensors: Tensors, *, version: int) -> None:
    """Give the server these weights under this version; it generates with them afterwards.

    A failure leaves the server paused, so that nothing runs on half of the weights; the next push mends it.

    Raises:
        TransientFault: the connection was lost, or a wait took too long.
        EngineError: the server refused; its words are in the message.
    """
    await _step(client, "/pause?mode=keep")
    await _step(client, "/start_weight_update")
    await transfer.send(client, tensors)
    await _step(client, "/finish_weight_update", {"weight_version": str(version)})
    transfer.sent()
    await _reset_prefix_cache(client)
    await _step(client, "/resume")


async def _reset_prefix_cache(client: ServerClient) -> None:
    document = await _step(client, "/reset_prefix_cache?reset_running_requests=true")
    if not isinstance(document, dict) or document.get("success") is not True:
        raise EngineError(
            f"vLLM server {client.address} did not drop its prefix cache after an update, and would answer from old keys and values: restart it"
        )


async def _step(client: ServerClient, path: str, body: Any = None) -> Any:
    return await client.call("POST", path, body, seconds=STEP_SECONDS)
