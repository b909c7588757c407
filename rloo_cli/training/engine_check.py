"""How far the recipe's engine and the trainer are apart before anything is learnt: a batch sampled, and scored by the trainer."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from rloo_cli.algorithm.kl import sum_by_row
from rloo_cli.algorithm.loss import effective_sample_size
from rloo_cli.rollout.engine import GenerationRequest, RandomKey
from rloo_cli.training.adapter import plain_tensors
from rloo_cli.training.engines import give_weights
from rloo_cli.training.inputs import TrainingInputs
from rloo_cli.training.microbatches import GroupRows, build_scoring_batch
from rloo_cli.training.policy import Policy
from rloo_cli.training.sampling import training_params
from rloo_cli.training.setup import decide, load, make_policy, prepare_device
from rloo_cli.types import Completion

MOST_PROMPTS = 8
"""Groups that are sampled; enough to see a wrong weight, a wrong temperature, a wrong template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCheck:
    """What the check measured."""

    completions: int
    tokens: int
    """Of the completions."""
    generate_seconds: float
    sync_seconds: float
    logp_diff_mean: float
    """Mean over tokens of |log-prob by the trainer − log-prob by the engine|, nats."""
    logp_diff_max: float
    ess: float
    """Effective sample size of the sequence ratios, a share of the rows; 1 = the same policy."""


def check_engine(inputs: TrainingInputs) -> EngineCheck:
    """The weights handed over, a few groups sampled as training would, and their tokens scored by the trainer; nothing is updated.

    Raises:
        RlooError: as training's first step would.
    """
    with ExitStack() as stack:
        with inputs.progress.phase("load model"):
            device = prepare_device(inputs, stack)
            model = load(inputs).to(device.accelerator.device)
            policy = make_policy(inputs, model)
            decide(inputs, policy, device)
            engine = device.maker.make(model)
        started = time.perf_counter()
        give_weights(engine, plain_tensors(model), 0, device.ranks)
        synced = time.perf_counter()
        requests = _requests(inputs)
        key = RandomKey(seed=inputs.recipe.training.seed, step=1)
        with inputs.progress.phase("generate"):
            groups = engine.generate(requests, training_params(inputs.recipe), key, check_stop=inputs.stop.check)
        generated = time.perf_counter()
        with inputs.progress.phase("train"), device.accelerator.autocast():
            gap_N, logp_B, sampler_B = _gaps(policy.eval(), requests, groups, device.accelerator.device)
    return EngineCheck(
        completions=len(logp_B),
        tokens=len(gap_N),
        generate_seconds=generated - synced,
        sync_seconds=synced - started,
        logp_diff_mean=gap_N.mean().item(),
        logp_diff_max=gap_N.max().item(),
        ess=effective_sample_size(logp_B, sampler_B).item(),
    )


def _requests(inputs: TrainingInputs) -> list[GenerationRequest]:
    """Those of the first prompts of step 1."""
    group, count = inputs.batch.num_generations, min(MOST_PROMPTS, inputs.batch.prompts_per_generation)
    seed, shuffle = inputs.recipe.training.seed, inputs.recipe.data.shuffle_dataset
    prompts = inputs.prompts.draw(0, count, seed=seed, shuffle=shuffle, check_stop=inputs.stop.check)
    return [
        GenerationRequest(token_ids=prompt.token_ids, num_generations=group, first_row=i * group, visual=prompt.visual)
        for i, prompt in enumerate(prompts)
    ]


@torch.no_grad()
def _gaps(
    policy: Policy, requests: list[GenerationRequest], groups: list[tuple[Completion, ...]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(|difference| of every token [N], the trainer's and the engine's log-prob of every row [B]), float64."""
    gaps, ours, theirs = [], [], []
    for request, completions in zip(requests, groups, strict=True):
        rows = tuple(range(len(completions)))
        ids = tuple(c.token_ids for c in completions)
        piece = GroupRows(group=0, prompt_ids=request.token_ids, rows=rows, completion_ids=ids, visual=request.visual)
        batch = build_scoring_batch([piece], policy.layout, device)
        logp_N, _ = policy(batch)
        sampled = [value for row in batch.rows for value in completions[row].logprobs]
        sampled_N = torch.tensor(sampled, dtype=torch.float64, device=logp_N.device)
        gaps.append((logp_N.double() - sampled_N).abs())
        ours.append(sum_by_row(logp_N.double(), batch.row_N, len(rows)))
        theirs.append(sum_by_row(sampled_N, batch.row_N, len(rows)))
    return torch.cat(gaps), torch.cat(ours), torch.cat(theirs)
