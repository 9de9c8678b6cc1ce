"""Masking schedules: when each position of a sequence is masked.

A schedule tells, for a time t in (0, 1] (1 is all masks) and each position i, the probability
alpha_i(t) that the position is still clean, and the velocity A_i(t) = -alpha_i'(t) / (1 - alpha_i(t)).
"""

import torch
from torch import Tensor


def _column(t: Tensor) -> Tensor:
    """[B] or [B, 1] -> [B, 1], float64."""
    return t.to(torch.float64).reshape(-1, 1)


class PowerSchedule:
    """1 - alpha_i(t) = t**e_i. MDLM is e = 1; LoMDM learns e_i.

    A small exponent is masked early in the forward process, hence revealed late; a large one is
    revealed early. `exponent` is positive, [B, L] or broadcastable to it, and may carry gradients.
    """

    def __init__(self, exponent: Tensor):
        self.exponent = exponent.to(torch.float64)

    def log_mask_prob(self, t: Tensor) -> Tensor:
        """log(1 - alpha_i(t)), [B, L]."""
        return self.exponent * _column(t).log()

    def log_keep_prob(self, t: Tensor) -> Tensor:
        """log(alpha_i(t)), [B, L]; -inf at t = 1, with gradient 0 there instead of NaN."""
        log_mask = self.log_mask_prob(t)
        inside = log_mask < 0
        log_keep = torch.log(-torch.expm1(torch.where(inside, log_mask, -1.0)))
        return torch.where(inside, log_keep, -torch.inf)

    def velocity(self, t: Tensor) -> Tensor:
        """A_i(t) = e_i / t, [B, L]."""
        return self.exponent / _column(t)

    def reveal_prob(self, t: Tensor, s: Tensor) -> Tensor:
        """Probability that a position masked at t is clean at s < t: 1 - (s/t)**e_i, [B, L]."""
        return -torch.expm1(self.exponent * (_column(s).log() - _column(t).log()))


def norm_sig(logits: Tensor, valid: Tensor | None = None) -> Tensor:
    """NormSig(g)_i = sigmoid(g_i) - mean_j sigmoid(g_j); [B, L] -> [B, L], float64, in (-1, 1).

    `valid` [B, L] leaves padding out of the mean; a padded position gets 0.
    """
    gate = torch.sigmoid(logits.to(torch.float64))
    if valid is None:
        return gate - gate.mean(dim=1, keepdim=True)
    gate = gate * valid
    mean = gate.sum(dim=1, keepdim=True) / valid.sum(dim=1, keepdim=True).clamp(min=1)
    return (gate - mean) * valid
