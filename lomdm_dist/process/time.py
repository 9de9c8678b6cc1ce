"""Which times are drawn, and the weight that makes the estimate of the integral right."""

import math

import torch
from torch import Tensor

SMALLEST_TIME = 1e-300  # u**(1/e) may fall below float64's range; the mass below is under 1e-15


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


def sample_time(exponent: Tensor, uniforms: Tensor, rule: str, eps: float) -> tuple[Tensor, Tensor]:
    """Draw t and weight = 1 / density(t), each [B], float64, without gradient.

    exponent  [B, L] of the forward schedule, or broadcastable ([B, 1] where all positions share it)
    uniforms  [B, 2]: the first for the time, the second for the position ("mixture" only)
    rule      "uniform": t uniform on [eps, 1], which cuts the bound at eps.
              "mixture": density (1/L) sum_i e_i t**(e_i - 1), i.e. pick a position and take
              u**(1/e_i). No cut, and no weight explodes: weight * A_i = L e_i / sum_j e_j t**e_j.
    """
    uniforms = uniforms.to(torch.float64)
    exponent = torch.atleast_2d(exponent.detach().to(torch.float64)).expand(len(uniforms), -1)
    u = uniforms[:, 0]
    if rule == "uniform":
        return eps + (1 - eps) * u, torch.full_like(u, 1 - eps)
    if rule != "mixture":
        raise ValueError(f"time rule {rule!r} is neither 'uniform' nor 'mixture'")
    position = (uniforms[:, 1] * exponent.shape[1]).long().clamp(max=exponent.shape[1] - 1)
    chosen = exponent.gather(1, position[:, None])[:, 0]
    t = (u.log() / chosen).exp().clamp(min=SMALLEST_TIME, max=1.0)
    density = (exponent * t[:, None] ** (exponent - 1)).mean(dim=1)
    return t, 1 / density
