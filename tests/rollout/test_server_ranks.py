"""Two ranks at one server: one lease, one giver of weights, shares of the batch, and a server that comes back under them."""

import os
import socket
import threading

import pytest
import scripted_server
import tiny
import torch
from processes import free_port, run_ranks

from rloo_cli.errors import EngineError
from rloo_cli.rollout import server_handshake, vllm_server
from rloo_cli.rollout.engine import GenerationRequest, RandomKey, SamplingParams
from rloo_cli.rollout.server_generation import group_request
from rloo_cli.rollout.vllm_server import ModelIdentity, VllmServerEngine
from rloo_cli.run.ranks import join_ranks

IDENTITY = scripted_server.identity_of(tiny.qwen2().config)
PARAMS, KEY = SamplingParams(max_new_tokens=6), RandomKey(seed=1, step=2)
REQUESTS = [GenerationRequest(token_ids=(i, i + 1), num_generations=3, first_row=3 * i) for i in range(4)]
AWAY_SECONDS = 0.5


def engine_at(address, folder, ranks):
    return VllmServerEngine(
        base_url=address,
        key=None,
        tokenizer=None,
        eos_ids={tiny.EOS},
        model_identity=ModelIdentity(config_hash=IDENTITY["config_hash"], vocab_size=260, dtype="float32"),
        max_model_length=64,
        owner=f"{socket.gethostname()}:{os.getpid()}:/runs/a",
        transfer="file",
        transfer_dir=folder / "weights",
        start_timeout=5.0,
        retry_seconds=20.0,
        lent_weights=True,
        peers=ranks,
    )


def lent():
    """Weights that are one and the same memory, as those that are gathered one by one may be."""
    memory = torch.empty(6)
    for name, value in {"a.weight": 1.0, "b.weight": 2.0}.items():
        whole = memory.fill_(value).view(6)
        yield name, whole
        yield f"tied.{name}", whole  # follows the first name as the same object


def connect(engine, ranks):
    for is_turn in (ranks.is_main, not ranks.is_main):
        ranks.together(engine.connect if is_turn else lambda: None)


def give(engine, ranks, version):
    ranks.together(lambda: engine.load_weights(lent(), version))


def texts(groups):
    return [[list(completion.token_ids) for completion in group] for group in groups]


def two_ranks(rank, folder, port):
    vllm_server.WATCH_SECONDS, vllm_server.INFO_SECONDS = 0.2, 2.0
    server_handshake.probe_generation.__kwdefaults__["seconds"] = 2.0
    import accelerate

    accelerate.PartialState(cpu=True)
    ranks = join_ranks()
    server = scripted_server.ScriptedServer(IDENTITY, port=port)
    if ranks.is_main:
        server.__enter__()
    ranks.barrier()
    engine = engine_at(f"http://127.0.0.1:{port}", folder, ranks)
    connect(engine, ranks)
    told = {}
    give(engine, ranks, 1)
    told["before"] = texts(engine.generate(REQUESTS[2 * rank : 2 * rank + 2], PARAMS, KEY))

    ranks.barrier()
    again = scripted_server.ScriptedServer(IDENTITY, port=port)
    if ranks.is_main:
        server.kill()
        threading.Timer(AWAY_SECONDS, again.__enter__).start()
    ranks.barrier()
    # The main rank has nothing to ask for, and is at hand for the other all the same.
    told["after"] = texts(engine.generate([] if ranks.is_main else REQUESTS[2:], PARAMS, KEY))
    give(engine, ranks, 2)
    told["versions"] = [completion.weights_version for group in engine.generate(REQUESTS, PARAMS, KEY) for completion in group]
    ranks.barrier()
    engine.close()
    ranks.barrier()
    if ranks.is_main:
        again.kill()
    return told


def test_the_main_rank_gives_a_server_that_comes_back_its_weights_while_the_other_waits_for_completions(tmp_path):
    (tmp_path / "run").mkdir()
    told = run_ranks(two_ranks, 2, tmp_path, tmp_path / "run", free_port())
    expected = [
        [
            scripted_server.State({"identity": IDENTITY, "faults": [], "key": None, "instance": None}).choice([i, i + 1], params, g)[
                "token_ids"
            ]
            for g in range(3)
        ]
        for i, request in enumerate(REQUESTS)
        for params in [group_request(request, PARAMS, KEY, {tiny.EOS}, 6).bodies[0]["sampling_params"]]
    ]
    assert [told[0]["before"], told[1]["before"]] == [expected[:2], expected[2:]]
    assert [told[0]["after"], told[1]["after"]] == [[], expected[2:]]
    assert [set(rank["versions"]) for rank in told] == [{2}, {2}]


def test_a_part_of_a_group_has_the_seeds_of_the_whole():
    whole = group_request(GenerationRequest(token_ids=(1,), num_generations=4, first_row=8), PARAMS, KEY, {tiny.EOS}, 6)
    part = group_request(GenerationRequest(token_ids=(1,), num_generations=3, first_row=9, group_row=8), PARAMS, KEY, {tiny.EOS}, 6)
    assert part.bodies[0]["sampling_params"]["seed"] == whole.bodies[0]["sampling_params"]["seed"] + 1


class OfTwo:
    """The second of two ranks, alone."""

    rank, world_size, group = 1, 2, None


def test_a_rank_but_the_first_neither_leases_nor_sends(tmp_path):
    with scripted_server.ScriptedServer(IDENTITY, [{"route": "/rloo/lease", "kind": "status", "status": 404}]) as server:
        engine = engine_at(server.address, tmp_path, OfTwo())
        engine.connect()
        tensors = lent()
        engine.load_weights(tensors, 3)
        assert list(tensors) == []
        assert not (tmp_path / "weights").exists()
        engine.close()


def test_a_first_rank_cannot_do_without_the_lease(tmp_path):
    with scripted_server.ScriptedServer(IDENTITY, [{"route": "/rloo/lease", "kind": "status", "status": 404}]) as server:
        engine = engine_at(server.address, tmp_path, None)
        with pytest.raises(EngineError, match="HTTP 404 to /rloo/lease"):
            engine.connect()
        engine.close()


def test_lent_weights_are_copied_as_they_come_and_tied_ones_once(tmp_path):
    with scripted_server.ScriptedServer(IDENTITY) as server:
        engine = engine_at(server.address, tmp_path, None)
        engine.connect()
        engine.load_weights(lent(), 1)
        assert {name: tensor[0].item() for name, tensor, _ in engine._weights} == {"a.weight": 1.0, "b.weight": 2.0}
        engine.close()
