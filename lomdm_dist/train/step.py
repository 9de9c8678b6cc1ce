"""One training step of a learnable-order masked diffusion model: the paper's Algorithm 1."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lomdm_dist.config import Config
from lomdm_dist.model import LoMDM
from lomdm_dist.model.bound import draw_terms
from lomdm_dist.process import PowerSchedule, keyed_uniforms, log_q, rloo_surrogate, stratify
from lomdm_dist.process.noise import Purpose, keyed_integers


@dataclass(frozen=True)
class Noise:
    """The randomness of a micro-batch: time [B, 2] and masks, one [B, L] a sample; uniforms.

    dropout [passes, B]: the keys of each sequence in each pass of the network, int64: first that of the
    order (or of `ar`), then one a sample. None: dropout draws torch's own numbers, or there is none.
    """

    time: Tensor
    masks: list[Tensor]
    dropout: Tensor | None = None


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
    dropout = None
    if config.model.dropout and config.model.dropout_rng == "keyed":
        passes = 1 + config.objective.samples
        keys = keyed_integers(config.train.seed, Purpose.DROPOUT, step, indices, passes)
        dropout = keys.T.contiguous().to(device)
    return Noise(time, masks, dropout)


def training_loss(model: LoMDM, x: Tensor, valid: Tensor | None, noise: Noise, config: Config) -> tuple:
    """The loss of a micro-batch under the config's objective, and what to log of it."""
    if config.objective.name == "ar":
        return autoregressive_loss(model, x, valid, noise)
    return two_sample_loss(model, x, valid, noise, config)


def two_sample_loss(
    model: LoMDM, x: Tensor, valid: Tensor | None, noise: Noise, config: Config
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a micro-batch, and what to log of it.

    x [B, L] clean ids; valid [B, L] bool or None.
    Returns the loss, a scalar: mean over sequences of the bound, divided by the length; and sums
    over the micro-batch. The gradient reaches theta through CE, psi through hatA, phi through A
    and through log q. A fixed order is the same with one sample, hence no RLOO term.
    """
    objective = config.objective
    of_order, of_samples = (None, None) if noise.dropout is None else (noise.dropout[0], noise.dropout[1:])
    schedule = model.order(x, valid, of_order)
    t, masked, main, velocity = draw_terms(
        model, schedule, x, valid, noise.time, noise.masks, objective.time, objective.time_eps, of_samples
    )
    losses = main + velocity
    bound = losses.mean(dim=0)

    rloo = log_ratio = torch.zeros_like(bound)
    if objective.samples == 2:
        log_q1, log_q2 = (log_q(masked_k, schedule, t, valid) for masked_k in masked)
        log_ratio = log_q1 - log_q2
        rloo = rloo_surrogate(log_q1, log_q2, *losses)

    loss = (bound + rloo).mean() / x.shape[1]
    with torch.no_grad():
        return loss, {
            "bound": bound.sum(),
            "main": main.mean(dim=0).sum(),
            "velocity": velocity.mean(dim=0).sum(),
            "rloo": rloo.sum(),
            "advantage": (losses[0] - losses[-1]).square().sum(),
            "log_q_ratio": log_ratio.square().sum(),
            "exponent": _spread(schedule, valid),
            **_counts(x, valid),
        }


def autoregressive_loss(
    model: LoMDM, x: Tensor, valid: Tensor | None, noise: Noise
) -> tuple[Tensor, dict[str, Tensor]]:
    """`ar`: the exact -log p(x), scaled and logged as the bounds are; it is all main term."""
    keys = None if noise.dropout is None else noise.dropout[0]
    nll = model.causal_ce(x, valid, keys).double().sum(dim=1)
    none = torch.zeros((), dtype=torch.float64, device=x.device)
    stats = dict.fromkeys(("velocity", "rloo", "advantage", "log_q_ratio", "exponent"), none)
    total = nll.detach().sum()
    return nll.mean() / x.shape[1], {"bound": total, "main": total, **stats, **_counts(x, valid)}


def _counts(x: Tensor, valid: Tensor | None) -> dict[str, Tensor]:
    return {
        "tokens": torch.tensor(x.numel()) if valid is None else valid.sum(),
        "sequences": torch.tensor(len(x)),
    }


def _spread(schedule, valid: Tensor | None) -> Tensor:
    """Variance of the exponents inside each sequence, summed over sequences; nan where there are none."""
    if not isinstance(schedule, PowerSchedule):
        return torch.tensor(torch.nan)
    exponent = schedule.exponent
    valid = torch.ones_like(exponent) if valid is None else valid.to(exponent.dtype)
    count = valid.sum(dim=1).clamp(min=1)
    mean = (exponent * valid).sum(dim=1, keepdim=True) / count[:, None]
    return (((exponent - mean) * valid).square().sum(dim=1) / count).sum()
