"""The bound on -log p(x), estimated on token shards; for `ar` the exact value.

The estimate depends on (seed, sequence, draw) alone: not on the batch size, not on the number of
ranks; no sequence is counted twice or left out.
"""

import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from lomdm_dist.config import Config
from lomdm_dist.data.shards import ShardSet
from lomdm_dist.evaluate.conventions import Pieces
from lomdm_dist.evaluate.statistics import exp, ratio
from lomdm_dist.model.bound import draw_masks, estimate
from lomdm_dist.process import PolynomialSchedule, corrupt, keyed_uniforms, stratify
from lomdm_dist.process.noise import Purpose


def sequence_bounds(
    model,
    x: Tensor,
    valid: Tensor | None,
    counted: Tensor | None,
    noise: Iterable[Tensor],
    draws: int,
    config: Config,
) -> Tensor:
    """The bound of each sequence in nats, mean of the draws, in three parts that add up to it: [3, B].

    They are what lies at times from `time_eps` on; what lies below, which has draws of its own, or is
    guessed, where the others are uniform on [time_eps, 1]; and the jumps at the ends of a schedule that
    has any. x [B, L]; valid [B, L] bool or None, False at padding; counted [B, L]: the positions whose
    bound it is, by default all that are valid; the others are given and never masked, so it is a bound
    on -log p(counted | the others), for a text that is generated after a prompt. noise: uniforms
    [B, 2 + L] of each draw, time then masks. float64.
    """
    counted = valid if counted is None else counted
    if config.objective.name == "ar":
        ce, _ = model.causal_ce(x, valid)
        nll = (ce.double() if counted is None else ce.double() * counted).sum(dim=1)
        return torch.stack([nll, torch.zeros_like(nll), torch.zeros_like(nll)])
    rule, eps, guessed = config.evaluate.time, config.evaluate.time_eps, config.evaluate.below == "guessed"
    outputs = model.order_outputs(x, valid)
    schedule = model.schedule(outputs, x, valid)
    above, below, jumps = torch.zeros(3, len(x), dtype=torch.float64, device=x.device)
    for uniforms in noise:
        time, masks = uniforms.split([2, x.shape[1]], dim=1)
        for rule_k in (rule, "remainder") if rule == "uniform" and not guessed else (rule,):
            draw = draw_masks(schedule, x, counted, time, [masks], rule_k, eps, model.mask_id)
            terms = estimate(model, outputs, x, valid, draw)
            value = (terms.main + terms.velocity)[0]
            late = (draw.t >= eps) & (rule_k != "remainder")
            above, below = above + value * late, below + value * ~late
        if isinstance(schedule, PolynomialSchedule):
            jumps = jumps + end_terms(model, schedule, x, valid, counted, masks)
    if guessed:
        still = schedule.mask_prob(torch.full((len(x),), eps, device=x.device)).expand(x.shape)
        still = still if counted is None else still * counted
        below = draws * math.log(config.model.vocab_size - 1) * still.sum(dim=1)
    return torch.stack([above, below, jumps]) / draws


def end_terms(
    model,
    schedule: PolynomialSchedule,
    x: Tensor,
    valid: Tensor | None,
    counted: Tensor | None,
    uniforms: Tensor,
) -> Tensor:
    """The bound of the two jumps of a schedule that stops short of its ends, [B], float64.

    At t = 1, from all masks: a position is clean with probability alpha(1), in the forward and the
    reverse schedule alike, so its CE is all there is to pay. At t = 0 what is still masked is drawn.
    """
    everything = torch.ones_like(x, dtype=torch.bool) if counted is None else counted
    ends = torch.zeros(2, len(x), dtype=torch.float64, device=x.device)
    ends[1] = 1
    first = model.denoise(torch.where(everything, model.mask_id, x), x, everything, valid).ce
    z = corrupt(x, schedule, ends[0], uniforms, model.mask_id, counted)
    last = model.denoise(z, x, z == model.mask_id, valid).ce
    return (schedule.log_keep_prob(ends[1]).exp() * first).sum(dim=1) + last.double().sum(dim=1)


@torch.no_grad()
def estimate_bound(
    model,
    shards: ShardSet | Pieces,
    config: Config,
    indices: np.ndarray,
    draws: int = 1,
    seed: int = 0,
    batch: int = 32,
    given: int = 0,
    grid=None,
    progress: str | None = None,
) -> dict:
    """The bound a predicted token over the sequences at `indices`, in nats, with its standard error.

    `model` is a LoMDM or an engine around it, in evaluation mode. The first `given` tokens of a sequence
    are neither masked nor counted. With a `grid` the sequences are shared out over its ranks, and every
    rank gets the result; `progress` names a progress bar. `nll_per_token` is uncut unless
    `evaluate.time` is uniform; the cut value, the uncut one and what lies between them (the
    remainder below the cut, the jumps of a polynomial) stand beside it. The standard error is over
    sequences and contains the noise of the draws; it is nan for a single sequence.
    """

    def of_batch(model, numbers, x, valid) -> Tensor:
        noise = (
            evaluation_noise(seed, draw, draws, numbers, len(indices), shards.length).to(x.device)
            for draw in range(draws)
        )
        counted = torch.ones_like(x, dtype=torch.bool) if valid is None else valid.clone()
        counted[:, :given] = False
        parts = sequence_bounds(model, x, valid, counted if given else None, noise, draws, config)
        return torch.cat([counted.sum(dim=1)[None], parts]).T

    return _result(*over_sequences(model, of_batch, 4, shards, indices, batch, grid, progress).T, config)


@torch.no_grad()
def over_sequences(
    model,
    of_batch: Callable,
    width: int,
    shards: ShardSet | Pieces,
    indices: np.ndarray,
    batch: int,
    grid=None,
    progress: str | None = None,
) -> Tensor:
    """of_batch(model, numbers, x, valid) [B, width] of all sequences: [N, width], float64, on every rank."""
    device = grid.device if grid else next(model.parameters()).device
    found = torch.zeros(len(indices), width, dtype=torch.float64)
    for numbers in shared_out(len(indices), batch, grid, progress):
        asked = numbers if len(numbers) else np.zeros(1, dtype=np.int64)
        x, valid = shards.batch(indices[asked], device)
        values = model(of_batch, asked, x, valid)
        found[numbers] = values[: len(numbers)].to("cpu", torch.float64)
    return grid.sum(found.flatten()).view(found.shape) if grid else found


def shared_out(count: int, batch: int, grid, progress: str | None) -> Iterator[np.ndarray]:
    """The numbers of the sequences in each batch of this rank, of 0 .. count - 1.

    Every rank has the same number of batches, an empty one among them where it has no more sequences: a
    sharded model needs all ranks in each forward pass. `progress` names a progress bar.
    """
    rank, size = (grid.data_rank, grid.data_size) if grid else (0, 1)
    mine = np.arange(count)[rank::size]
    rounds = math.ceil(math.ceil(count / size) / batch)
    for k in tqdm(range(rounds), desc=progress, disable=None if progress else True):
        yield mine[k * batch : (k + 1) * batch]


def evaluation_noise(
    seed: int, draw: int, draws: int, numbers: np.ndarray, total: int, length: int
) -> Tensor:
    """Uniforms [B, 2 + length] of one draw for sequences `numbers` of `total`.

    The times of all draws of all sequences are stratified together, turned by the seed: another seed
    gives a sequence another stratum.
    """
    uniforms = keyed_uniforms(seed, Purpose.EVALUATE, draw, numbers, 2 + length)
    turn = int(keyed_uniforms(seed, Purpose.STRATA, 0, [0], 1) * total * draws)
    strata = torch.from_numpy(numbers) * draws + draw + turn
    uniforms[:, 0] = stratify(uniforms[:, 0], strata, total * draws)
    return uniforms


def _is_cut(config: Config) -> bool:
    uniform = config.objective.name != "ar" and config.evaluate.time == "uniform"
    return uniform and config.evaluate.below == "drawn"


def _result(tokens: Tensor, above: Tensor, below: Tensor, jumps: Tensor, config: Config) -> dict:
    """Of what each sequence counts and gives, [N] each."""
    nll, error = ratio(above if _is_cut(config) else above + below + jumps, tokens)
    result = {
        "nll_per_token": nll,
        "standard_error": math.hypot(error, nll * 2**-23),  # its CE is float32: no better than that
        "ppl": exp(nll),
    }
    if config.objective.name != "ar":
        (cut, _), (remainder, remainder_error), (jumps, _) = (
            ratio(part, tokens) for part in (above, below, jumps)
        )
        uncut = cut + remainder + jumps
        result |= {
            "nll_per_token_uncut": uncut,
            "nll_per_token_cut": cut,
            "remainder": remainder,
            "remainder_standard_error": remainder_error,
            "jumps": jumps,
            "ppl_uncut": exp(uncut),
            "ppl_cut": exp(cut),
        }
    return result | {"tokens": round(tokens.sum().item()), "sequences": len(tokens)}
