"""Weights as buffers, and the ways they take: a real gloo group with a worker in a thread, and a real safetensors file."""

import asyncio
import threading
import time

import psutil
import pytest
import tiny
import torch
from safetensors.torch import load_file

from rloo_cli.errors import EngineError, StorageError
from rloo_cli.rollout import weight_transfer
from rloo_cli.rollout.server_client import TransientFault
from rloo_cli.rollout.weight_file import FileTransfer, write_weights
from rloo_cli.rollout.weight_group import GroupPlace, from_trainer, join_store, make_group
from rloo_cli.rollout.weight_transfer import GroupTransfer
from rloo_cli.rollout.weight_wire import Plan, checksum, make_plan, packed, unique_tensors, unpacked

CPU = torch.device("cpu")


def mixed_tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(3, 5, generator=generator),
        "b": torch.randn(7, generator=generator).to(torch.bfloat16),
        "c": torch.arange(4),
        "d": torch.randn(6, 4, generator=generator).t(),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5),
        "flags": torch.tensor([True, False, True]),
    }


def received(tensors, chunk_bytes):
    plan = Plan(**make_plan(tensors, chunk_bytes).document())
    buffers = list(packed(tensors, plan, CPU))
    assert [buffer.numel() for buffer in buffers] == plan.sizes
    return {name: tensor for buffer, chunk in zip(buffers, plan.chunks(), strict=True) for name, tensor in unpacked(buffer, chunk)}


@pytest.mark.parametrize("chunk_bytes", [1, 40, 1 << 20])
def test_what_is_packed_comes_out_the_same_however_it_is_cut(chunk_bytes):
    tensors = mixed_tensors()
    found = received(unique_tensors(tensors.items(), None), chunk_bytes)
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def test_floating_point_tensors_travel_in_the_servers_dtype():
    found = received(unique_tensors(mixed_tensors().items(), torch.bfloat16), 1 << 20)
    assert torch.equal(found["a"], mixed_tensors()["a"].to(torch.bfloat16))
    assert found["c"].dtype == torch.int64


def test_tied_tensors_travel_once():
    model = tiny.qwen2()
    names = [name for name, _, _ in unique_tensors(model.state_dict().items(), None)]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert len(unique_tensors(tiny.llama().state_dict().items(), None)) == len(tiny.llama().state_dict())


def test_a_checksum_differs_for_a_lost_and_a_changed_part():
    buffer = torch.arange(100, dtype=torch.uint8)
    for place in (0, 50, 99):
        other = buffer.clone()
        other[place] = 0 if place else 1
        assert checksum(other) != checksum(buffer)
    assert checksum(torch.zeros(0, dtype=torch.uint8)) == 0


def test_a_weights_file_is_one_that_safetensors_reads(tmp_path):
    tensors = unique_tensors(mixed_tensors().items(), None)
    plan = make_plan(tensors, 40)
    sums = write_weights(tmp_path / "sub" / "w.safetensors", tensors, plan)
    assert sums == [checksum(buffer) for buffer in packed(tensors, plan, CPU)]
    found = load_file(tmp_path / "sub" / "w.safetensors")
    assert {name: tensor.tolist() for name, tensor in found.items()} == {name: t.tolist() for name, t in mixed_tensors().items()}
    assert [path.name for path in (tmp_path / "sub").iterdir()] == ["w.safetensors"]


def test_a_folder_that_cannot_be_written_is_told_with_its_setting(tmp_path):
    (tmp_path / "file").write_text("")
    tensors = unique_tensors(mixed_tensors().items(), None)
    with pytest.raises(StorageError, match=r"cannot write weights .*file/w: .*; see vllm_weight_transfer_dir"):
        write_weights(tmp_path / "file" / "w" / "w.safetensors", tensors, make_plan(tensors))


def test_a_dtype_that_files_do_not_carry_is_refused(tmp_path):
    tensors = [("z", torch.zeros(2, dtype=torch.complex64), torch.complex64)]
    with pytest.raises(EngineError, match="the weight z has dtype torch.complex64"):
        write_weights(tmp_path / "w.safetensors", tensors, make_plan(tensors))


def test_files_of_a_killed_start_of_the_same_run_are_removed_and_others_are_left(tmp_path):
    def transfer(owner):
        return FileTransfer(tmp_path, owner=owner)

    class Answering:
        async def call(self, *arguments, **options):
            return {}

    async def send(one):
        await one.send(Answering(), unique_tensors(mixed_tensors().items(), None))

    killed, other, again = transfer("host:1:/runs/a"), transfer("host:2:/runs/b"), transfer("host:3:/runs/a")
    asyncio.run(send(killed))
    asyncio.run(send(other))
    asyncio.run(send(again))
    again.sent()
    assert len(list(tmp_path.iterdir())) == 2
    again.close()
    assert list(tmp_path.iterdir()) == [other._newest]


class WorkerServer:
    """The HTTP side of a server whose worker is a thread: a rank of a real gloo group."""

    def __init__(self, *, rank=1, refuse=None, leave_after=None):
        self.rank, self.refuse, self.leave_after, self.received = rank, refuse, leave_after, {}

    async def call(self, method, path, body, *, seconds):
        if self.refuse == path:
            await asyncio.sleep(0.2)
            raise TransientFault(f"HTTP 500 to {path}: no such layer", status=500)
        work = self.join if path == "/init_weight_transfer_engine" else self.receive
        done = asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()

        def run():
            work(body)
            loop.call_soon_threadsafe(lambda: done.done() or done.set_result({}))

        threading.Thread(target=run, daemon=True).start()
        return await done

    def join(self, body):
        place = GroupPlace(**body["init_info"])
        self.group = make_group(place, join_store(place), rank=self.rank, device=CPU)

    def receive(self, body):
        plan = Plan(**body["update_info"]["plan"])
        for number, (size, chunk) in enumerate(zip(plan.sizes, plan.chunks(), strict=True)):
            if number == self.leave_after:
                self.group = None
                return
            buffer, total = torch.empty(size, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
            self.group.broadcast([buffer], from_trainer()).wait()
            self.group.broadcast([total], from_trainer()).wait()
            assert checksum(buffer) == int(total)
            self.received |= {name: tensor.clone() for name, tensor in unpacked(buffer, chunk)}


@pytest.fixture
def transfer(monkeypatch):
    made = GroupTransfer("gloo", address="http://127.0.0.1:8000", port=0, device=CPU)
    monkeypatch.setattr(weight_transfer, "make_plan", lambda tensors: make_plan(tensors, 40))
    yield made
    made.close()


def test_a_group_carries_every_tensor_again_and_again(transfer):
    server, tensors = WorkerServer(), unique_tensors(mixed_tensors().items(), None)

    async def work():
        await transfer.join(server, 1)
        for _ in range(3):
            server.received = {}
            await transfer.send(server, tensors)
        await transfer.join(server, 1)  # as after a restart, at the same port
        await transfer.send(server, tensors)

    asyncio.run(work())
    assert {name: tensor.tolist() for name, tensor in server.received.items()} == {name: t.tolist() for name, t in mixed_tensors().items()}


def test_every_worker_of_a_server_gets_every_tensor(transfer):
    workers, tensors = [WorkerServer(rank=1), WorkerServer(rank=2)], unique_tensors(mixed_tensors().items(), None)

    class Both:
        async def call(self, *arguments, **options):
            await asyncio.gather(*(worker.call(*arguments, **options) for worker in workers))

    async def work():
        await transfer.join(Both(), 2)
        await transfer.send(Both(), tensors)

    asyncio.run(work())
    for worker in workers:
        assert {name: tensor.tolist() for name, tensor in worker.received.items()} == {
            name: t.tolist() for name, t in mixed_tensors().items()
        }


def test_a_group_listens_at_one_address(transfer):
    asyncio.run(transfer.join(WorkerServer(), 1))
    listening = {c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    assert listening == {"127.0.0.1"}


@pytest.mark.parametrize("path", ["/init_weight_transfer_engine", "/update_weights"])
def test_a_refusal_ends_meeting_and_broadcast_at_once_in_the_servers_words(path, transfer):
    server = WorkerServer(refuse=path)

    async def work():
        await transfer.join(server, 1)
        await transfer.send(server, [(str(i), torch.zeros(5_000_000), torch.float32) for i in range(4)])

    started = time.monotonic()
    with pytest.raises(TransientFault, match=f"HTTP 500 to {path}: no such layer"):
        asyncio.run(work())
    assert time.monotonic() - started < 15


def test_a_worker_that_answers_too_early_is_not_believed(transfer):
    server = WorkerServer(leave_after=1)

    async def work():
        await transfer.join(server, 1)
        await transfer.send(server, [(str(i), torch.zeros(5_000_000), torch.float32) for i in range(4)])

    with pytest.raises(TransientFault, match="before it had all weights|broke off"):
        asyncio.run(work())


def test_workers_that_never_come_are_waited_for_with_a_deadline(transfer, monkeypatch):
    monkeypatch.setattr(weight_transfer, "MEET_SECONDS", 0.5)
    monkeypatch.setattr(weight_transfer, "GRACE_SECONDS", 0.1)

    class Silent:
        async def call(self, *arguments, **options):
            await asyncio.sleep(3600)

    with pytest.raises(TransientFault, match=r"the weight transfer's group \(gloo, 127.0.0.1:\d+\) did not come together within 0.5 s"):
        asyncio.run(transfer.join(Silent(), 1))


def test_a_port_that_is_taken_is_named_with_its_setting():
    first = GroupTransfer("gloo", address="http://127.0.0.1:8000", port=0, device=CPU)
    port = first._listen().port
    second = GroupTransfer("gloo", address="http://127.0.0.1:8000", port=port, device=CPU)
    with pytest.raises(EngineError, match=rf"cannot listen at 127.0.0.1:{port} \(.*\): set vllm_group_port"):
        second._listen()
    first.close()


def test_a_server_whose_name_nobody_knows_is_told():
    with pytest.raises(EngineError, match="no-such-host.invalid' is not known here"):
        GroupTransfer("gloo", address="http://no-such-host.invalid:8000", port=0, device=CPU)
