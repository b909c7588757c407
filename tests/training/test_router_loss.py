"""The auxiliary loss of mixtures of experts: transformers' own formula, and gradients that depend on no cut."""

import importlib

import pytest
import rig
import tiny
import torch
from test_run import gold, start

from rloo_cli.errors import RecipeError
from rloo_cli.training.microbatches import build_scoring_batch
from rloo_cli.training.policy import Policy
from rloo_cli.training.router_loss import RouterLoss
from rloo_cli.training.rows import select_rows

MODELS = {"mixtral": tiny.mixtral, "qwen2_moe": tiny.qwen2_moe}
COEFFICIENT = 0.3
FLAT = [[0.5] * 4, [1.0, 0.0, 1.0, 0.0], [0.0] * 4, [None, 1.0, None, None]]


def aux_alone(model, group):
    """transformers' function over each row by itself, [G]; the last token is never an input."""
    function = importlib.import_module(type(model).__module__).load_balancing_loss_func
    config, rows = model.config, []
    model.set_attn_implementation("sdpa")
    for completion in group.completions:
        ids = torch.tensor([group.prompt.token_ids + completion.token_ids[:-1]])
        logits = model(input_ids=ids, output_router_logits=True).router_logits
        experts = getattr(config, "num_local_experts", None) or config.num_experts
        rows.append(function(tuple(logits), experts, config.num_experts_per_tok))
    return torch.stack(rows)


def pieces_of(experience):
    return select_rows(experience, range(len(experience.groups)), torch.ones_like(experience.is_scored_PG))


def naive_gradient(model, experience, *, masked=lambda p, g: False):
    """REINFORCE and the auxiliary loss, row by row."""
    expected = rig.naive_gradient(model, None, experience, masked=masked)
    model.zero_grad()
    kept = [(p, g) for p, group in enumerate(experience.groups) for g in range(len(group.completions)) if not masked(p, g)]
    total = sum(aux_alone(model, group)[[g for q, g in kept if q == p]].sum() for p, group in enumerate(experience.groups))
    (COEFFICIENT * total / len(kept)).backward()
    own = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])
    return expected + own, total.item() / len(kept)


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("layout", ["packed", "plain"])
def test_each_row_has_what_transformers_gives_for_it_alone(name, layout):
    model, experience = MODELS[name](), rig.make_experience()
    router, policy = RouterLoss(model, 1.0), Policy(model, layout=layout, temperature=1.0, head_chunk=None)
    pieces = pieces_of(experience)
    with torch.no_grad(), router.recording() as logits:
        policy(build_scoring_batch(pieces, layout, torch.device("cpu")))
    found = router.by_row(logits, pieces, layout)
    with torch.no_grad():
        expected = torch.cat([aux_alone(model, group) for group in experience.groups])
    assert torch.allclose(found, expected, atol=1e-5)
    assert found.std() > 0.01


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize(
    "options",
    [{}, {"layout": "plain"}, {"max_rows": 3}, {"max_tokens": 40}, {"checkpointing": True}, {"mask_truncated_completions": True}],
    ids=str,
)
def test_the_gradient_is_that_of_the_naive_computation_however_it_is_cut(name, options):
    truncated = ((0, 1), (3, 2))
    experience = rig.make_experience(rewards=FLAT, truncated=truncated)
    masked = (lambda p, g: (p, g) in truncated) if options.get("mask_truncated_completions") else (lambda p, g: False)
    expected, aux = naive_gradient(MODELS[name](), experience, masked=masked)
    updater = rig.make_updater(MODELS[name](), router_aux_loss_coef=COEFFICIENT, **options)
    gradient, _, metrics = rig.gradient_of_update(updater, experience)
    assert rig.relative(gradient, expected) < 1e-5
    assert metrics["aux_loss"] == pytest.approx(aux, rel=1e-5)
    assert metrics["rows/skipped"] == (2 if "mask_truncated_completions" in options else 0)


def test_without_it_rows_without_an_advantage_are_left_out():
    experience = rig.make_experience(rewards=FLAT)
    gradient, _, metrics = rig.gradient_of_update(rig.make_updater(tiny.mixtral()), experience)
    assert metrics["rows/skipped"] == 12
    assert "aux_loss" not in metrics
    assert rig.relative(gradient, rig.naive_gradient(tiny.mixtral(), None, experience)) < 1e-5


def test_it_goes_with_reuse_and_a_reference():
    model, reference = tiny.mixtral(), rig.drifted(tiny.mixtral())
    updater = rig.make_updater(model, reference, router_aux_loss_coef=COEFFICIENT, slices=2, iterations=2, lr=1e-3)
    experience = rig.make_experience(rewards=FLAT)
    for use in range(4):
        experience, metrics = updater.update(experience, use, step=use + 1)
        assert metrics["aux_loss"] > 0


def test_routers_of_an_even_model_have_the_smallest_loss():
    model = tiny.mixtral()
    for layer in model.model.layers:
        layer.mlp.gate.weight.data.zero_()
    aux = aux_alone(model, rig.make_groups()[0])
    assert torch.allclose(aux, torch.full_like(aux, 2.0))  # experts of a token


def test_training_with_it_makes_routers_more_even():
    experience = rig.make_experience(rewards=[[0.5] * 4] * 4)  # no advantage: the auxiliary loss alone has a gradient
    updater = rig.make_updater(tiny.mixtral(), router_aux_loss_coef=1.0, lr=0.05)
    found = [updater.update(experience, 0, step=step)[1]["aux_loss"] for step in range(1, 11)]
    assert found[-1] < found[0] - 0.01
    assert found[-1] > 2.0  # the least there is


def test_a_run_with_it_is_the_same_twice(tmp_path, monkeypatch):
    options = {"model": tiny.mixtral, "algorithm__router_aux_loss_coef": 0.5}
    first, second = (gold(start(tmp_path / name, monkeypatch, **options)) for name in ("a", "b"))
    assert first == second
    assert all(row["aux_loss"] > 0 for row in first[0])


def test_a_model_without_routers_is_refused():
    with pytest.raises(RecipeError, match=r"algorithm\.router_aux_loss_coef: Qwen2ForCausalLM has no router"):
        rig.make_updater(tiny.qwen2(), router_aux_loss_coef=0.1)
