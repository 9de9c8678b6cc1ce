"""One training step of a learnable-order masked diffusion model: the paper's Algorithm 1."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lomdm_dist.config import Config
from lomdm_dist.model import LoMDM
from lomdm_dist.model.bound import draw_masks, estimate
from lomdm_dist.ops.phase import phase
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


@phase("data")
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


def backpropagate(
    engine, x: Tensor, valid: Tensor | None, noise: Noise, config: Config, share: float = 1.0
) -> dict[str, Tensor]:
    """Add a micro-batch's gradient, times `share` of it in the step; returns what to log: sums over it.

    x [B, L] clean ids; valid [B, L] bool or None. engine(function, ...) runs a function of the model,
    engine.backward(loss) adds the gradients of one. The loss is the mean over sequences of the bound,
    divided by the length.
    """
    if config.objective.name == "ar":
        return _autoregressive(engine, x, valid, noise, share)
    return _two_samples(engine, x, valid, noise, config, share)


@phase("loss")
def _two_samples(engine, x: Tensor, valid: Tensor | None, noise: Noise, config: Config, share: float):
    """The paper's Algorithm 1. A fixed order is the same with one sample and without phi's part.

    The samples meet in scalars and in what phi says of x. So that is cut off as a leaf, and the samples
    go through the network one after the other (`split`) or side by side (`joint`), with the same
    gradients; the leaf's goes through phi's head once.
    """
    objective, samples = config.objective, config.objective.samples
    of_order, of_samples = (None, None) if noise.dropout is None else (noise.dropout[0], noise.dropout[1:])
    scale = share / x.numel()

    # 1. features of x without gradient, and phi's head on them
    outputs = order = None
    if samples == 2:  # the order is learned
        with phase("features"):
            outputs = engine(LoMDM.order_outputs, x, valid, of_order)
        order = outputs.detach().requires_grad_()

    # 2. a time, and samples z1, z2 of q(z|x) at it
    schedule = engine.module.schedule(order, x, valid)
    time_rule = objective.time, objective.time_eps
    draw = draw_masks(schedule, x, valid, noise.time, noise.masks, *time_rule, engine.module.mask_id)

    # 3. of each the bound, and its gradient to theta, psi and the order
    losses = []
    passes = _passes(samples, config.train.two_samples)
    for name, part in passes.items():
        keys = None if of_samples is None else of_samples[part]
        with phase(name):
            terms = engine(estimate, order, x, valid, draw.part(part), keys)
            engine.backward(terms.total * (scale / samples), more=part.stop < samples)
        losses.append(torch.stack([terms.main, terms.velocity]))
    main, velocity = torch.cat(losses, dim=1)  # each [samples, B]
    bounds = main + velocity

    # 4. the gradient through q (REINFORCE, each sample the other's baseline), then all of phi's at once
    rloo = log_ratio = torch.zeros_like(bounds[0])
    if samples == 2:
        log_q1, log_q2 = (log_q(masked, schedule, draw.t, valid) for masked in draw.masked)
        log_ratio = log_q1 - log_q2
        rloo = rloo_surrogate(log_q1, log_q2, *bounds)
        (rloo.sum() * scale).backward()
        with phase("heads"):
            engine.backward((outputs * order.grad).sum())

    with torch.no_grad():
        return {
            "bound": bounds.mean(dim=0).sum(),
            "main": main.mean(dim=0).sum(),
            "velocity": velocity.mean(dim=0).sum(),
            "rloo": rloo.sum(),
            "advantage": (bounds[0] - bounds[-1]).square().sum(),
            "log_q_ratio": log_ratio.square().sum(),
            "exponent": _spread(schedule, valid),
            **_counts(x, valid),
        }


def _passes(samples: int, two_samples: str) -> dict[str, slice]:
    """Which samples go through the network together, and what the pass is called."""
    if two_samples == "joint" and samples == 2:
        return {"z": slice(0, 2)}
    return {f"z{k + 1}": slice(k, k + 1) for k in range(samples)}


def _autoregressive(engine, x: Tensor, valid: Tensor | None, noise: Noise, share: float):
    """`ar`: the exact -log p(x), scaled and logged as the bounds are; it is all main term."""
    keys = None if noise.dropout is None else noise.dropout[0]
    with phase("z1"):
        ce, loss = engine(LoMDM.causal_ce, x, valid, keys, share / x.numel())
        engine.backward(loss)
    none = torch.zeros((), dtype=torch.float64, device=x.device)
    stats = dict.fromkeys(("velocity", "rloo", "advantage", "log_q_ratio", "exponent"), none)
    total = ce.double().sum()
    return {"bound": total, "main": total, **stats, **_counts(x, valid)}


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
