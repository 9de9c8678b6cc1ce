"""The bound on -log p(x), estimated on token shards; for `ar` the exact value.

The estimate depends on (seed, sequence, draw) alone: not on the batch size, not on the number of
ranks; no sequence is counted twice or left out.
"""

import math

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from lomdm_dist.config import Config
from lomdm_dist.data.shards import ShardSet
from lomdm_dist.model.bound import draw_terms
from lomdm_dist.process import PolynomialSchedule, corrupt, keyed_uniforms, stratify
from lomdm_dist.process.noise import Purpose


def sequence_bounds(
    model, x: Tensor, valid: Tensor | None, noise: list[Tensor], config: Config
) -> tuple[Tensor, Tensor]:
    """The bound of each sequence in nats, mean of the draws: its part at times from `time_eps` on, the rest.

    x [B, L]; valid [B, L] bool or None; noise: uniforms [B, 2 + L] of each draw, time then masks.
    Returns two [B], float64. Where the times are uniform on [time_eps, 1] the rest is estimated by
    a draw of its own, below time_eps.
    """
    if config.objective.name == "ar":
        nll = model.causal_ce(x, valid).double().sum(dim=1)
        return nll, torch.zeros_like(nll)
    rule, eps = config.evaluate.time, config.evaluate.time_eps
    schedule = model.order(x, valid)
    above, rest = torch.zeros(2, len(x), dtype=torch.float64, device=x.device)
    for uniforms in noise:
        time, masks = uniforms.split([2, x.shape[1]], dim=1)
        for rule_k in (rule, "remainder") if rule == "uniform" else (rule,):
            terms = draw_terms(model, schedule, x, valid, time, [masks], rule_k, eps)
            value = (terms.main + terms.velocity)[0]
            late = (terms.t >= eps) & (rule_k != "remainder")
            above, rest = above + value * late, rest + value * ~late
        if isinstance(schedule, PolynomialSchedule):
            rest = rest + end_terms(model, schedule, x, valid, masks)
    return above / len(noise), rest / len(noise)


def end_terms(
    model, schedule: PolynomialSchedule, x: Tensor, valid: Tensor | None, uniforms: Tensor
) -> Tensor:
    """The bound of the two jumps of a schedule that stops short of its ends, [B], float64.

    At t = 1, from all masks: a position is clean with probability alpha(1), in the forward and the
    reverse schedule alike, so its CE is all there is to pay. At t = 0 what is still masked is drawn.
    """
    everything = torch.ones_like(x, dtype=torch.bool) if valid is None else valid
    ends = torch.zeros(2, len(x), dtype=torch.float64, device=x.device)
    ends[1] = 1
    first, _ = model.denoise(torch.where(everything, model.mask_id, x), x, everything, valid)
    z = corrupt(x, schedule, ends[0], uniforms, model.mask_id, valid)
    last, _ = model.denoise(z, x, z == model.mask_id, valid)
    return (schedule.log_keep_prob(ends[1]).exp() * first).sum(dim=1) + last.double().sum(dim=1)


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
    shared out over its ranks, and every rank gets the result. `nll_per_token` is uncut unless
    `evaluate.time` is uniform; the cut value, the uncut one and the remainder between them stand
    beside it. The standard error is over sequences and contains the noise of the draws; it is nan
    for a single sequence.
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
        above, rest = model(sequence_bounds, x, valid, noise, config)
        if not spare:
            tokens = torch.full_like(above, shards.length) if valid is None else valid.sum(1).double()
            bound = above if _is_cut(config) else above + rest
            sums += _moments(tokens.cpu(), bound.cpu(), above.cpu(), rest.cpu())
    if grid:
        sums = grid.sum(sums)
    return _result(dict(zip(_SUMS, sums.tolist(), strict=True)), exact=config.objective.name == "ar")


def _is_cut(config: Config) -> bool:
    return config.objective.name != "ar" and config.evaluate.time == "uniform"


_SUMS = ("sequences", "tokens", "tokens2", "bound", "bound2", "bound_tokens", "above", "rest")


def _moments(tokens, bound, above, rest) -> Tensor:
    terms = [torch.ones_like(bound), tokens, tokens**2, bound, bound**2, bound * tokens, above, rest]
    return torch.stack([term.sum() for term in terms])


def _result(s: dict[str, float], exact: bool) -> dict:
    nll, n = s["bound"] / s["tokens"], s["sequences"]
    residual = s["bound2"] - 2 * nll * s["bound_tokens"] + nll**2 * s["tokens2"]
    error = math.sqrt(max(residual, 0.0) * n / (n - 1)) / s["tokens"] if n > 1 else math.nan
    error = math.hypot(error, nll * 2**-23)  # no number is better than the float32 its CE is made of
    result = {"nll_per_token": nll, "standard_error": error, "ppl": _exp(nll)}
    if not exact:
        cut, remainder = s["above"] / s["tokens"], s["rest"] / s["tokens"]
        result |= {
            "nll_per_token_uncut": cut + remainder,
            "nll_per_token_cut": cut,
            "remainder": remainder,
            "ppl_uncut": _exp(cut + remainder),
            "ppl_cut": _exp(cut),
        }
    return result | {"tokens": round(s["tokens"]), "sequences": round(n)}


def _exp(nll: float) -> float:
    return math.exp(nll) if nll < 700 else math.inf


def convention(shards: ShardSet, config: Config, draws: int, seed: int, weights: str) -> dict:
    """Everything that a number needs beside it to be compared with another."""
    manifest, eps = shards.manifest, config.evaluate.time_eps
    if config.objective.name == "ar":
        kind = "exact likelihood, left to right"
    elif _is_cut(config):
        kind = f"cut: leaves out times below {eps:g}, which nll_per_token_uncut has"
    else:
        kind = f"uncut; nll_per_token_cut leaves out times below {eps:g}"
    return {
        "preset": "bound",
        "objective": config.objective.model_dump(mode="json"),
        "bound": kind,
        "time": None if config.objective.name == "ar" else config.evaluate.time,
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
