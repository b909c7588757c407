"""Generation by a vLLM server in another process, on other devices, or on another machine. Imports no vLLM.

What it promises: every completion was made whole by the weights given last, or the batch fails; every wait has a deadline and can be left;
a server that comes back within the budget is joined again, given the weights again, and asked again for what is missing.

Of several ranks each asks for its own share; rank 0 alone holds the lease and gives the weights, and stays at hand for a server that comes
back until every rank has what it asked for.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from rloo_cli.errors import EngineError
from rloo_cli.rollout.engine import GenerationRequest, OnGroup, RandomKey, SamplingParams
from rloo_cli.rollout.peers import Alone, Peers, arrive
from rloo_cli.rollout.server_answers import WrongVersionError
from rloo_cli.rollout.server_client import ServerClient, TransientFault
from rloo_cli.rollout.server_generation import Generation, group_request
from rloo_cli.rollout.server_handshake import ModelIdentity, ServerInfo, check_info, own_devices, probe_generation, read_info
from rloo_cli.rollout.server_lease import LeaseKeeper
from rloo_cli.rollout.server_outage import Outage
from rloo_cli.rollout.vllm_sampling import check_sampling
from rloo_cli.rollout.weight_file import FileTransfer
from rloo_cli.rollout.weight_transfer import GroupTransfer, Transfer
from rloo_cli.rollout.weight_update import push_weights
from rloo_cli.rollout.weight_wire import copied_tensors, dtype_of, unique_tensors
from rloo_cli.types import Completion

logger = logging.getLogger(__name__)

T = TypeVar("T")

TICK_SECONDS = 0.05
"""How often the caller is asked whether to stop, and finished groups go on to their rewards."""
INFO_SECONDS = 15.0
"""For /rloo/info, which the server's engine answers between two of its steps."""
WATCH_SECONDS, ARRIVAL_SECONDS = 2.0, 0.01
"""How often rank 0, while it waits for the others, looks whether the server is still the same, and whether they are there."""
REFUSALS = 2
"""Of the same weights by a server whose engine answers in between."""


class VllmServerEngine:
    """Implements `engine.Engine`; `connect` comes first, before the trainer's own model is loaded."""

    def __init__(
        self,
        *,
        base_url: str,
        key: str | None,
        tokenizer: Any,
        eos_ids: Collection[int],
        model_identity: ModelIdentity,
        max_model_length: int | None,
        owner: str,
        transfer: Literal["auto", "nccl", "gloo", "file"] = "auto",
        transfer_dir: Path | None = None,
        group_port: int = 51216,
        start_timeout: float = 240.0,
        retry_seconds: float = 120.0,
        say: Callable[[str], None] = logger.info,
        device: torch.device | str = "cpu",
        check_stop: Callable[[], None] = lambda: None,
        keep_weights: bool = False,
        lent_weights: bool = False,
        peers: Peers | None = None,
    ) -> None:
        """Nothing is sent yet.

        Args:
            base_url: `http://host:port` of the server.
            key: its key; None = it has none.
            tokenizer: the model's.
            eos_ids: every id that ends a completion.
            model_identity: of the trainer's model; the server's has to be the same.
            max_model_length: longest prompt and completion in tokens that will be asked for; None = up to the server's.
            owner: `host:pid:run folder`, by which a second trainer is told who is first.
            transfer: how weights get there; `auto` is nccl where both sides have GPUs, else gloo.
            transfer_dir: for `file`.
            group_port: where trainer and workers meet; 0 = any free one.
            start_timeout: seconds that `connect` waits for the server.
            retry_seconds: budget of an outage later on.
            say: called with a line that says what is waited for.
            device: the trainer's.
            check_stop: raises to leave `connect` and `load_weights`; `generate` has its own.
            keep_weights: copy what `load_weights` gets; needed where it changes before the next call.
            lent_weights: what it gets is valid only until the next tensor is asked for, and copied too.
            peers: the ranks that use the server together, `generate` being called by all.
        """
        self.weights_version = 0
        self._client = ServerClient(base_url, key)
        self.address = self._client.address
        self._tokenizer = tokenizer
        self._eos_ids = frozenset(eos_ids)
        self._identity = model_identity
        self._max_model_length = max_model_length
        self._start_timeout, self._retry_seconds = start_timeout, retry_seconds
        self._say, self._check_stop = say, check_stop
        self._device = torch.device(device)
        self._transfer_choice, self._transfer_dir, self._group_port = transfer, transfer_dir, group_port
        self._keep_weights, self._lent_weights = keep_weights, lent_weights
        self._peers: Peers = peers or Alone()
        self._leads = self._peers.rank == 0
        self._arrival: dist.Work | None = None
        self._owner = owner
        self._lease = LeaseKeeper(self.address, key, owner)
        self._loop = asyncio.new_event_loop()
        self._info: ServerInfo | None = None
        self._transfer: Transfer | None = None
        self._has_joined = False
        """Whether the transfer is in touch with this instance of the server."""
        self._refusals = 0
        self._weights: list[tuple[str, torch.Tensor, torch.dtype]] = []
        self._was_given_weights = False

    # --- Engine ---------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Wait for the server, and check that it can serve this trainer; it is leased from then on. Rank 0 comes before the others.

        Raises:
            EngineError: it does not answer in time, or is not the right one: what, where, and what to do.
        """
        outage = Outage(self.address, self._start_timeout, "vllm_server_timeout", self._say)
        self._run(self._persist(self._meet, outage), self._check_stop)
        if self._leads:
            self._lease.start()

    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Push new weights; from here on only completions by these are accepted.

        The tensors have to stay as they are until the next call (or be copied): a server that restarts gets them again. Ranks but 0 read
        them to the end and push nothing; they may go on once rank 0 is done.

        Raises:
            EngineError: the server refused them, or was away for longer than the budget.
        """
        self.weights_version, self._was_given_weights = version, True
        if not self._leads:
            deque(named_tensors, maxlen=0)
            return
        self._weights = []  # room for the new ones
        dtype = dtype_of(self._identity.dtype if self._info is None else self._info.identity.dtype)
        tensors = copied_tensors(named_tensors, dtype) if self._lent_weights else unique_tensors(named_tensors, dtype)
        if self._keep_weights and not self._lent_weights:
            tensors = [(name, tensor.to("cpu", sent, copy=True), sent) for name, tensor, sent in tensors]
        self._weights = tensors
        self._run(self._persist(self._push, self._new_outage(), recover=self._recover_before_push), self._check_stop)

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        params: SamplingParams,
        key: RandomKey,
        *,
        on_group: OnGroup | None = None,
        check_stop: Callable[[], None] | None = None,
    ) -> list[tuple[Completion, ...]]:
        """The completions of each request, in order; see `engine.Engine`."""
        try:
            groups = self._generate(requests, params, key, on_group, check_stop or self._check_stop)
        finally:
            self._arrival = arrive(self._peers)
        if self._leads and self._arrival is not None:
            self._run(self._wait_for_others(self._arrival), check_stop or self._check_stop)
        return groups

    def _generate(
        self,
        requests: Sequence[GenerationRequest],
        params: SamplingParams,
        key: RandomKey,
        on_group: OnGroup | None,
        check_stop: Callable[[], None],
    ) -> list[tuple[Completion, ...]]:
        check_sampling(params)
        if not self._was_given_weights:
            raise EngineError("the vLLM server was given no weights yet")
        groups = {i: group_request(one, params, key, self._eos_ids, self._max_tokens(one, params)) for i, one in enumerate(requests)}
        done: dict[int, tuple[Completion, ...]] = {}
        outage = self._new_outage()
        generation = Generation(
            self._client,
            version=self.weights_version,
            vocab_size=self._identity.vocab_size,
            eos_ids=self._eos_ids,
            has_stop_strings=bool(params.stop),
            outage=outage,
            check_alive=self._check_alive,
            ranks=self._peers.world_size,
        )

        def finish(index: int, completions: tuple[Completion, ...]) -> None:
            done[index] = completions
            outage.reset()
            if on_group is not None:
                on_group(index, completions)

        async def attempt() -> None:
            self._lease.check()
            try:
                await generation.run({index: group for index, group in groups.items() if index not in done}, finish)
            except WrongVersionError as error:
                raise await self._explain_version(error.found) from error

        self._run(self._persist(attempt, outage, recover=self._recover), check_stop)
        return [done[index] for index in range(len(requests))]

    def close(self) -> None:
        """Give the lease back, close all connections, remove files; safe to call twice."""
        self._lease.stop()
        if self._transfer is not None:
            self._transfer.close()
            self._transfer = None
        self._weights = []
        if not self._loop.is_closed():
            self._loop.run_until_complete(self._client.close())
            self._loop.close()

    # --- waiting --------------------------------------------------------------------------------------------------

    def _run(self, work: Awaitable[T], check_stop: Callable[[], None]) -> T:
        """The result of `work`; `check_stop` is called all the while, and may raise to leave it."""
        if self._loop.is_closed():
            raise EngineError("the engine is closed")
        return self._loop.run_until_complete(_watched(work, check_stop))

    async def _persist(self, work: Callable[[], Awaitable[T]], outage: Outage, recover: Callable[[], Awaitable[None]] | None = None) -> T:
        """The result of `work`, tried again after whatever may pass, until the outage has lasted too long."""
        while True:
            try:
                if outage.is_on and recover is not None:
                    await recover()
                return await work()
            except TransientFault as fault:
                await outage.wait(fault)

    def _new_outage(self) -> Outage:
        return Outage(self.address, self._retry_seconds, "vllm_server_retry_seconds", self._say)

    # --- the server's process -------------------------------------------------------------------------------------

    async def _meet(self) -> None:
        """The whole handshake with the process that answers now."""
        info = await read_info(self._client, seconds=INFO_SECONDS)
        devices = own_devices() if self._device.type == "cuda" else ()
        check_info(self.address, info, self._identity, max_model_length=self._max_model_length, own_devices=devices)
        if self._leads:
            await self._lease.take(self._client)
            self._transfer = self._transfer or self._make_transfer(info)
        self._info, self._has_joined = info, False
        if not await self._is_paused():  # left so by a trainer that died in an update; its half-new weights are not to run
            await probe_generation(self._client, min(self._eos_ids, default=0))

    async def _is_paused(self) -> bool:
        document = await self._client.call("GET", "/is_paused")
        return isinstance(document, dict) and document.get("is_paused") is True

    async def _recover(self) -> None:
        """After a fault in generation: the same process, as it was; or another one, which gets handshake and weights."""
        assert self._info is not None
        info = await read_info(self._client, seconds=INFO_SECONDS)
        if info.instance == self._info.instance:
            if info.weights_version != self.weights_version:
                raise self._stale(str(info.weights_version))
            await probe_generation(self._client, min(self._eos_ids, default=0))
        elif self._leads:
            await self._join_again()
        else:
            await self._follow(info)

    async def _join_again(self) -> None:
        """Handshake with another process at the address, and the weights for it."""
        self._say(
            f"the vLLM server at {self.address} was restarted: joining it again and giving it the weights of step {self.weights_version}"
        )
        await self._meet()
        await self._push()

    async def _follow(self, info: ServerInfo) -> None:
        """Another process, to which rank 0 gives the weights; a fault until it has them."""
        if info.weights_version != self.weights_version:
            raise TransientFault("it was restarted, and has no weights from rank 0 yet")
        await probe_generation(self._client, min(self._eos_ids, default=0), version=self.weights_version)
        await self._meet()

    async def _wait_for_others(self, arrival: dist.Work) -> None:
        """Return once every rank has its completions, or has failed; a server that comes back meanwhile gets the weights."""
        assert self._info is not None
        looked = time.monotonic()
        while not arrival.is_completed():
            await asyncio.sleep(ARRIVAL_SECONDS)
            if time.monotonic() - looked < WATCH_SECONDS:
                continue
            try:
                if (await read_info(self._client, seconds=INFO_SECONDS)).instance != self._info.instance:
                    await self._join_again()
            except TransientFault as fault:  # those that wait for completions count the time that it is away
                logger.info("vLLM server %s: %s", self.address, fault.cause)
            looked = time.monotonic()

    async def _recover_before_push(self) -> None:
        """After a fault in an update: whoever answers gets a handshake if it is new; the weights follow."""
        assert self._info is not None
        info = await read_info(self._client, seconds=INFO_SECONDS)
        if info.instance != self._info.instance:
            self._say(f"the vLLM server at {self.address} was restarted: joining it again")
            await self._meet()

    def _stale(self, found: str) -> EngineError:
        return EngineError(
            f"vLLM server {self.address}: server on version {found}, expected {self.weights_version}: its completions are not used; "
            "is there another server behind this address, or another trainer? Restart the server, then --resume"
        )

    def _make_transfer(self, info: ServerInfo) -> Transfer:
        choice = self._transfer_choice
        if choice == "auto":
            choice = "nccl" if info.devices and self._device.type == "cuda" else "gloo"
        if choice == "file":
            if self._transfer_dir is None:
                raise EngineError("vllm_weight_transfer: file needs a folder that trainer and server both see: vllm_weight_transfer_dir")
            return FileTransfer(self._transfer_dir, owner=self._owner)
        device = self._device if choice == "nccl" else torch.device("cpu")
        return GroupTransfer(choice, address=self.address, port=self._group_port, device=device)

    async def _push(self) -> None:
        """The weights given last, to the process that answers now."""
        assert self._info is not None
        assert self._transfer is not None
        await self._lease.take(self._client)  # a trainer that slept for longer than its lease must not overwrite another's weights
        if not self._has_joined:
            await self._transfer.join(self._client, self._info.world_size)
        self._has_joined = False  # until all of it went well
        try:
            await push_weights(self._client, self._transfer, self._weights, version=self.weights_version)
        except TransientFault as fault:
            self._count_refusal(fault)
            raise
        self._has_joined, self._refusals = True, 0

    def _count_refusal(self, fault: TransientFault) -> None:
        """Raise EngineError where the server, alive in between, has refused the same weights before: it would do so again."""
        self._refusals += fault.status == 500
        if self._refusals >= REFUSALS:
            raise EngineError(
                f"vLLM server {self.address} refuses the weights of step {self.weights_version}: {fault.cause}; its output tells more. "
                "Restart it before it is used again"
            ) from fault

    # --- completions ----------------------------------------------------------------------------------------------

    def _max_tokens(self, request: GenerationRequest, params: SamplingParams) -> int:
        longest = self._max_model_length or (self._info.max_model_len if self._info else 0)
        room = longest - len(request.token_ids)
        if room < 1:
            raise EngineError(f"a prompt of {len(request.token_ids)} tokens leaves no room for a completion in {longest}")
        return min(room, params.max_new_tokens or room)

    async def _check_alive(self) -> None:
        """Raise TransientFault if the server does not answer. Its engine is not asked: in a long step it would not answer either."""
        await self._client.call("GET", "/version")

    async def _explain_version(self, found: str) -> Exception:
        """What a completion by other weights means: a restarted server is joined again, anything else is refused."""
        assert self._info is not None
        info = await read_info(self._client, seconds=INFO_SECONDS)
        return self._stale(found) if info.instance == self._info.instance else TransientFault("the server was restarted")


async def _watched(work: Awaitable[T], check_stop: Callable[[], None]) -> T:
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            check_stop()
            await asyncio.wait({task}, timeout=TICK_SECONDS)
        return task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


__all__ = ["ModelIdentity", "VllmServerEngine"]
