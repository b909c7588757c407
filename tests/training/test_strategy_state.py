"""What the strategies that shard keep, give back, and leave undone when a rank fails or is stopped."""

import copy

import pytest
import rig
import tiny
import torch
from accelerate import Accelerator
from processes import run_ranks

from rloo_cli.errors import NeighbourError, NonFiniteError
from rloo_cli.recipe.accelerate_config import Distribution
from rloo_cli.recipe.schema import TrainingSection
from rloo_cli.run.ranks import join_ranks
from rloo_cli.run.shards import SavedState
from rloo_cli.run.signals import StopRequested
from rloo_cli.training import auto
from rloo_cli.training.optimizer import build_optimizer

STRATEGIES = ("fsdp2", "zero2", "zero3")


def adam(policy, name="adamw_torch"):
    # A key's bias has no gradient but rounding, which a small epsilon would make steps of.
    training = TrainingSection(learning_rate=1e-2, optim=name, weight_decay=0.1, lr_scheduler_type="linear", adam_epsilon=1e-2)
    return build_optimizer(policy, training, total_steps=5, accelerator=Accelerator(cpu=True))


def updater(model, ranks, strategy, **options):
    distribution = Distribution(strategy=strategy) if strategy else None
    return rig.make_updater(model, ranks=ranks, max_tokens=64, max_norm=0.5, distribution=distribution, **{"optimizer": adam, **options})


def take_steps(made, numbers):
    for number in numbers:
        made.update(rig.make_experience(seed=number), 0, step=number)


def whole_state(strategy, ranks):
    """A checkpoint in memory, of all ranks' parts."""
    local = strategy.local_state()
    gathered = []
    for parts in zip(*ranks.gather(({**local.model}, {**local.optimizer})), strict=True):
        tensors = {}
        for part in parts:
            for name, shard in part.items():
                tensors.setdefault(name, torch.full(shard.shape, float("nan")))
                tensors[name].view(-1)[shard.start : shard.start + len(shard.values)] = shard.values
        gathered.append(tensors)
    model, optimizer = gathered
    assert not any(tensor.isnan().any() for tensor in [*model.values(), *optimizer.values()])
    return model, optimizer, ranks.broadcast(dict(local.document))


def saved(model, optimizer, document):
    return SavedState(model=rig.InMemory(model), optimizer=rig.InMemory(optimizer), document=document)


def held(strategy):
    """Elements of parameters in this rank's memory."""
    if strategy.name == "fsdp2":
        return sum(p.to_local().numel() for p in strategy.policy.parameters())
    if strategy.name == "zero3":
        return sum(p.data.numel() + p.ds_tensor.numel() for p in strategy.policy.parameters())
    return sum(fragment.hp_fragment.numel() for p in strategy.policy.parameters() if (fragment := p._hp_mapping))


def state(ranks, strategy, optimizer="adamw_torch"):
    """Two steps, the state after them, and a third: by whoever took the first two, and by another that takes up the state."""
    make = lambda policy: adam(policy, optimizer)  # noqa: E731
    first = updater(tiny.qwen2(), ranks, strategy, optimizer=make)
    take_steps(first, (1, 2))
    kept = copy.deepcopy(whole_state(first.strategy, ranks))
    names = [name for name, _ in first.strategy.named_tensors()]
    two = rig.whole(first.strategy)
    take_steps(first, (3,))
    second = updater(tiny.qwen2(seed=9), ranks, strategy, optimizer=make)
    second.strategy.load_state(saved(*kept))
    again = rig.whole(second.strategy)
    take_steps(second, (3,))
    return {
        "saved": kept,
        "names": names,
        "weights": (two, again),
        "third": (rig.whole(first.strategy), rig.whole(second.strategy)),
        "held": held(first.strategy),
        "bad": first.strategy.first_non_finite(),
    }


def failing(ranks, strategy, error):
    """(what a step raises whose second micro-batch fails on rank 1, whether the weights are as before)."""
    made, passes = updater(tiny.qwen2(), ranks, strategy), []
    loss_of = made._loss_of

    def fail(*arguments, **options):
        passes.append(1)
        if ranks.rank == 1 and len(passes) == 2:
            if error is None:
                made.stop.request("SIGUSR1")
            else:
                raise error
        return loss_of(*arguments, **options)

    made._loss_of = fail
    before = rig.whole(made.strategy)
    try:
        made.update(rig.make_experience(prompts=8), 0, step=1)
    except (NonFiniteError, NeighbourError, StopRequested) as raised:
        return type(raised).__name__, torch.equal(before, rig.whole(made.strategy))


def bad_gradient(ranks, strategy):
    """(what a step raises whose gradient is NaN on rank 1, whether the weights are as before)."""
    made = updater(tiny.qwen2(), ranks, strategy)
    if ranks.rank == 1:
        backward = made.strategy.backward
        made.strategy.backward = lambda loss, *, is_last: backward(loss * float("nan"), is_last=is_last)
    before = rig.whole(made.strategy)
    try:
        made.update(rig.make_experience(), 0, step=1)
    except NonFiniteError as raised:
        return str(raised), torch.equal(before, rig.whole(made.strategy))


def unpackable(ranks, strategy):
    """(layout of a model whose packed pass raises, weights after a step in that layout)."""
    made = updater(tiny.falcon_h1(), ranks, strategy, layout="plain")
    policy = made.policy
    policy.layout = auto.decide_layout(
        TrainingSection(), policy, prompt_ids=(1, 2, 3), completion_length=5, give_up=made.strategy.give_up_pass
    )
    take_steps(made, (1,))
    return policy.layout, rig.whole(made.strategy)


def on_rank(rank, strategy):
    Accelerator(cpu=True)
    ranks = join_ranks()
    return {
        "state": state(ranks, strategy),
        "adagrad": state(ranks, strategy, "adagrad")["third"],
        "NaN": failing(ranks, strategy, NonFiniteError("the loss is nan")),
        "stop": failing(ranks, strategy, None),
        "gradient": bad_gradient(ranks, strategy),
        "unpackable": unpackable(ranks, strategy),
    }


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_two_ranks_keep_and_give_back(strategy, tmp_path):
    main, other = run_ranks(on_rank, 2, tmp_path, strategy)
    alone = updater(tiny.qwen2(), None, None)
    count = len(rig.whole(alone.strategy))
    take_steps(alone, (1, 2))
    for found in (main["state"], other["state"]):
        assert torch.allclose(found["weights"][0], rig.whole(alone.strategy), rtol=1e-4, atol=1e-5)
        assert torch.equal(*found["weights"])
        assert torch.equal(*found["third"])
        assert found["held"] < 0.6 * count
        assert found["bad"] is None
        assert found["names"] == [name for name, _ in alone.strategy.named_tensors()]
    resumed = updater(tiny.qwen2(seed=9), None, None)
    resumed.strategy.load_state(saved(*main["state"]["saved"]))
    take_steps(resumed, (3,))
    assert torch.allclose(rig.whole(resumed.strategy), main["state"]["third"][0], rtol=1e-4, atol=1e-5)
    assert torch.equal(*main["adagrad"])
    assert (main["NaN"], other["NaN"]) == (("NeighbourError", True), ("NonFiniteError", True))
    assert (main["stop"], other["stop"]) == (("StopRequested", True),) * 2
    assert all("the gradient norm is nan" in found["gradient"][0] and found["gradient"][1] for found in (main, other))
    layout, weights = main["unpackable"]
    assert layout == "plain"
    single = updater(tiny.falcon_h1(), None, None, layout="plain")
    take_steps(single, (1,))
    assert torch.allclose(weights, rig.whole(single.strategy), rtol=1e-4, atol=1e-5)
