import torch

from rloo_cli.algorithm.kl import sequence_kl
from rloo_cli.algorithm.loss import clipped_loss, effective_sample_size, importance_weights, is_clipped, reinforce_loss, sequence_ratio


def row(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_n_counts_rows_that_are_not_there():
    assert reinforce_loss(row(-2.0, -3.0), row(1.0, -1.0), n=4).item() == -0.25
    assert reinforce_loss(row(), row(), n=0).item() == 0.0


def test_clipping_is_by_sequence_and_pessimistic():
    ratio, advantage = row(1.5, 1.5, 0.5, 0.5), row(1.0, -1.0, 1.0, -1.0)
    loss = clipped_loss(ratio, advantage, 4, epsilon=0.2, epsilon_high=0.3)
    assert torch.isclose(loss, -(row(1.3, -1.5, 0.5, -0.8).sum()) / 4)
    assert is_clipped(ratio, advantage, epsilon=0.2, epsilon_high=0.3).tolist() == [True, False, False, True]


def test_a_ratio_of_one_gives_the_reinforce_gradient():
    logp = row(-1.0, -2.0).requires_grad_()
    old, advantage = logp.detach().clone(), row(0.7, -0.7)
    ratio = sequence_ratio(logp, old)
    assert ratio.tolist() == [1.0, 1.0]
    clipped = torch.autograd.grad(clipped_loss(ratio, advantage, 2, epsilon=0.2, epsilon_high=0.2), logp)[0]
    plain = torch.autograd.grad(reinforce_loss(logp, advantage, 2), logp)[0]
    assert torch.equal(clipped, plain)


def test_the_exponent_is_bounded():
    assert torch.isfinite(sequence_ratio(torch.tensor([900.0, -900.0]), torch.zeros(2))).all()


def test_importance_weights_are_constant_and_capped():
    logp, sampler = row(0.0, 0.0, 0.0).requires_grad_(), row(-2.0, 0.0, 1.0)
    assert importance_weights(logp, sampler, "none", 2.0) is None
    truncated = importance_weights(logp, sampler, "truncate", 2.0)
    assert not truncated.requires_grad
    assert torch.allclose(truncated, row(2.0, 1.0, 0.36787944))
    assert torch.allclose(importance_weights(logp, sampler, "mask", 2.0), row(0.0, 1.0, 0.36787944))


def test_effective_sample_size_is_one_where_sampler_and_trainer_agree():
    assert effective_sample_size(row(-3.0, -4.0), row(-3.0, -4.0)).item() == 1.0
    assert effective_sample_size(row(-3.0, 0.0), row(-3.0, -50.0)).item() < 0.51


def test_kl_is_summed_over_the_completion_and_may_be_negative():
    kl = sequence_kl(torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-2.0, -2.0, -1.0]), torch.tensor([0, 0, 1]), 2)
    assert kl.tolist() == [1.0, -2.0]
