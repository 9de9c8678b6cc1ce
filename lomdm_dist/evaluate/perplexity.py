"""The bound on -log p(x), estimated on token shards.

The estimate depends on (seed, sequence, draw) alone: not on the batch size, not on the number of
ranks; no sequence is counted twice or left out.
"""

import math

import numpy as np
import torch
from tqdm import tqdm

from lomdm_dist.config import Config
from lomdm_dist.data.shards import ShardSet
from lomdm_dist.process import (
    PowerSchedule,
    corrupt,
    keyed_uniforms,
    nelbo_integrand,
    sample_time,
    stratify,
)
from lomdm_dist.process.noise import Purpose

CUT = 1e-3  # where the published trainers cut the time integral


def sequence_bounds(model, x, valid, noise: list[torch.Tensor], mask_id: int) -> tuple:
    """The uncut bound of each sequence and its part at t >= CUT, in nats, mean of the draws: two [B].

    x [B, L]; valid [B, L] bool or None; noise: uniforms [B, 2 + L] of each draw, time then masks.
    """
    exponent = model.order(x, valid)
    schedule = PowerSchedule(exponent)
    bound, cut = torch.zeros(2, len(x), dtype=torch.float64, device=x.device)
    for uniforms in noise:
        time, masks = uniforms.split([2, x.shape[1]], dim=1)
        t, weight = sample_time(exponent, time, "mixture", 0.0)
        z = corrupt(x, schedule, t, masks, mask_id, valid)
        masked = z == mask_id
        ce, hat_exponent = model.denoise(z, x, masked, valid)
        main, velocity = nelbo_integrand(
            ce, masked, schedule.velocity(t), PowerSchedule(hat_exponent).velocity(t)
        )
        drawn = weight * (main + velocity) / len(noise)
        bound, cut = bound + drawn, cut + drawn * (t >= CUT)
    return bound, cut


@torch.no_grad()
def estimate_bound(
    model,
    shards: ShardSet,
    config: Config,
    indices: np.ndarray,
    draws: int = 1,
    seed: int = 0,
    batch: int = 32,
    grid=None,
    progress: bool = False,
) -> dict:
    """The bound a predicted token over the sequences at `indices`, in nats, with its standard error.

    `model` is a LoMDM or an engine around it, in evaluation mode. With a `grid` the sequences are
    shared out over its ranks, and every rank gets the result. The standard error is over sequences
    and contains the noise of the draws; it is nan for a single sequence.
    """
    rank, size, device = (grid.data_rank, grid.data_size, grid.device) if grid else (0, 1, _device(model))
    mine = np.arange(len(indices))[rank::size]
    # every rank runs the same number of batches, an empty one among them where it has no more:
    # a sharded model needs all ranks in each forward pass
    rounds = math.ceil(math.ceil(len(indices) / size) / batch)
    sums = torch.zeros(len(_SUMS), dtype=torch.float64)
    for k in tqdm(range(rounds), desc="evaluate", disable=None if progress else True):
        numbers = mine[k * batch : (k + 1) * batch]
        spare = not len(numbers)
        if spare:
            numbers = np.zeros(1, dtype=np.int64)
        x, valid = shards.batch(indices[numbers], device)
        noise = []
        for draw in range(draws):
            uniforms = keyed_uniforms(seed, Purpose.EVALUATE, draw, numbers, 2 + shards.length)
            strata = torch.from_numpy(numbers) * draws + draw
            uniforms[:, 0] = stratify(uniforms[:, 0], strata, len(indices) * draws)
            noise.append(uniforms.to(device))
        bound, cut = model(sequence_bounds, x, valid, noise, config.model.mask_id)
        if not spare:
            tokens = torch.full_like(bound, shards.length) if valid is None else valid.sum(1).double()
            sums += _moments(tokens.cpu(), bound.cpu(), cut.cpu())
    if grid:
        sums = grid.sum(sums)
    return _result(dict(zip(_SUMS, sums.tolist(), strict=True)))


_SUMS = ("sequences", "tokens", "tokens2", "bound", "bound2", "bound_tokens", "cut")


def _moments(tokens, bound, cut) -> torch.Tensor:
    terms = [torch.ones_like(bound), tokens, tokens**2, bound, bound**2, bound * tokens, cut]
    return torch.stack([term.sum() for term in terms])


def _result(s: dict[str, float]) -> dict:
    nll, n = s["bound"] / s["tokens"], s["sequences"]
    residual = s["bound2"] - 2 * nll * s["bound_tokens"] + nll**2 * s["tokens2"]
    error = math.sqrt(max(residual, 0.0) * n / (n - 1)) / s["tokens"] if n > 1 else math.nan
    cut = s["cut"] / s["tokens"]
    return {
        "nll_per_token": nll,
        "standard_error": error,
        "ppl": _exp(nll),
        "nll_per_token_cut": cut,
        "ppl_cut": _exp(cut),
        "tokens": round(s["tokens"]),
        "sequences": round(n),
    }


def _exp(nll: float) -> float:
    return math.exp(nll) if nll < 700 else math.inf


def convention(shards: ShardSet, draws: int, seed: int, weights: str) -> dict:
    """Everything that a number needs beside it to be compared with another."""
    manifest = shards.manifest
    return {
        "preset": "bound",
        "bound": f"uncut; nll_per_token_cut leaves out times below {CUT}",
        "denominator": "predicted tokens (all but padding)",
        "pieces": f"{manifest.packing}, {shards.length} tokens, EOS after each document, no BOS",
        "split": manifest.split,
        "draws": draws,
        "seed": seed,
        "weights": weights,
        "dtype": "float32",
    }


def _device(model):
    return next(model.parameters()).device
