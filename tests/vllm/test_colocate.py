"""The colocated engine against the trainer's own model, on real vLLM."""

from __future__ import annotations

import itertools
import logging

import colocated
import pytest
import tiny
import torch
from colocated import KEY, PROMPTS, build, engine_for, forward_logits, requests, tokens_of

from rloo_cli.errors import EngineError, NonFiniteError, RecipeError
from rloo_cli.recipe.schema import ModelSection
from rloo_cli.rollout.engine import RandomKey, SamplingParams
from rloo_cli.rollout.transformers_engine import TransformersEngine
from rloo_cli.rollout.transforms import transform
from rloo_cli.training.adapter import add_adapter, plain_tensors
from rloo_cli.training.microbatches import GroupRows, build_scoring_batch
from rloo_cli.training.policy import Policy
from rloo_cli.types import FinishReason

VERSIONS = itertools.count(1)


@pytest.fixture(scope="module", params=["qwen2", "llama"])
def shape(request):
    return request.param


@pytest.fixture(scope="module")
def module_engine(shape, tmp_path_factory):
    torch.set_num_threads(1)
    engine = engine_for(tmp_path_factory.mktemp(shape), build(shape))
    with pytest.raises(EngineError, match="no weights yet"):
        engine.generate(requests(), SamplingParams(max_new_tokens=2), KEY)
    yield engine
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.generate(requests(), SamplingParams(max_new_tokens=2), KEY)


@pytest.fixture
def model(shape):
    return build(shape, spread=4.0)


@pytest.fixture
def engine(module_engine, model):
    """The engine under the weights of `model`."""
    module_engine._failure = None  # a test before may have spent it on purpose
    module_engine.load_weights(model.state_dict().items(), next(VERSIONS))
    return module_engine


def greedy(engine, prompts=PROMPTS, tokens=24):
    return tokens_of(engine.generate(requests(prompts, 1), SamplingParams(max_new_tokens=tokens, temperature=0.0), KEY))


def generated(model, prompts=PROMPTS, tokens=24):
    """Greedy completions by transformers' own generate."""
    outputs = [model.generate(torch.tensor([p]), max_new_tokens=tokens, do_sample=False)[0, len(p) :].tolist() for p in prompts]
    return [[tuple(output)] for output in outputs]


def test_an_adapter_reaches_the_engine_in_the_weights(engine, shape):
    """After each update of the adapter what is sampled is the adapted model's: greedy tokens, and log-probs to rounding."""
    section = ModelSection(model_name_or_path="base", use_peft=True, lora_target_modules=["all-linear"])
    model, generator = add_adapter(build(shape, spread=4.0), section, seed=1), torch.Generator().manual_seed(2)
    for version in (400, 401):
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        engine.load_weights(plain_tensors(model), version)
        assert greedy(engine) == generated(model) != generated(build(shape, spread=4.0))
        (group,) = engine.generate(requests(PROMPTS[:1]), SamplingParams(max_new_tokens=16), KEY)
        for completion in group:
            logits = forward_logits(model, PROMPTS[0], completion).log_softmax(-1)
            expected = logits.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            assert torch.allclose(torch.tensor(completion.logprobs), expected, atol=1e-4)


def test_greedy_completions_follow_five_updates(engine, shape):
    seen = []
    for seed in range(5):
        model = build(shape, seed)
        engine.load_weights(model.state_dict().items(), 100 + seed)
        groups = greedy(engine, PROMPTS * 2)
        assert groups == generated(model) * 2
        assert groups == greedy(TransformersEngine(model, tokenizer=tiny.byte_tokenizer()), PROMPTS * 2)
        seen.append(groups[0])
    assert len({str(group) for group in seen}) == 5
    assert engine.weights_version == 104


def test_prompts_are_cached_until_the_next_update(engine, shape, monkeypatch):
    before = greedy(engine)
    monkeypatch.setattr(engine._llm, "reset_prefix_cache", lambda: True)
    changed = build(shape, 11)
    engine.load_weights(changed.state_dict().items(), 200)
    assert greedy(engine)[0] not in (before[0], generated(changed)[0])  # old keys and values under new weights
    monkeypatch.undo()
    engine.load_weights(changed.state_dict().items(), 201)
    assert greedy(engine) == generated(changed)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_the_trainers(engine, model, temperature):
    groups = engine.generate(requests(generations=8), SamplingParams(max_new_tokens=80, temperature=temperature), KEY)
    rows = [
        GroupRows(
            group=p,
            prompt_ids=prompt,
            rows=tuple(range(p * 8, p * 8 + 8)),
            completion_ids=tuple(c.token_ids for c in group),
        )
        for p, (prompt, group) in enumerate(zip(PROMPTS, groups, strict=True))
    ]
    with torch.no_grad():
        policy = Policy(model, layout="packed", temperature=temperature, head_chunk=None)
        logp_N, _ = policy(build_scoring_batch(rows, "packed", torch.device("cpu")))
    gap = (logp_N - torch.tensor([value for group in groups for c in group for value in c.logprobs])).abs()
    assert len(gap) > 1000
    assert gap.max() < 1e-4
    assert gap.mean() < 1e-5


@pytest.mark.parametrize(
    "changes",
    [
        {"top_p": 0.6},
        {"top_k": 5},
        {"min_p": 0.1},
        {"repetition_penalty": 1.7},
        {"top_k": 20, "top_p": 0.8, "temperature": 1.3},
        {"temperature": 0.0},
        {"temperature": 0.0, "repetition_penalty": 1.7},
    ],
    ids=str,
)
def test_tokens_are_drawn_from_the_distribution_that_was_asked_for(engine, model, changes):
    params = SamplingParams(max_new_tokens=40, **changes)
    for prompt, group in zip(PROMPTS, engine.generate(requests(), params, KEY), strict=True):
        for completion in group:
            logits_TV = forward_logits(model, prompt, completion)
            seen_TV = torch.zeros_like(logits_TV, dtype=torch.bool)
            for t in range(len(seen_TV)):
                seen_TV[t, list(prompt + completion.token_ids[:t])] = True
            expected_TV = transform(logits_TV, params, seen_TV).log_softmax(-1)
            expected_T = expected_TV.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected_T, atol=2e-4, rtol=0)
            if params.temperature == 0.0:
                assert list(completion.token_ids) == expected_TV.argmax(-1).tolist()


def test_a_row_draws_the_same_whatever_is_beside_it(engine):
    params = SamplingParams(max_new_tokens=40)
    together = tokens_of(engine.generate(requests(generations=8), params, KEY))
    assert together == tokens_of(engine.generate(requests(generations=8), params, KEY))
    alone = [tokens_of(engine.generate(requests([prompt], 8, first_row=8 * i), params, KEY))[0] for i, prompt in enumerate(PROMPTS)]
    pairs = [(a, b) for x, y in zip(together, alone, strict=True) for a, b in zip(x, y, strict=True)]
    assert sum(a != b for a, b in pairs) <= 1  # rounding may turn one token in 10,000
    assert len({row for group in together for row in group}) > 28


@pytest.mark.parametrize("key", [RandomKey(seed=1, step=3), RandomKey(seed=2, step=2), RandomKey(seed=1, step=2, stream="eval")])
def test_other_keys_draw_other_tokens(engine, key):
    params = SamplingParams(max_new_tokens=20)
    assert tokens_of(engine.generate(requests(), params, KEY)) != tokens_of(engine.generate(requests(), params, key))


def test_draws_follow_the_distribution(engine, model):
    groups = engine.generate(requests([(7,)], 400), SamplingParams(max_new_tokens=1), KEY)
    with torch.no_grad():
        probs_V = model(torch.tensor([[7]])).logits[0, -1].softmax(-1)
    counts_V = torch.bincount(torch.tensor([c.token_ids[0] for c in groups[0]]), minlength=tiny.VOCAB)
    top = probs_V.topk(5).indices
    for token in top:
        p = probs_V[token].item()
        assert abs(counts_V[token].item() - 400 * p) < 4.5 * (400 * p * (1 - p)) ** 0.5 + 1


def test_rows_end_at_eos_or_their_length_and_hold_no_eos_inside(engine):
    groups = engine.generate(requests(generations=16), SamplingParams(max_new_tokens=80), KEY)
    completions = [c for group in groups for c in group]
    assert {c.finish_reason for c in completions} == {FinishReason.STOPPED, FinishReason.TRUNCATED}
    for c in completions:
        assert (c.token_ids[-1] == tiny.EOS) == (c.finish_reason == FinishReason.STOPPED)
        assert len(c.token_ids) == 80 or c.finish_reason == FinishReason.STOPPED
        assert (len(c.logprobs), c.weights_version) == (len(c.token_ids), engine.weights_version)


def test_without_a_longest_completion_rows_run_to_the_context(engine, monkeypatch):
    monkeypatch.setattr(engine, "_eos_ids", frozenset())
    groups = engine.generate(requests(), SamplingParams(max_new_tokens=None), KEY)
    assert [{len(c.token_ids) for c in group} for group in groups] == [{colocated.CONTEXT - len(prompt)} for prompt in PROMPTS]


def test_a_prompt_that_fills_the_context_is_an_error(engine):
    with pytest.raises(EngineError, match="request 1: a prompt of 160 tokens leaves no room"):
        engine.generate(requests([(7,), (7,) * 160]), SamplingParams(max_new_tokens=4), KEY)


def test_an_empty_completion_is_the_eos_token_alone(engine, monkeypatch):
    monkeypatch.setattr(engine, "_eos_ids", frozenset(range(tiny.VOCAB)))
    groups = engine.generate(requests(), SamplingParams(max_new_tokens=10), KEY)
    assert all(len(c.token_ids) == 1 and c.finish_reason == FinishReason.STOPPED for group in groups for c in group)


def test_a_stop_string_ends_a_row_and_stays(engine):
    free = engine.generate(requests(PROMPTS[:1], 8), SamplingParams(max_new_tokens=60), KEY)[0]
    tokenizer = tiny.byte_tokenizer()
    row = next(c for c in free if len(c.token_ids) > 30)
    text = tokenizer.decode([t for t in row.token_ids[:20] if t < 128])
    stop = next(text[i : i + 2] for i in range(4, len(text)) if text[i : i + 2] in tokenizer.decode(row.token_ids))
    groups = engine.generate(requests(PROMPTS[:1], 8), SamplingParams(max_new_tokens=60, stop=(stop,)), KEY)[0]
    stopped = groups[free.index(row)]
    assert stopped.finish_reason == FinishReason.STOP_STRING
    assert tokenizer.decode(stopped.token_ids, skip_special_tokens=True).endswith(stop)
    for c, whole in zip(groups, free, strict=True):
        assert whole.token_ids[: len(c.token_ids)] == c.token_ids
        assert (stop in tokenizer.decode(c.token_ids, skip_special_tokens=True)) == (c.finish_reason == FinishReason.STOP_STRING)


def test_more_rows_and_longer_prompts_than_fit_at_once(engine, model):
    prompts = [tuple((i * 7 + j) % 250 for j in range(120)) for i in range(60)]  # more prompt tokens than vLLM takes in a step
    groups = engine.generate(requests(prompts, 6), SamplingParams(max_new_tokens=40), KEY)
    assert [len(group) for group in groups] == [6] * 60
    for i in (0, 30, 59):
        logp = forward_logits(model, prompts[i], groups[i][5]).log_softmax(-1)
        expected = logp.gather(1, torch.tensor(groups[i][5].token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(groups[i][5].logprobs), expected, atol=2e-4, rtol=0)


def test_groups_are_announced_while_others_still_grow(engine, monkeypatch):
    monkeypatch.setattr(engine, "_eos_ids", frozenset(range(24)))
    events = []
    groups = engine.generate(
        requests(PROMPTS, 2),
        SamplingParams(max_new_tokens=80),
        KEY,
        on_group=lambda index, group: events.append((index, group)),
        check_stop=lambda: events.append("step"),
    )
    announced = [event for event in events if event != "step"]
    assert sorted(index for index, _ in announced) == list(range(len(PROMPTS)))
    assert all(groups[index] == group for index, group in announced)
    lengths = [max(len(c.token_ids) for c in group) for _, group in announced]
    assert lengths == sorted(lengths)
    assert len(set(lengths)) > 1
    assert "step" in events[events.index(announced[0]) :]


def test_a_stop_ends_the_batch_and_leaves_the_engine_usable(engine):
    class Stop(Exception):
        pass

    calls = []

    def check():
        calls.append(1)
        if len(calls) == 5:
            raise Stop

    before = greedy(engine)
    with pytest.raises(Stop):
        engine.generate(requests(), SamplingParams(max_new_tokens=50), KEY, check_stop=check)
    assert not engine._llm.has_unfinished_requests()
    assert greedy(engine) == before


def test_nan_weights_are_told_by_row_and_step(engine, model):
    broken = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    broken["model.norm.weight"][3] = float("nan")
    engine.load_weights(broken.items(), 33)
    with pytest.raises(NonFiniteError, match=r"at token 1 of request \d, row \d+ \(weights of step 33\)"):
        engine.generate(requests(), SamplingParams(max_new_tokens=4), KEY)
    engine.load_weights(model.state_dict().items(), 34)
    assert greedy(engine) == generated(model)


@pytest.mark.parametrize("temperature", [0.001, 2.5])
def test_a_temperature_that_vllm_does_not_know_is_refused(engine, temperature):
    with pytest.raises(RecipeError, match="temperature"):
        engine.generate(requests(), SamplingParams(max_new_tokens=4, temperature=temperature), KEY)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda state: state.pop("model.layers.1.mlp.up_proj.weight"), r"not both times, `model.layers.1.mlp.up_proj.weight` among them"),
        (lambda state: state.update({"model.stranger.weight": torch.zeros(3)}), "could not take the weights of step 50: .*'stranger'"),
        (
            lambda state: state.update({"model.layers.1.mlp.down_proj.weight": torch.zeros(3, 3)}),
            "vLLM could not take the weights of step 50",
        ),
    ],
    ids=["missing", "unknown", "shape"],
)
def test_a_failed_update_ends_the_engine(engine, model, spoil, says):
    state = dict(model.state_dict())
    spoil(state)
    with pytest.raises(EngineError, match=says):
        engine.load_weights(state.items(), 50)
    assert engine.weights_version != 50
    for use in (lambda: greedy(engine), lambda: engine.load_weights(model.state_dict().items(), 51)):
        with pytest.raises(EngineError, match="of no use any more: .* weights of step 50"):
            use()


def test_a_first_load_that_lacks_a_parameter_is_told(engine, model, monkeypatch):
    monkeypatch.setattr(engine, "_names", frozenset())
    state = dict(model.state_dict())
    del state["model.norm.weight"]
    with pytest.raises(EngineError, match=r"weights of 1 parameters were not sent, `model.norm.weight`"):
        engine.load_weights(state.items(), 60)


def test_generating_draws_no_number_of_the_trainers(engine):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    engine.generate(requests(), SamplingParams(max_new_tokens=10), KEY)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == 1


def test_bf16_follows_updates_and_samples_nearly_as_the_model_does(tmp_path):
    engine = engine_for(tmp_path, build("qwen2"), dtype="bfloat16")
    try:
        for seed in (0, 1):
            model = build("qwen2", seed, spread=4.0)
            engine.load_weights(model.state_dict().items(), seed)
            for prompt, group in zip(PROMPTS, engine.generate(requests(), SamplingParams(max_new_tokens=30), KEY), strict=True):
                for c in group:
                    logp = forward_logits(model, prompt, c).log_softmax(-1).gather(1, torch.tensor(c.token_ids)[:, None])[:, 0]
                    assert (torch.tensor(c.logprobs) - logp).abs().mean() < 0.1
    finally:
        engine.close()


def test_the_transformers_implementation_follows_updates_and_spares_the_trainers_class(tmp_path):
    trained = build("llama")
    before = trained(torch.tensor([PROMPTS[0]])).logits
    engine = engine_for(tmp_path, trained, model_impl="transformers")
    try:
        assert torch.equal(trained(torch.tensor([PROMPTS[0]])).logits, before)
        for seed in (0, 1):
            model = build("llama", seed)
            engine.load_weights(model.state_dict().items(), seed)
            assert greedy(engine) == generated(model)
    finally:
        engine.close()


def test_what_this_platform_or_vllm_cannot_do_is_told_at_the_start(tmp_path, caplog):
    model = build("qwen2")
    with pytest.raises(RecipeError, match="vllm_enable_sleep_mode: vLLM cannot give memory back on this platform"):
        engine_for(tmp_path, model, enable_sleep_mode=True)
    with (
        caplog.at_level(logging.ERROR),
        pytest.raises(EngineError, match=r"vLLM cannot be started with .*: User-specified max_model_len \(100000\)"),
    ):
        engine_for(tmp_path, model, max_model_length=100_000)
    with caplog.at_level(logging.ERROR), pytest.raises(EngineError, match="Unsupported CPU attention configuration: head_dim=16"):
        engine_for(tmp_path, tiny.qwen2())
