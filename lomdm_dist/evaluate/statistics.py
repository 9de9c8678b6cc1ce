"""Means and their standard errors."""

import math

from torch import Tensor


def ratio(values: Tensor, tokens: Tensor) -> tuple[float, float]:
    """A sum of values a token, and its standard error over the samples: each has a value and tokens, [N].

    The error (of a ratio estimator, to first order) is nan for a single sample; without tokens both are.
    """
    values, tokens = values.double(), tokens.double()
    count, total = len(values), float(tokens.sum())
    if total == 0:
        return math.nan, math.nan
    mean = float(values.sum()) / total
    residual = float((values - mean * tokens).square().sum())
    return mean, math.sqrt(residual * count / (count - 1)) / total if count > 1 else math.nan


def exp(nll: float) -> float:
    """Perplexity of nats a token; inf instead of an overflow."""
    return math.inf if nll >= 700 else math.exp(nll)
