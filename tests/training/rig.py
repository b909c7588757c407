"""An updater over a tiny model and a made-up generation batch, and the naive computation it is held to."""

from __future__ import annotations

import copy
import random

import torch
from accelerate import Accelerator

from rloo_cli.recipe.distribution import Distribution
from rloo_cli.recipe.schema import AlgorithmSection
from rloo_cli.run.ranks import Ranks
from rloo_cli.run.shards import SavedState
from rloo_cli.run.signals import StopSignal
from rloo_cli.training.experience import build_experience
from rloo_cli.training.optimizer import OptimizerAndSchedule
from rloo_cli.training.parts import unique_names
from rloo_cli.training.policy import Policy, disable_dropout, make_reference
from rloo_cli.training.strategy import make_strategy
from rloo_cli.training.update import Updater, UpdateSettings
from rloo_cli.types import Completion, FinishReason, Group, GroupRewards, Prompt

TEMPERATURE = 0.8


def make_groups(seed=0, prompts=4, generations=4, vocab=250, truncated=()):
    draw = random.Random(seed)
    ids = lambda n: tuple(draw.randrange(vocab) for _ in range(n))  # noqa: E731
    groups = []
    for p in range(prompts):
        prompt = Prompt(row=p, content="x", text="x", token_ids=ids(draw.randint(2, 9)), columns={})
        completions = []
        for g in range(generations):
            tokens = ids(draw.choice([1, 3, 8, 13]))
            reason = FinishReason.TRUNCATED if (p, g) in truncated else FinishReason.STOPPED
            completions.append(Completion(token_ids=tokens, logprobs=(-5.0,) * len(tokens), finish_reason=reason, weights_version=0))
        groups.append(Group(prompt=prompt, completions=tuple(completions), texts=("x",) * generations))
    return groups


def make_experience(seed=0, rewards=None, **options):
    groups = make_groups(seed, **options)
    draw = random.Random(seed + 100)
    width = len(groups[0].completions)
    values = rewards or [[draw.choice([0.0, 1.0, draw.random()]) for _ in range(width)] for _ in groups]
    return build_experience(1, groups, [GroupRewards(values=(tuple(row),)) for row in values], [1.0])


def drifted(model, scale=0.05, seed=3):
    """A copy of the model with every weight moved a little: a reference that KL can be measured against."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += scale * parameter.abs().mean() * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return other


def sgd(policy, rate):
    optimizer = torch.optim.SGD(policy.parameters(), lr=rate)
    return OptimizerAndSchedule(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0))


def make_updater(
    model,
    reference=None,
    *,
    layout="packed",
    max_tokens=10**6,
    max_rows=None,
    slices=1,
    iterations=1,
    dropout=False,
    chunk=None,
    stale=False,
    ranks=None,
    distribution=None,
    checkpointing=False,
    optimizer=None,
    max_norm=0.0,
    **fields,
):
    """An updater whose optimizer is SGD with learning rate 1: the weights' change is the gradient.

    `distribution`: of a strategy that shards. Its reference is laid out as the policy at first, which then gets its own weights.
    """
    accelerator = Accelerator(cpu=True)
    disable_dropout(model)
    policy = Policy(model, layout=layout, temperature=TEMPERATURE, head_chunk=chunk)
    rate = fields.pop("lr", 1.0)
    settings = UpdateSettings(
        slices=slices,
        off_policy=slices * iterations > 1,
        max_tokens=max_tokens,
        max_rows=max_rows,
        max_grad_norm=max_norm,
        active_dropout=dropout,
        is_stale=stale,
    )
    ranks = ranks or Ranks()
    strategy = make_strategy(distribution or Distribution(), accelerator, ranks)
    make = optimizer or (lambda policy: sgd(policy, rate))
    frozen = None
    if distribution is None:
        if reference is not None:
            frozen = make_reference(Policy(reference, layout=layout, temperature=TEMPERATURE, head_chunk=chunk), low_precision=None)
        strategy.distribute(policy, make)
    elif reference is None:
        strategy.distribute(policy, make)
    else:
        weights = {name: tensor.detach().clone() for name, tensor in unique_names(model)}
        model.load_state_dict(reference.state_dict())
        strategy.distribute(policy, make)
        frozen = strategy.make_reference(low_precision=None)
        strategy.load_state(
            SavedState(model=InMemory(weights), optimizer=InMemory({}), document={"scalars": {}, **strategy.optimizer.document()})
        )
    if checkpointing:
        policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    return Updater(
        accelerator=accelerator,
        reference=frozen,
        algorithm=AlgorithmSection(**{"beta": 0.05 if reference is not None else 0.0, **fields}),
        settings=settings,
        strategy=strategy,
        ranks=ranks,
        stop=StopSignal(),
    )


class InMemory:
    """Saved tensors, of a checkpoint that was never written."""

    def __init__(self, tensors):
        self.tensors = tensors
        self.names = tuple(tensors)

    def shape(self, name):
        return tuple(self.tensors[name].shape)

    def read(self, name, start=0, stop=None):
        return self.tensors[name].reshape(-1)[start:stop]


def whole(strategy):
    """All weights in one tensor, gathered."""
    parts, previous = [], None
    for _, tensor in strategy.named_tensors():
        if tensor is not previous:  # a tied weight's other name
            parts.append(tensor.flatten().clone())
        previous = tensor
    return torch.cat(parts)


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def gradient_of_update(updater, experience, use=0):
    """(gradient, experience after, metrics)."""
    before = whole(updater.strategy)
    after, metrics = updater.update(experience, use, step=1)
    return before - whole(updater.strategy), after, metrics


def row_logprobs(model, group):
    """ℓ_i of each completion by a forward of its own, [G]."""
    model.set_attn_implementation("sdpa")
    rows = []
    for completion in group.completions:
        ids = torch.tensor([group.prompt.token_ids + completion.token_ids])
        logs = (model(input_ids=ids).logits[0, len(group.prompt.token_ids) - 1 : -1] / TEMPERATURE).log_softmax(-1)
        rows.append(logs.gather(1, torch.tensor(completion.token_ids)[:, None]).sum())
    return torch.stack(rows)


def naive_gradient(model, reference, experience, *, beta=0.05, n=None, masked=lambda p, g: False):
    """The three-pass computation, row by row: old log-probs, reference log-probs, then the loss; no tricks."""
    model.zero_grad()
    total, count = 0.0, 0
    for p, group in enumerate(experience.groups):
        logp = row_logprobs(model, group)
        rewards = list(experience.rewards[p].values[0])
        if reference is not None:
            with torch.no_grad():
                kl = row_logprobs(model, group) - row_logprobs(reference, group)
            rewards = [r if r is None else r - beta * k.item() for r, k in zip(rewards, kl, strict=True)]
        for i, reward in enumerate(rewards):
            if masked(p, i):
                continue
            count += 1
            others = [r for j, r in enumerate(rewards) if j != i and r is not None]
            if reward is not None and others:
                total = total + (reward - sum(others) / len(others)) * logp[i]
    (-total / (n or count)).backward()
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()]).clone()


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()
