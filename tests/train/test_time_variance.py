"""The estimators of benchmarks/time_variance.py."""

import torch

from benchmarks.time_variance import GROUPS, Sums, square_of_mean


def test_variance_and_norm_of_the_mean():
    """Against torch's own variance, and a mean of norm 3 under noise of variance 50."""
    mean = torch.zeros(50, dtype=torch.float64)
    mean[7] = 3.0
    generator = torch.Generator().manual_seed(0)
    draws = mean + torch.randn(GROUPS, 100, 50, dtype=torch.float64, generator=generator)
    sums = Sums(draws.sum(dim=1), draws.square().sum(dim=(1, 2)), 100)
    torch.testing.assert_close(sums.variance(), draws.var(dim=1).sum(dim=1))
    torch.testing.assert_close(sums.variance().mean().item(), 50.0, atol=1.0, rtol=0)
    square, _ = square_of_mean(draws.mean(dim=1))
    assert abs(square - 9) < 0.6
    square, error = square_of_mean((draws - mean).mean(dim=1))
    assert abs(square) < 3 * error
