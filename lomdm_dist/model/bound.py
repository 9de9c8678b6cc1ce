"""What one draw of a time and of masks says of the bound: draw, corrupt, denoise, integrand."""

from typing import NamedTuple

import torch
from torch import Tensor

from lomdm_dist.model.lomdm import LoMDM
from lomdm_dist.process import corrupt, draw_pinned, draw_time, nelbo_integrand, pinned_weight


class Terms(NamedTuple):
    """The bound's integrand at t for n masked samples of each sequence, times `weight`: 1 / density."""

    t: Tensor  # [B]
    masked: Tensor  # [n, B, L]
    main: Tensor  # [n, B], float64, as the rest
    velocity: Tensor  # [n, B]


def draw_terms(
    model: LoMDM,
    schedule,
    x: Tensor,
    valid: Tensor | None,
    time: Tensor,
    masks: list[Tensor],
    rule: str,
    eps: float,
    dropout: Tensor | None = None,
) -> Terms:
    """Estimate the bound of x [B, L], whose forward schedule is given, n times, in one pass of the network.

    time [B, 2] and masks, of each sample [B, L], are uniforms; rule and eps are those of `draw_time`,
    or "pinned": the position whose masking time t is, is masked for certain, which spares most of the
    variance. The mean of main + velocity over time and masks is the bound. dropout [n, B]: keys of dropout.
    """
    if rule == "pinned":
        t, position, mass = draw_pinned(schedule, time, x.shape[1], valid)
        masks = [u.scatter(1, position, -1.0) for u in masks]  # below every probability
    else:
        t, weight = draw_time(schedule, time, rule, eps)
    n = len(masks)
    z = torch.cat([corrupt(x, schedule, t, u, model.mask_id, valid) for u in masks])
    masked = z == model.mask_id
    valid = None if valid is None else valid.repeat(n, 1)
    keys = None if dropout is None else dropout.flatten()
    ce, reverse = model.denoise(z, x.repeat(n, 1), masked, valid, keys)
    velocity = schedule.velocity(t).expand(x.shape).repeat(n, 1)
    main, velocity_term = nelbo_integrand(ce, masked, velocity, reverse.velocity(t.repeat(n)))
    weight = pinned_weight(masked, velocity, mass.repeat(n)) if rule == "pinned" else weight.repeat(n)
    main, velocity_term = (weight * main).view(n, -1), (weight * velocity_term).view(n, -1)
    return Terms(t, masked.view(n, *x.shape), main, velocity_term)
