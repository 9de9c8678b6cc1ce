"""What one draw of a time and of masks says of the bound: draw, corrupt, denoise, integrand."""

from typing import NamedTuple

import torch
from torch import Tensor

from lomdm_dist.model.lomdm import LoMDM
from lomdm_dist.ops.phase import backward_from, phase
from lomdm_dist.process import corrupt, draw_pinned, draw_time, nelbo_integrand, pinned_weight


class Draw(NamedTuple):
    """A time a sequence, n masked samples of it at that time, and what their integrands weigh."""

    t: Tensor  # [B], float64
    z: Tensor  # [n, B, L]
    masked: Tensor  # [n, B, L], bool
    weight: Tensor  # [n, B], float64: 1 / density

    def part(self, samples: slice) -> "Draw":
        return Draw(self.t, self.z[samples], self.masked[samples], self.weight[samples])


class Terms(NamedTuple):
    """The bound's integrand for n masked samples of each sequence, times `weight`."""

    main: Tensor  # [n, B], float64, detached
    velocity: Tensor  # [n, B], float64, detached
    total: Tensor  # the sum of both over all; the gradient reaches network and order through it


@torch.no_grad()
def draw_masks(
    schedule,
    x: Tensor,
    valid: Tensor | None,
    time: Tensor,
    masks: list[Tensor],
    rule: str,
    eps: float,
    mask_id: int,
) -> Draw:
    """Draw t and z of x [B, L], whose forward schedule is given.

    time [B, 2] and masks, of each sample [B, L], are uniforms; rule and eps are those of `draw_time`,
    or "pinned": the position whose masking time t is, is masked for certain, which spares most of the
    variance. The mean of the integrands over time and masks is the bound.
    """
    if rule == "pinned":
        t, position, mass = draw_pinned(schedule, time, x.shape[1], valid)
        masks = [u.scatter(1, position, -1.0) for u in masks]  # below every probability
    else:
        t, weight = draw_time(schedule, time, rule, eps)
    z = torch.stack([corrupt(x, schedule, t, u, mask_id, valid) for u in masks])
    masked = z == mask_id
    if rule == "pinned":
        velocity = schedule.velocity(t).expand(x.shape)
        weights = torch.stack([pinned_weight(masked_k, velocity, mass) for masked_k in masked])
    else:
        weights = weight.expand(len(masks), -1)
    return Draw(t, z, masked, weights)


def estimate(
    model: LoMDM,
    outputs: Tensor | None,
    x: Tensor,
    valid: Tensor | None,
    draw: Draw,
    dropout: Tensor | None = None,
) -> Terms:
    """The integrands of all samples of a draw, in one pass of the network.

    outputs: of `model.order_outputs`, which the gradient reaches through A; dropout [n, B]: keys.
    """
    n, length = len(draw.z), x.shape[1]
    x, valid, t = x.repeat(n, 1), None if valid is None else valid.repeat(n, 1), draw.t.repeat(n)
    if outputs is not None and model.token_exponents is None:
        outputs = outputs.repeat(n, 1, 1)
    z, masked, weight = draw.z.flatten(0, 1), draw.masked.flatten(0, 1), draw.weight.flatten()[:, None]
    with phase("loss"):
        velocity = model.schedule(outputs, x, valid).velocity(t).expand(x.shape)
    keys = None if dropout is None else dropout.flatten()
    of_exponents = (None, None)
    if model.token_exponents is not None:
        of_exponents = outputs, (weight / t[:, None]).expand(-1, length)
    ce, reverse, total, _ = model.denoise(z, x, masked, valid, keys, weight * velocity, *of_exponents)
    with phase("loss"):
        if model.token_exponents is not None:
            # the total is that of A CE + <w, p> / t; in the bound's terms the CE is of p w / <w, p>
            total = total - (weight * torch.where(masked, velocity, 0.0)).sum()
            w = outputs.detach().to(torch.float64)
            ce = ce - w[x].log() + reverse.exponent.log()
            main, divergence = nelbo_integrand(ce, masked, velocity.detach(), reverse.velocity(t))
        else:
            main, divergence = nelbo_integrand(ce, masked, velocity, reverse.velocity(t))
            total = total + (weight[:, 0] * divergence).sum()
        main, divergence = ((weight[:, 0] * part).detach().view(n, -1) for part in (main, divergence))
        backward_from(total)
    return Terms(main, divergence, total)
