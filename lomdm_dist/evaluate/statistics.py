"""Means and their standard errors, from sums that ranks can add up."""

import math

import torch
from torch import Tensor


def moments(values: Tensor, tokens: Tensor) -> Tensor:
    """What `ratio` needs of samples, each with a value [N] and a number of tokens [N]: six sums, float64."""
    values, tokens = values.double(), tokens.double()
    terms = [torch.ones_like(values), tokens, tokens**2, values, values**2, values * tokens]
    return torch.stack([term.sum() for term in terms])


def ratio(count, tokens, tokens2, value, value2, value_tokens) -> tuple[float, float]:
    """A sum of values a token, and its standard error over the samples, whose token counts may differ.

    The arguments are the sums over samples that `moments` names. The error (of a ratio estimator, to
    first order) is nan for a single sample; without tokens both are.
    """
    count, tokens, tokens2, value, value2, value_tokens = map(
        float, (count, tokens, tokens2, value, value2, value_tokens)
    )
    if tokens == 0:
        return math.nan, math.nan
    mean = value / tokens
    residual = value2 - 2 * mean * value_tokens + mean**2 * tokens2
    return mean, math.sqrt(max(residual, 0.0) * count / (count - 1)) / tokens if count > 1 else math.nan


def exp(nll: float) -> float:
    """Perplexity of nats a token; inf instead of an overflow."""
    return math.inf if nll >= 700 else math.exp(nll)
