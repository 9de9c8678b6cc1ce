"""Which times are drawn, and the weight that makes the estimate of the integral right."""

import math

import torch
from torch import Tensor

from lomdm_dist.process.schedules import PowerSchedule

SMALLEST_TIME = 1e-300  # u**(1/e) may fall below float64's range: 0.1% of the mass at e = 0.01, none at 0.05
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
    t, _, mass = _mixture(schedule, uniforms, 1.0 if rule == "mixture" else eps, None)
    slope = _slope(schedule, t).sum(dim=1)
    return t, torch.where(slope > 0, mass / slope, 0.0)  # of large exponents nothing lies below eps


def sample_time(exponent: Tensor, uniforms: Tensor, rule: str, eps: float) -> tuple[Tensor, Tensor]:
    """`draw_time` of a power schedule: the mixture's density is (1/L) sum_i e_i t**(e_i - 1).

    exponent [B, L] or broadcastable: [B, 1] or a scalar where all positions share it.
    """
    return draw_time(PowerSchedule(exponent), uniforms, rule, eps)


@torch.no_grad()
def draw_pinned(
    schedule, uniforms: Tensor, length: int, valid: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Pick a position and draw the time at which it is masked; it is pinned: masked for certain.

    uniforms [B, 2]; valid [B, L] leaves padding out. Returns t [B] as the mixture draws it, the
    position [B, 1], and the mass [B] that `pinned_weight` needs.
    """
    if valid is None:
        valid = torch.ones(len(uniforms), length, dtype=torch.bool, device=uniforms.device)
    return _mixture(schedule, uniforms.to(torch.float64), 1.0, valid)


def pinned_weight(masked: Tensor, velocity: Tensor, mass: Tensor) -> Tensor:
    """1 / density of (t, masks) over q(masks): mass / sum over masked of A_i; [B, L] -> [B], float64.

    With one position pinned and the others masked as ever, the pair (t, z) has the density
    q(z|t) sum over masked of A_i / mass. So the estimate is a mean of the masked positions' terms
    with weights A_i: where their CE is constant it has no variance at all. For equal exponents
    this is LLaDA's estimator, which masks a number of tokens drawn uniformly from 1 .. L.
    """
    rate = torch.where(masked, velocity, 0.0).sum(dim=1)
    return mass / rate.clamp(min=torch.finfo(torch.float64).tiny)  # 0 of a sequence without a position


def _slope(schedule, t: Tensor) -> Tensor:
    """d(1 - alpha_i)/dt, [B, L] or broadcastable."""
    return schedule.velocity(t) * schedule.mask_prob(t)


def _mixture(schedule, uniforms: Tensor, limit: float, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """t on (0, limit] with the density of the (valid) positions' mask probabilities; the position whose
    time it is, [B, 1]; and the total mass, [B]: the sum over positions of what is masked until `limit`.

    A power schedule picks the position and inverts its own probability, t = limit u**(1/e). Others
    invert the sum over positions, so that a window gets the draws of its own positions, and pick after.
    """
    start, end = torch.zeros_like(uniforms[:, 0]), torch.full_like(uniforms[:, 0], limit)
    if isinstance(schedule, PowerSchedule):
        masses = _leave_out(schedule.mask_prob(end), valid)
        position, mass = _pick(masses, uniforms[:, 1])
        exponent = torch.atleast_2d(schedule.exponent).expand(masses.shape).gather(1, position)[:, 0]
        t = (math.log(limit) + uniforms[:, 0].log() / exponent).exp()
        return t.clamp(min=SMALLEST_TIME, max=limit), position, mass

    def masked_until(t: Tensor) -> Tensor:
        return _leave_out(schedule.mask_prob(t), valid).sum(dim=1).expand(len(uniforms))

    before, mass = masked_until(start), masked_until(end) - masked_until(start)
    wanted = before + uniforms[:, 0] * mass
    for _ in range(BISECTIONS):
        middle = (start + end) / 2
        above = masked_until(middle) > wanted
        start, end = torch.where(above, start, middle), torch.where(above, middle, end)
    t = end.clamp(min=SMALLEST_TIME)
    position, _ = _pick(_leave_out(_slope(schedule, t), valid), uniforms[:, 1])
    return t, position, mass


def _leave_out(values: Tensor, valid: Tensor | None) -> Tensor:
    return values if valid is None else values * valid


def _pick(shares: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """A position with probability proportional to shares [B, L], which is [B, 1]; and their sum [B]."""
    sums = torch.atleast_2d(shares).expand(len(uniforms), -1).cumsum(dim=1)
    total = sums[:, -1]
    position = torch.searchsorted(sums, (uniforms * total)[:, None], right=True)
    return position.clamp(max=sums.shape[1] - 1), total
