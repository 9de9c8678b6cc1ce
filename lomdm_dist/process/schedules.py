"""Masking schedules: when each position of a sequence is masked.

A schedule tells, for a time t in (0, 1] (1 is all masks) and each position i, the probability
alpha_i(t) that the position is still clean, and the velocity A_i(t) = -alpha_i'(t) / (1 - alpha_i(t)).
"""

import torch
import torch.nn.functional as F
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

    def mask_prob(self, t: Tensor) -> Tensor:
        """1 - alpha_i(t), [B, L]."""
        return self.log_mask_prob(t).exp()

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


class WindowSchedule:
    """Fixed orders: each position is masked inside a time window of its own.

    1 - alpha_i(t) = eps t + (1 - eps) S((t - start_i) / width), S(u) = 3 u**2 - 2 u**3 on [0, 1].
    Of n windows the position (or block) that is generated first has the last, [1 - 1/n, 1]. The
    small share eps keeps every probability off 0, so that the bound differs from the chain rule's
    by O(eps). Positions share their window with none (`left_to_right`, `permutation`) or with
    their block (`blocks`: all of length 1 is left to right, one block is MDLM in another clock).
    """

    def __init__(self, window: Tensor, count: int, eps: float):
        """window [L]: 0 .. count - 1, the place of each position's window in the order of generation."""
        if not 0 < eps < 1:
            raise ValueError(f"eps {eps} is not between 0 and 1")
        self.start, self.width, self.eps = 1 - (window.to(torch.float64) + 1) / count, 1 / count, eps

    @classmethod
    def left_to_right(cls, length: int, eps: float) -> "WindowSchedule":
        return cls(torch.arange(length), length, eps)

    @classmethod
    def permutation(cls, order: Tensor, eps: float) -> "WindowSchedule":
        """order [L] holds positions: order[0] is generated first, order[L - 1] last."""
        if sorted(order.tolist()) != list(range(len(order))):
            raise ValueError(f"order is not a permutation of 0 .. {len(order) - 1}")
        return cls(torch.argsort(order), len(order), eps)

    @classmethod
    def blocks(cls, length: int, block: int, eps: float) -> "WindowSchedule":
        """Blocks of `block` positions from left to right; the last may be shorter."""
        return cls(torch.arange(length) // block, -(-length // block), eps)

    def _inside(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """t as [B, 1], and u [B, L]: how far each window has been passed, in [0, 1]."""
        t = _column(t)
        self.start = self.start.to(t.device)  # once; after that it is there
        return t, ((t - self.start) / self.width).clamp(0, 1)

    def mask_prob(self, t: Tensor) -> Tensor:
        """1 - alpha_i(t), [B, L]."""
        t, u = self._inside(t)
        return self.eps * t + (1 - self.eps) * u**2 * (3 - 2 * u)

    def log_mask_prob(self, t: Tensor) -> Tensor:
        """log(1 - alpha_i(t)), [B, L]."""
        return self.mask_prob(t).log()

    def log_keep_prob(self, t: Tensor) -> Tensor:
        """log(alpha_i(t)), [B, L]; -inf at t = 1. Uses 1 - S(u) = S(1 - u), which loses no digits."""
        t, u = self._inside(t)
        left = 1 - u
        return (self.eps * (1 - t) + (1 - self.eps) * left**2 * (3 - 2 * left)).log()

    def velocity(self, t: Tensor) -> Tensor:
        """A_i(t), [B, L]: the derivative of the mask probability over itself."""
        _, u = self._inside(t)
        slope = self.eps + (1 - self.eps) * 6 * u * (1 - u) / self.width
        return slope / self.mask_prob(t)

    def reveal_prob(self, t: Tensor, s: Tensor) -> Tensor:
        """Probability that a position masked at t is clean at s < t, [B, L]."""
        return 1 - self.mask_prob(s) / self.mask_prob(t)


class PolynomialSchedule:
    """MuLAN's: 1 - alpha_i(t) = sigmoid(gamma_i(t)), gamma a quintic with a squared derivative.

    gamma_i(t) = gamma_min + (gamma_max - gamma_min) f_i(t) / f_i(1), f_i' = (a_i t**2 + b_i t + c_i)**2.
    a, b, c are [B, L] or broadcastable, may carry gradients, and must not all be 0 at a position.
    It stops short of its ends: a share sigmoid(gamma_min) of a position is masked at t = 0 already,
    and sigmoid(-gamma_max) of it is clean at t = 1 still.
    """

    def __init__(self, a: Tensor, b: Tensor, c: Tensor, gamma_min: float, gamma_max: float):
        self.a, self.b, self.c = (x.to(torch.float64) for x in (a, b, c))
        self.gamma_min, self.gamma_max = gamma_min, gamma_max

    def _quintic(self, t: Tensor) -> Tensor:
        a, b, c = self.a, self.b, self.c
        return t * (c**2 + t * (b * c + t * ((b**2 + 2 * a * c) / 3 + t * (a * b / 2 + t * a**2 / 5))))

    def gamma(self, t: Tensor) -> Tensor:
        """[B, L]."""
        whole = self._quintic(torch.ones((), dtype=torch.float64, device=t.device))
        return self.gamma_min + (self.gamma_max - self.gamma_min) * self._quintic(_column(t)) / whole

    def mask_prob(self, t: Tensor) -> Tensor:
        """1 - alpha_i(t), [B, L]."""
        return torch.sigmoid(self.gamma(t))

    def log_mask_prob(self, t: Tensor) -> Tensor:
        """log(1 - alpha_i(t)), [B, L]."""
        return F.logsigmoid(self.gamma(t))

    def log_keep_prob(self, t: Tensor) -> Tensor:
        """log(alpha_i(t)), [B, L]."""
        return F.logsigmoid(-self.gamma(t))

    def velocity(self, t: Tensor) -> Tensor:
        """A_i(t) = gamma_i'(t) sigmoid(-gamma_i(t)), [B, L]."""
        whole = self._quintic(torch.ones((), dtype=torch.float64, device=t.device))
        time = _column(t)
        slope = (self.a * time**2 + self.b * time + self.c) ** 2 / whole
        return (self.gamma_max - self.gamma_min) * slope * torch.sigmoid(-self.gamma(t))

    def reveal_prob(self, t: Tensor, s: Tensor) -> Tensor:
        """Probability that a position masked at t is clean at s < t, [B, L]."""
        return -torch.expm1(self.log_mask_prob(s) - self.log_mask_prob(t))


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


def softmax_weights(logits: Tensor, valid: Tensor | None = None) -> Tensor:
    """softmax(g)_i over the positions; [B, L] -> [B, L], float64. Padding (`valid` False) gets 0."""
    logits = logits.to(torch.float64)
    if valid is not None:
        logits = logits.masked_fill(~valid, torch.finfo(torch.float64).min)
    weights = torch.softmax(logits, dim=1)
    return weights if valid is None else weights * valid
