"""A vLLM server of `rloo vllm-serve`: whether it answers, takes our key, speaks our protocol and generates. Nobody's lease is touched."""

from __future__ import annotations

import asyncio
from typing import Any

from rloo_cli.doctor.check import Check, judged
from rloo_cli.errors import RlooError

SECONDS = 5.0
TOKEN = 0
"""Which every vocabulary has."""


def look_at_server(base_url: str, key: str | None) -> Check:
    """The server at an address."""
    from rloo_cli.rollout.server_client import TransientFault

    try:
        said, facts = asyncio.run(_ask(base_url, key))
    except TransientFault as fault:
        remedy = "is it up (its log says so), and the address right? `rloo vllm-serve --model M` starts one"
        return judged("server", f"{base_url}: {fault.cause}", remedy=remedy, fails=True)
    except RlooError as error:
        return judged("server", error.message, remedy="docs/vllm.md tells how trainer and server go together", fails=True)
    return judged("server", f"{base_url}: {said}", **facts)


async def _ask(base_url: str, key: str | None) -> tuple[str, dict[str, Any]]:
    from rloo_cli.rollout.server_client import ServerClient
    from rloo_cli.rollout.server_handshake import check_info, probe_generation, read_info

    client = ServerClient(base_url, key)
    try:
        info = await read_info(client, seconds=SECONDS)
        check_info(
            client.address, info, info.identity, max_model_length=None, own_devices=()
        )  # the versions: the model is the recipe's affair
        await probe_generation(client, TOKEN, seconds=SECONDS)
    finally:
        await client.close()
    words = f"vLLM {info.vllm}, rloo {info.rloo}, serves {info.model} in {info.identity.dtype}, up to {info.max_model_len} tokens"
    return f"{words}; {'the key is right' if key else 'no key was asked for'}, and it generates", {
        "vllm": info.vllm,
        "rloo": info.rloo,
        "model": info.model,
        "dtype": info.identity.dtype,
        "max_model_len": info.max_model_len,
        "weights_version": info.weights_version,
    }
