"""The estimator on a problem small enough to enumerate: vocabulary 3, completions of 2 tokens, a softmax policy.

The exact gradient is a finite sum over the 9 completions; the expectation of an estimate over a group of G is a finite sum
over the 9^G tuples. Everything in float64.
"""

import itertools

import pytest
import torch

from rloo_cli.algorithm.advantages import leave_one_out_advantages
from rloo_cli.algorithm.loss import reinforce_loss

COMPLETIONS = list(itertools.product(range(3), repeat=2))


def parameters(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3 + 9, generator=generator, dtype=torch.float64, requires_grad=True)


def log_probs(theta):
    """log π of each completion, [9]: first token from 3 logits, second from a row of 3 for each first token."""
    first = theta[:3].log_softmax(0)
    second = theta[3:].view(3, 3).log_softmax(1)
    return torch.stack([first[a] + second[a, b] for a, b in COMPLETIONS])


def rewards(seed=1):
    return torch.randn(9, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def expected_gradient(group_size, coefficients):
    """Σ over all tuples of probability × gradient of the loss whose advantages are `coefficients(indices)`."""
    theta = parameters()
    logp = log_probs(theta)
    jacobian = torch.stack([torch.autograd.grad(logp[i], theta, retain_graph=True)[0] for i in range(9)])
    total = torch.zeros_like(theta)
    tuples = torch.tensor(list(itertools.product(range(9), repeat=group_size)))
    advantage = coefficients(tuples)
    probability = logp.detach()[tuples].sum(1).exp()
    for g in range(group_size):
        total = total - ((probability * advantage[:, g])[:, None] * jacobian[tuples[:, g]]).sum(0) / group_size
    return total


def exact_gradient(value):
    """The gradient of −E[value]."""
    theta = parameters()
    return torch.autograd.grad(-(log_probs(theta).exp() * value).sum(), theta)[0]


def loo(value):
    def coefficients(tuples):
        chosen = value[tuples]
        return leave_one_out_advantages(chosen, torch.ones_like(chosen, dtype=torch.bool))

    return coefficients


@pytest.mark.parametrize("group_size", [2, 3, 4])
def test_leave_one_out_is_unbiased(group_size):
    assert (expected_gradient(group_size, loo(rewards())) - exact_gradient(rewards())).abs().max() < 1e-10


@pytest.mark.parametrize("group_size", [2, 3, 4])
def test_a_plain_mean_baseline_shrinks_the_gradient_by_g_minus_one_over_g(group_size):
    value = rewards()
    estimate = expected_gradient(group_size, lambda tuples: value[tuples] - value[tuples].mean(1, keepdim=True))
    assert (estimate - (group_size - 1) / group_size * exact_gradient(value)).abs().max() < 1e-10


def test_the_k1_penalty_in_the_reward_gives_the_gradient_of_the_penalised_objective():
    beta, reference = 0.3, log_probs(parameters(seed=7)).detach()
    k1 = log_probs(parameters()).detach() - reference
    theta = parameters()
    logp = log_probs(theta)
    objective = (logp.exp() * rewards()).sum() - beta * (logp.exp() * (logp - reference)).sum()
    exact = torch.autograd.grad(-objective, theta)[0]
    assert (expected_gradient(2, loo(rewards() - beta * k1)) - exact).abs().max() < 1e-10


def test_token_mean_aggregation_is_not_the_policy_gradient():
    """With lengths 1 and 2 (completions that start with token 0 end there) dividing by length changes the direction."""
    lengths = torch.tensor([1.0 if a == 0 else 2.0 for a, _ in COMPLETIONS], dtype=torch.float64)
    estimate = expected_gradient(2, lambda tuples: loo(rewards())(tuples) / lengths[tuples])
    exact = exact_gradient(rewards())
    assert torch.nn.functional.cosine_similarity(estimate, exact, dim=0) < 0.999


def test_the_loss_function_has_the_gradient_that_the_enumeration_uses():
    theta = parameters()
    chosen = torch.tensor([1, 4, 4, 8])
    advantage = loo(rewards())(chosen[None])[0]
    loss = reinforce_loss(log_probs(theta)[chosen], advantage, n=4)
    gradient = torch.autograd.grad(loss, theta)[0]
    step = 1e-6
    for i in range(len(theta)):
        shift = torch.zeros_like(theta)
        shift[i] = step
        high = reinforce_loss(log_probs(theta.detach() + shift)[chosen], advantage, n=4)
        low = reinforce_loss(log_probs(theta.detach() - shift)[chosen], advantage, n=4)
        assert abs((high - low) / (2 * step) - gradient[i]) < 1e-8
