"""What one draw of a time and of masks says of the bound: corrupt, denoise, integrand."""

import torch
from torch import Tensor

from lomdm_dist.model.lomdm import LoMDM
from lomdm_dist.process import corrupt, nelbo_integrand


def integrands(
    model: LoMDM, schedule, x: Tensor, valid: Tensor | None, t: Tensor, uniforms: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """The bound's integrand at t for n masked samples of each sequence, in one pass of the network.

    schedule is the forward one of x [B, L]; t [B]; uniforms: of each sample, [B, L].
    Returns masked [n, B, L], and the main and the velocity term, each [n, B], float64.
    """
    n = len(uniforms)
    z = torch.cat([corrupt(x, schedule, t, u, model.mask_id, valid) for u in uniforms])
    masked = z == model.mask_id
    ce, reverse = model.denoise(z, x.repeat(n, 1), masked, None if valid is None else valid.repeat(n, 1))
    velocity = schedule.velocity(t).expand(x.shape).repeat(n, 1)
    main, velocity_term = nelbo_integrand(ce, masked, velocity, reverse.velocity(t.repeat(n)))
    return masked.view(n, *x.shape), main.view(n, -1), velocity_term.view(n, -1)
