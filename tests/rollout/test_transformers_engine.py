from __future__ import annotations

import logging

import pytest
import tiny
import torch

from rloo_cli.errors import EngineError, NonFiniteError
from rloo_cli.rollout import decoders, kv_cache
from rloo_cli.rollout.engine import GenerationRequest, RandomKey, SamplingParams
from rloo_cli.rollout.transformers_engine import TransformersEngine
from rloo_cli.types import FinishReason

KEY = RandomKey(seed=1, step=2)


class Stop(Exception):
    """What the tests' check_stop raises."""


PROMPTS = [tuple(range(40, 50)), tuple(range(60, 63)), tuple(range(80, 100)), (7,)]
PACKABLE = ["qwen2", "llama", "gpt2", "gemma"]


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def requests(prompts=PROMPTS, generations=3):
    return [GenerationRequest(token_ids=ids, num_generations=generations, first_row=i * generations) for i, ids in enumerate(prompts)]


def engine_of(model, layout="auto", **kwargs):
    return TransformersEngine(model, tokenizer=tiny.byte_tokenizer(), layout=layout, **kwargs)


def forward_logprobs(model, prompt, completion, temperature=1.0):
    tokens = torch.tensor([prompt + completion.token_ids])
    with torch.no_grad():
        logits = model(tokens, use_cache=False).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, tokens[0, len(prompt) :, None])[:, 0]


def tokens_of(groups):
    return [[c.token_ids for c in group] for group in groups]


@pytest.mark.parametrize("name", tiny.MODELS)
@pytest.mark.parametrize("layout", ["auto", "plain"])
def test_greedy_completions_are_those_of_generate(name, layout):
    model = tiny.MODELS[name](3)
    groups = engine_of(model, layout).generate(requests(generations=1), SamplingParams(max_new_tokens=24, temperature=0.0), KEY)
    for prompt, (completion,) in zip(PROMPTS, groups, strict=True):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0, len(prompt) :].tolist()
        assert list(completion.token_ids) == expected


@pytest.mark.parametrize("name", tiny.MODELS)
def test_auto_shares_prompts_where_the_cache_is_plain(name):
    engine = engine_of(tiny.MODELS[name]())
    assert engine.layout == "auto"
    engine.generate(requests(), SamplingParams(max_new_tokens=4), KEY)
    assert engine.layout == ("packed" if name in PACKABLE else "plain")


@pytest.mark.parametrize("name", PACKABLE)
@pytest.mark.parametrize("share_above", [0, 1 << 30], ids=["shared", "joint"])
def test_packed_and_plain_draw_the_same_tokens(name, share_above, monkeypatch):
    monkeypatch.setattr(kv_cache, "SHARE_ABOVE_BYTES", share_above)
    model, params = tiny.MODELS[name](), SamplingParams(max_new_tokens=70)
    packed = engine_of(model, "packed").generate(requests(), params, KEY)
    plain = engine_of(model, "plain").generate(requests(), params, KEY)
    assert tokens_of(packed) == tokens_of(plain)
    assert max(len(c.token_ids) for group in packed for c in group) > kv_cache.TOKENS_AHEAD


@pytest.mark.parametrize("name", PACKABLE)
@pytest.mark.parametrize("share_above", [0, 1 << 30], ids=["shared", "joint"])
def test_rows_and_groups_that_leave_disturb_nobody(name, share_above, monkeypatch):
    monkeypatch.setattr(kv_cache, "SHARE_ABOVE_BYTES", share_above)
    model = tiny.MODELS[name]()
    model.generation_config.eos_token_id = list(range(20))
    prompts = [*PROMPTS, (1, 2, 3), (9, 8, 7), (5,) * 30]
    groups = engine_of(model, "packed").generate(requests(prompts, 6), SamplingParams(max_new_tokens=70), KEY)
    assert tokens_of(groups) == tokens_of(engine_of(model, "plain").generate(requests(prompts, 6), SamplingParams(max_new_tokens=70), KEY))
    assert len({len(c.token_ids) for group in groups for c in group}) > 15
    for prompt, group in zip(prompts, groups, strict=True):
        for c in group:
            torch.testing.assert_close(torch.tensor(c.logprobs), forward_logprobs(model, prompt, c), atol=5e-5, rtol=0)


@pytest.mark.parametrize("name", tiny.MODELS)
@pytest.mark.parametrize("share_above", [0, 1 << 30], ids=["shared", "joint"])
def test_logprobs_are_those_of_a_plain_forward_pass(name, share_above, monkeypatch):
    monkeypatch.setattr(kv_cache, "SHARE_ABOVE_BYTES", share_above)
    model = tiny.MODELS[name]()
    groups = engine_of(model).generate(requests(), SamplingParams(max_new_tokens=40, temperature=0.7), KEY)
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for completion in group:
            torch.testing.assert_close(
                torch.tensor(completion.logprobs), forward_logprobs(model, prompt, completion, 0.7), atol=5e-5, rtol=0
            )


@pytest.mark.parametrize("share_above", [0, 1 << 30], ids=["shared", "joint"])
@pytest.mark.parametrize("name", ["qwen2", "gemma"])
def test_float64_logprobs_are_exact(name, share_above, monkeypatch):
    monkeypatch.setattr(kv_cache, "SHARE_ABOVE_BYTES", share_above)
    model = tiny.MODELS[name](dtype=torch.float64)
    (group,) = engine_of(model, "packed").generate(requests(PROMPTS[:1]), SamplingParams(max_new_tokens=30), KEY)
    gap = max((torch.tensor(c.logprobs, dtype=torch.float64) - forward_logprobs(model, PROMPTS[0], c)).abs().max() for c in group)
    assert gap < 1e-10


@pytest.mark.parametrize("name", ["qwen2", "gpt2", "falcon_h1"])
def test_a_row_does_not_depend_on_its_neighbours(name):
    engine, params = engine_of(tiny.MODELS[name]()), SamplingParams(max_new_tokens=30)
    together = engine.generate(requests(), params, KEY)
    for request, group in zip(requests(), together, strict=True):
        assert tokens_of(engine.generate([request], params, KEY)) == tokens_of([group])


def test_rows_with_equal_prompts_share_and_still_differ():
    engine, params = engine_of(tiny.qwen2()), SamplingParams(max_new_tokens=20)
    twice = engine.generate(requests([PROMPTS[0], PROMPTS[0]]), params, KEY)
    one = engine.generate([GenerationRequest(token_ids=PROMPTS[0], num_generations=6, first_row=0)], params, KEY)
    assert tokens_of([twice[0] + twice[1]]) == tokens_of(one)
    assert len(set(tokens_of(one)[0])) == 6


@pytest.mark.parametrize("layout", ["packed", "plain"])
def test_the_same_call_gives_the_same_bits(layout):
    engine, params = engine_of(tiny.qwen2(), layout), SamplingParams(max_new_tokens=20)
    assert engine.generate(requests(), params, KEY) == engine.generate(requests(), params, KEY)


@pytest.mark.parametrize("change", [{"seed": 9}, {"step": 9}, {"stream": "eval"}])
def test_another_key_gives_other_tokens(change):
    engine, params = engine_of(tiny.qwen2()), SamplingParams(max_new_tokens=20)
    other = RandomKey(**{"seed": 1, "step": 2, **change})
    assert tokens_of(engine.generate(requests(), params, KEY)) != tokens_of(engine.generate(requests(), params, other))


@pytest.mark.parametrize("name", ["qwen2", "falcon_h1"])
def test_finish_reasons(name):
    model = tiny.MODELS[name](spread=1.0)
    engine = engine_of(model)
    groups = engine.generate(requests(generations=8), SamplingParams(max_new_tokens=60), KEY)
    completions = [c for group in groups for c in group]
    for c in completions:
        if c.finish_reason == FinishReason.STOPPED:
            assert c.token_ids[-1] == tiny.EOS
        else:
            assert (c.finish_reason, len(c.token_ids)) == (FinishReason.TRUNCATED, 60)
        assert tiny.EOS not in c.token_ids[:-1]
        assert len(c.logprobs) == len(c.token_ids)
    assert {c.finish_reason for c in completions} == {FinishReason.STOPPED, FinishReason.TRUNCATED}


def test_every_eos_id_of_the_generation_config_ends_a_row():
    model = tiny.qwen2()
    model.generation_config.eos_token_id = list(range(128))
    groups = engine_of(model).generate(requests(generations=8), SamplingParams(max_new_tokens=100), KEY)
    for c in (c for group in groups for c in group):
        assert c.finish_reason == FinishReason.STOPPED
        assert all(token >= 128 and token != tiny.EOS for token in c.token_ids[:-1])


def test_an_empty_completion_is_the_eos_token_alone():
    model = tiny.qwen2()
    model.generation_config.eos_token_id = list(range(tiny.VOCAB))
    groups = engine_of(model).generate(requests(), SamplingParams(max_new_tokens=10), KEY)
    assert all(len(c.token_ids) == 1 and c.finish_reason == FinishReason.STOPPED for group in groups for c in group)


@pytest.mark.parametrize("max_new_tokens", [None, 100])
def test_a_row_is_truncated_at_the_context(max_new_tokens):
    model = tiny.gpt2(n_positions=32)
    model.generation_config.eos_token_id = None
    engine = engine_of(model, "packed")
    engine.tokenizer.eos_token = None
    groups = engine.generate(requests(), SamplingParams(max_new_tokens=max_new_tokens), KEY)
    assert [len(group[0].token_ids) for group in groups] == [32 - len(prompt) for prompt in PROMPTS]
    assert all(c.finish_reason == FinishReason.TRUNCATED for group in groups for c in group)


def test_a_prompt_that_fills_the_context_is_an_error():
    engine = engine_of(tiny.gpt2(n_positions=20), "packed")
    with pytest.raises(EngineError, match="request 2: a prompt of 20 tokens leaves no room in the model's context of 20"):
        engine.generate(requests(), SamplingParams(max_new_tokens=4), KEY)


@pytest.mark.parametrize("layout", ["packed", "plain"])
def test_a_stop_string_ends_a_row_and_stays(layout):
    model, params = tiny.qwen2(), SamplingParams(max_new_tokens=60, temperature=1.0)
    engine = engine_of(model, layout)
    free = engine.generate(requests(PROMPTS[:1], 8), params, KEY)[0]
    text = engine.tokenizer.decode(free[2].token_ids[:20], skip_special_tokens=True)
    stop = text[9:12]
    stopped = engine.generate(requests(PROMPTS[:1], 8), SamplingParams(max_new_tokens=60, stop=(stop,)), KEY)[0]
    assert stopped[2].finish_reason == FinishReason.STOP_STRING
    assert engine.tokenizer.decode(stopped[2].token_ids, skip_special_tokens=True).endswith(stop)
    assert free[2].token_ids[: len(stopped[2].token_ids)] == stopped[2].token_ids


def test_groups_are_announced_while_others_still_grow():
    events: list[object] = []
    model = tiny.qwen2()
    model.generation_config.eos_token_id = list(range(16))
    engine = engine_of(model, "packed")
    groups = engine.generate(
        requests(PROMPTS, 2),
        SamplingParams(max_new_tokens=120),
        RandomKey(seed=5, step=0),
        on_group=lambda index, group: events.append((index, group)),
        check_stop=lambda: events.append("step"),
    )
    announced = [event for event in events if event != "step"]
    assert sorted(index for index, _ in announced) == list(range(len(PROMPTS)))
    assert all(groups[index] == group for index, group in announced)
    steps = 0
    for event in events:
        if event == "step":
            steps += 1
        else:
            assert steps == max(len(c.token_ids) for c in event[1])  # at the step of the group's last token, not later
    assert len({max(len(c.token_ids) for c in group) for group in groups}) > 1


@pytest.mark.parametrize("name", ["qwen2", "falcon_h1"])
def test_check_stop_abandons_the_batch(name):
    calls = []

    def check():
        calls.append(1)
        if len(calls) == 5:
            raise Stop

    model = tiny.MODELS[name]()
    model.train()
    before = model.config._attn_implementation
    engine = engine_of(model, "packed" if name == "qwen2" else "plain")
    with pytest.raises(Stop):
        engine.generate(requests(), SamplingParams(max_new_tokens=50), KEY, check_stop=check)
    assert (model.training, model.config._attn_implementation) == (True, before)


def test_a_stop_is_looked_for_between_the_chunks_of_many_prompts(monkeypatch):
    monkeypatch.setattr(decoders, "PREFILL_TOKENS", 1)
    passes, model = [], tiny.qwen2()
    model.register_forward_pre_hook(lambda *_: passes.append(1))
    engine = engine_of(model, "packed")

    def check():
        if len(passes) == 2:
            raise Stop

    with pytest.raises(Stop):
        engine.generate(requests(), SamplingParams(max_new_tokens=4), KEY, check_stop=check)
    assert len(passes) == 2 < len({request.token_ids for request in requests()})


@pytest.mark.parametrize("name", ["llama", "falcon_h1"])
def test_nan_logits_are_an_error_that_names_the_row(name):
    model = tiny.MODELS[name]()
    with torch.no_grad():
        model.get_input_embeddings().weight[80] = float("nan")
    engine = engine_of(model, "packed" if name == "llama" else "plain")
    with pytest.raises(NonFiniteError, match=r"token \d+ of row 6 \(request 2, weights of step 0\)"):
        engine.generate(requests(), SamplingParams(max_new_tokens=4), KEY)


def test_sampling_leaves_the_shared_model_as_it_was():
    model = tiny.qwen2(attention_dropout=0.5)
    model.train()
    model.model.layers[0].eval()
    before = {name: (m.training) for name, m in model.named_modules()}
    engine = engine_of(model, "packed")
    engine.generate(requests(), SamplingParams(max_new_tokens=4), KEY)
    assert {name: m.training for name, m in model.named_modules()} == before
    model.eval()
    loss = model(torch.tensor([PROMPTS[0]])).logits.logsumexp(-1).sum()
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_dropout_is_off_while_sampling():
    quiet, noisy = tiny.qwen2(), tiny.qwen2(attention_dropout=0.5)
    noisy.train()
    params = SamplingParams(max_new_tokens=10)
    assert engine_of(noisy).generate(requests(), params, KEY) == engine_of(quiet).generate(requests(), params, KEY)


def test_a_shared_model_shows_new_weights_and_the_version_is_stamped():
    model = tiny.qwen2(0)
    engine, params = engine_of(model), SamplingParams(max_new_tokens=10)
    old = engine.generate(requests(), params, KEY)
    model.load_state_dict(tiny.qwen2(1).state_dict())
    engine.load_weights(iter(()), 7)
    new = engine.generate(requests(), params, KEY)
    assert tokens_of(new) == tokens_of(engine_of(tiny.qwen2(1)).generate(requests(), params, KEY)) != tokens_of(old)
    assert {c.weights_version for group in new for c in group} == {7}
    assert {c.weights_version for group in old for c in group} == {0}


@pytest.mark.parametrize("name", PACKABLE)
def test_an_own_copy_follows_load_weights_only(name):
    model = tiny.MODELS[name](0)
    engine, params = engine_of(model, copy_dtype=torch.float32), SamplingParams(max_new_tokens=10)
    old = engine.generate(requests(), params, KEY)
    changed = tiny.MODELS[name](1)
    with torch.no_grad():
        for parameter, other in zip(model.parameters(), changed.parameters(), strict=True):
            parameter.copy_(other)
    assert engine.generate(requests(), params, KEY) == old
    engine.load_weights(model.named_parameters(), 1)
    assert tokens_of(engine.generate(requests(), params, KEY)) == tokens_of(engine_of(changed).generate(requests(), params, KEY))


def test_a_bf16_copy_samples_nearly_as_the_model_does():
    model = tiny.qwen2()
    engine = engine_of(model, copy_dtype=torch.bfloat16)
    groups = engine.generate(requests(), SamplingParams(max_new_tokens=30), KEY)
    assert engine.layout == "packed"
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for c in group:
            assert (torch.tensor(c.logprobs) - forward_logprobs(model, prompt, c)).abs().mean() < 0.1


def test_auto_says_why_it_takes_the_plain_layout(caplog):
    model = tiny.gemma(attn_logit_softcapping=None)
    for layer in model.model.layers:
        layer.self_attn.sliding_window = None  # a window that lives in the mask alone, as some models have it
    with caplog.at_level(logging.INFO, logger="rloo_cli"):
        engine = engine_of(model)
        engine.generate(requests(), SamplingParams(max_new_tokens=20), KEY)
    assert engine.layout == "plain"
    assert "the log-probs of Gemma3ForCausalLM with shared prompts differ by up to" in caplog.text


def test_a_closed_engine_refuses():
    engine = engine_of(tiny.qwen2())
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.generate(requests(), SamplingParams(max_new_tokens=2), KEY)
