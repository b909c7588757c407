"""What the strategies that shard keep, give back, and leave undone when a rank fails or is stopped."""

import copy

import processes
import pytest
import rig
import test_ranks_run
import test_run
import test_strategies
import tiny
import torch
from accelerate import Accelerator
from processes import run_ranks
from safetensors.torch import load_file

from rloo_cli.errors import DeviceMemoryError, NeighbourError, NonFiniteError, StoppedError
from rloo_cli.recipe.distribution import Distribution
from rloo_cli.recipe.schema import TrainingSection
from rloo_cli.run.checkpoint import find_checkpoint
from rloo_cli.run.folder import RunFolder
from rloo_cli.run.metrics import read_metrics
from rloo_cli.run.ranks import join_ranks
from rloo_cli.run.shards import SavedState
from rloo_cli.run.signals import StopRequested
from rloo_cli.training import auto
from rloo_cli.training.final_model import save_final_model
from rloo_cli.training.optimizer import build_optimizer

STRATEGIES = ("fsdp2", "zero2", "zero3")
CASES = ("reference and cut groups", "one rank without rows", "nobody has rows", "plain, checkpointing, recomputed head")
RUN = {"algorithm__num_iterations": 2, "algorithm__beta": 0.1, "training__optim": "sgd", "training__learning_rate": 0.1}


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


def runs(strategy, folder):
    """A whole run, and one that is stopped and goes on, each in its folder."""
    start = lambda name, **options: test_run.start(folder / name, test_ranks_run.Forever, strategy=strategy, **options, **RUN)  # noqa: E731
    start("whole")
    try:
        start("stopped", stop_at=3)
    except StoppedError as error:
        told = str(error)
    torch.distributed.barrier()
    start("stopped", resume=find_checkpoint(RunFolder(folder / "stopped").checkpoints))
    return told


def on_rank(rank, strategy, folder):
    Accelerator(cpu=True)
    ranks = join_ranks()
    distribution = Distribution(strategy=strategy)
    return {
        "steps": {case: test_strategies.step(case, strategy, ranks, distribution) for case in CASES},
        "state": state(ranks, strategy),
        "adagrad": state(ranks, strategy, "adagrad")["third"],
        "NaN": failing(ranks, strategy, NonFiniteError("the loss is nan")),
        "stop": failing(ranks, strategy, None),
        "gradient": bad_gradient(ranks, strategy),
        "unpackable": unpackable(ranks, strategy) if strategy != "zero2" else None,
        "told": runs(strategy, folder),
    }


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks(strategy, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "SECONDS", 280)
    (tmp_path / "runs").mkdir()
    found = run_ranks(on_rank, 2, tmp_path, strategy, tmp_path / "runs")
    test_strategies.compare(strategy, CASES, [by_rank["steps"] for by_rank in found])
    check_state(found)
    check_endings(*found)
    check_runs(found, tmp_path, monkeypatch)


def check_state(found):
    """Weights and state are all there, no rank has much more than its half, and whoever takes them up goes on alike."""
    alone = updater(tiny.qwen2(), None, None)
    count = len(rig.whole(alone.strategy))
    take_steps(alone, (1, 2))
    for kept in (by_rank["state"] for by_rank in found):
        assert torch.allclose(kept["weights"][0], rig.whole(alone.strategy), rtol=1e-4, atol=1e-5)
        assert torch.equal(*kept["weights"])
        assert torch.equal(*kept["third"])
        assert kept["held"] < 0.6 * count
        assert kept["bad"] is None
        assert kept["names"] == [name for name, _ in alone.strategy.named_tensors()]
    resumed = updater(tiny.qwen2(seed=9), None, None)
    resumed.strategy.load_state(saved(*found[0]["state"]["saved"]))
    take_steps(resumed, (3,))
    assert torch.allclose(rig.whole(resumed.strategy), found[0]["state"]["third"][0], rtol=1e-4, atol=1e-5)
    assert torch.equal(*found[0]["adagrad"])


def check_endings(main, other):
    """A failure or a stop on one rank ends the step on both, with nothing updated."""
    assert (main["NaN"], other["NaN"]) == (("NeighbourError", True), ("NonFiniteError", True))
    assert (main["stop"], other["stop"]) == (("StopRequested", True),) * 2
    assert all("the gradient norm is nan" in found["gradient"][0] and found["gradient"][1] for found in (main, other))
    if main["unpackable"] is not None:
        layout, weights = main["unpackable"]
        assert layout == "plain"
        single = updater(tiny.falcon_h1(), None, None, layout="plain")
        take_steps(single, (1,))
        assert torch.allclose(weights, rig.whole(single.strategy), rtol=1e-4, atol=1e-5)


def check_runs(found, tmp_path, monkeypatch):
    """A run has the metrics of one process; stopped and resumed it has its own bits."""
    assert all("SIGTERM: step 3 is saved" in by_rank["told"] for by_rank in found)
    whole, stopped = (RunFolder(tmp_path / "runs" / name) for name in ("whole", "stopped"))
    assert test_run.gold(whole) == test_run.gold(stopped)
    one = test_run.start(tmp_path / "one", monkeypatch, **RUN)
    test_ranks_run.close(read_metrics(whole.metrics), read_metrics(one.metrics))
    ours, theirs = (load_file(folder.final / "model.safetensors") for folder in (whole, one))
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[name], theirs[name], rtol=1e-3, atol=1e-4) for name in theirs)


def in_bf16(rank, strategy, folder):
    """Of weights that bf16 cannot hold: whether they are trained from as they are; the KL before any update; how far a tiny step has moved
    them; and what the gathered ones are then, whose final/ is written."""
    Accelerator(cpu=True, mixed_precision="bf16")
    model, ranks = tiny.qwen2(), join_ranks()
    before = rig.flat(model).clone()
    made = updater(model, ranks, strategy, optimizer=lambda policy: rig.sgd(policy, 1e-5), layout="plain")
    made.reference = made.strategy.make_reference(low_precision=torch.bfloat16)
    made.algorithm = made.algorithm.model_copy(update={"beta": 0.1})
    start = rig.whole(made.strategy)
    moved, after, _ = rig.gradient_of_update(made, rig.make_experience())
    save_final_model(RunFolder(folder), made.strategy, tiny.byte_tokenizer(), step=1, ranks=ranks, card=str)
    weights = {name: tensor.clone() for name, tensor in made.strategy.named_tensors()}
    return torch.equal(start, before), after.kl_PG.abs().max(), moved.norm(), weights


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_under_bf16_the_weights_that_are_updated_and_written_are_float32(strategy, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "SECONDS", 280)
    (tmp_path / "run").mkdir()
    for is_exact, kl, moved, weights in run_ranks(in_bf16, 2, tmp_path, strategy, tmp_path / "run"):
        assert is_exact
        assert kl == 0
        assert moved == pytest.approx(0.5e-5, rel=0.05)
        final = load_file(tmp_path / "run" / "final" / "model.safetensors")
        assert {tensor.dtype for tensor in final.values()} == {torch.float32}
        assert all(torch.equal(tensor, weights[name]) for name, tensor in final.items())
        assert final.keys() | {"lm_head.weight"} == weights.keys()  # it is tied


def out_of_memory(rank):
    Accelerator(cpu=True)
    made = updater(tiny.qwen2(), join_ranks(), "fsdp2")

    def fail(batch):
        raise MemoryError("no room")

    made.policy.forward = fail
    try:
        made.update(rig.make_experience(), 0, step=1)
    except DeviceMemoryError as error:
        return str(error)


@pytest.mark.slow
def test_out_of_memory_names_the_field_since_a_collective_cannot_be_tried_again(tmp_path):
    (told,) = run_ranks(out_of_memory, 1, tmp_path)
    assert "max_tokens_per_micro_batch: 32 or" in told
