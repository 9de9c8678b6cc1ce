"""One training step of a learnable-order masked diffusion model: the paper's Algorithm 1."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lomdm_dist.config import Config
from lomdm_dist.model import LoMDM
from lomdm_dist.process import (
    PowerSchedule,
    corrupt,
    keyed_uniforms,
    log_q,
    nelbo_integrand,
    rloo_surrogate,
    sample_time,
    stratify,
)
from lomdm_dist.process.noise import Purpose


@dataclass(frozen=True)
class Noise:
    """The randomness of a micro-batch: time [B, 2] and masks, one [B, L] a sample; uniforms."""

    time: Tensor
    masks: list[Tensor]


def draw_noise(config: Config, step: int, indices: Tensor, device) -> Noise:
    """Noise of the sequences at `indices` [B] of the global batch of `step`.

    It depends on (seed, step, index) only. Times are stratified over the global batch.
    """
    length = config.model.length
    uniforms = keyed_uniforms(
        config.train.seed, Purpose.TRAIN, step, indices, 2 + config.objective.samples * length
    )
    uniforms[:, 0] = stratify(uniforms[:, 0], indices, config.train.global_batch)
    time, *masks = uniforms.to(device).split([2] + [length] * config.objective.samples, dim=1)
    return Noise(time, masks)


def two_sample_loss(
    model: LoMDM, x: Tensor, valid: Tensor | None, noise: Noise, config: Config
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a micro-batch, and what to log of it.

    x [B, L] clean ids; valid [B, L] bool or None.
    Returns the loss, a scalar: mean over sequences of the bound, divided by the length; and sums
    over the micro-batch. The gradient reaches theta through CE, psi through hatA, phi through A
    and through log q. MDLM is the same with one sample, fixed exponents, hence no RLOO term.
    """
    objective, samples = config.objective, config.objective.samples
    exponent = model.order(x, valid)
    t, weight = sample_time(exponent, noise.time, objective.time, objective.time_eps)
    schedule = PowerSchedule(exponent)

    z = [corrupt(x, schedule, t, u, config.model.mask_id, valid) for u in noise.masks]
    masked = [z_k == config.model.mask_id for z_k in z]
    ce, hat_exponent = model.denoise(
        torch.cat(z), x.repeat(samples, 1), torch.cat(masked), _repeat(valid, samples)
    )

    mains, velocities = [], []
    for masked_k, ce_k, hat_k in zip(masked, ce.chunk(samples), hat_exponent.chunk(samples), strict=True):
        main, velocity = nelbo_integrand(
            ce_k, masked_k, schedule.velocity(t), PowerSchedule(hat_k).velocity(t)
        )
        mains.append(weight * main)
        velocities.append(weight * velocity)
    losses = [main + velocity for main, velocity in zip(mains, velocities, strict=True)]
    bound = sum(losses) / samples

    rloo = torch.zeros_like(bound)
    log_ratio = torch.zeros_like(bound)
    if samples == 2:
        log_q1, log_q2 = (log_q(masked_k, schedule, t) for masked_k in masked)
        log_ratio = log_q1 - log_q2
        rloo = rloo_surrogate(log_q1, log_q2, *losses)

    loss = (bound + rloo).mean() / config.model.length
    with torch.no_grad():
        return loss, {
            "bound": bound.sum(),
            "main": sum(mains).sum() / samples,
            "velocity": sum(velocities).sum() / samples,
            "rloo": rloo.sum(),
            "advantage": (losses[0] - losses[-1]).square().sum(),
            "log_q_ratio": log_ratio.square().sum(),
            "exponent": _spread(exponent, valid),
            "tokens": torch.tensor(x.numel()) if valid is None else valid.sum(),
            "sequences": torch.tensor(len(x)),
        }


def _repeat(valid: Tensor | None, samples: int) -> Tensor | None:
    return None if valid is None else valid.repeat(samples, 1)


def _spread(exponent: Tensor, valid: Tensor | None) -> Tensor:
    """Variance of the exponents inside each sequence, summed over sequences."""
    valid = torch.ones_like(exponent) if valid is None else valid.to(exponent.dtype)
    count = valid.sum(dim=1).clamp(min=1)
    mean = (exponent * valid).sum(dim=1, keepdim=True) / count[:, None]
    return (((exponent - mean) * valid).square().sum(dim=1) / count).sum()
