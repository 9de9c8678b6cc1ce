"""Which times are drawn, and the weight that makes the estimate of the integral right."""

import math

import torch
from torch import Tensor

from lomdm_dist.process.schedules import PowerSchedule

SMALLEST_TIME = 1e-300  # u**(1/e) may fall below float64's range; the mass below is under 1e-15
BISECTIONS = 50  # of [0, 1]: a time to 1e-15


def stratify(uniforms: Tensor, indices: Tensor, batch: int) -> Tensor:
    """Low-discrepancy uniforms: one in each of `batch` equal strata of [0, 1).

    uniforms [n] in [0, 1) and indices [n], the index of each sequence in the global batch of
    `batch`. Neighbouring indices get distant strata (a golden-ratio lattice), so every rank and
    every micro-batch sees early and late times alike. Returns [n], float64.
    """
    generator = max(1, round(batch * (math.sqrt(5) - 1) / 2))
    while math.gcd(generator, batch) != 1:
        generator += 1
    stratum = indices.to(uniforms.device) * generator % batch
    return (stratum + uniforms) / batch


@torch.no_grad()
def draw_time(schedule, uniforms: Tensor, rule: str, eps: float) -> tuple[Tensor, Tensor]:
    """Draw t and weight = 1 / density(t), each [B], float64.

    schedule  any of this package, with probabilities [B, L] or broadcastable
    uniforms  [B, 2]: the first for the time, the second for the position (power schedules only)
    rule      "uniform": t uniform on [eps, 1], which cuts the bound at eps.
              "mixture": t has the density of the mean mask probability, (1/L) sum_i d(1 - alpha_i)/dt.
              No cut, and no weight explodes: weight * A_i = L A_i / sum_j A_j (1 - alpha_j).
              "remainder": the mixture restricted to (0, eps], what "uniform" leaves out.
    """
    uniforms = uniforms.to(torch.float64)
    if rule == "uniform":
        t = eps + (1 - eps) * uniforms[:, 0]
        return t, torch.full_like(t, 1 - eps)
    if rule not in ("mixture", "remainder"):
        raise ValueError(f"time rule {rule!r} is none of 'uniform', 'mixture', 'remainder'")
    limit = 1.0 if rule == "mixture" else eps
    if isinstance(schedule, PowerSchedule):
        return _power_mixture(schedule.exponent, uniforms, limit)
    return _inverse_mixture(schedule, uniforms[:, 0], limit)


def sample_time(exponent: Tensor, uniforms: Tensor, rule: str, eps: float) -> tuple[Tensor, Tensor]:
    """`draw_time` of a power schedule: the mixture's density is (1/L) sum_i e_i t**(e_i - 1).

    exponent [B, L] or broadcastable: [B, 1] or a scalar where all positions share it.
    """
    return draw_time(PowerSchedule(exponent), uniforms, rule, eps)


def _power_mixture(exponent: Tensor, uniforms: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Pick a position by its share of the mass below `limit`, take limit * u**(1/e)."""
    exponent = torch.atleast_2d(exponent).expand(len(uniforms), -1)
    masses = (exponent * math.log(limit)).exp().cumsum(dim=1)
    total = masses[:, -1]
    position = torch.searchsorted(masses, uniforms[:, 1:] * total[:, None], right=True)
    chosen = exponent.gather(1, position.clamp(max=exponent.shape[1] - 1))[:, 0]
    t = (math.log(limit) + uniforms[:, 0].log() / chosen).exp().clamp(min=SMALLEST_TIME, max=limit)
    return t, total / (exponent * t[:, None] ** (exponent - 1)).sum(dim=1)


def _inverse_mixture(schedule, uniforms: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Invert the mean mask probability on (0, limit]: so a window gets the draws of its own positions."""

    def mean_mask_prob(t: Tensor) -> Tensor:
        return schedule.mask_prob(t).mean(dim=1).expand(len(uniforms))

    low, high = torch.zeros_like(uniforms), torch.full_like(uniforms, limit)
    start = mean_mask_prob(low)
    mass = mean_mask_prob(high) - start
    wanted = start + uniforms * mass
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        above = mean_mask_prob(middle) > wanted
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    t = high.clamp(min=SMALLEST_TIME)
    return t, mass / (schedule.velocity(t) * schedule.mask_prob(t)).mean(dim=1)
