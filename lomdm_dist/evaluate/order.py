"""In what order a model generates: what its schedules say, and what its samples show.

All statistics are of sequences: a number of each, their mean, and its standard error. They depend on
(seed, sequence, draw) alone, not on the batch size, not on the number of ranks.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lomdm_dist.data.shards import ShardSet
from lomdm_dist.evaluate.perplexity import evaluation_noise, over_sequences
from lomdm_dist.evaluate.statistics import ratio
from lomdm_dist.model.bound import draw_masks
from lomdm_dist.process import PowerSchedule

PAIRS = ("A_hatA", "A_confidence", "hatA_confidence")
TIMES = {"all": (0.0, 1.0), "early": (2 / 3, 1.0), "middle": (1 / 3, 2 / 3), "late": (0.0, 1 / 3)}
FEWEST = 3  # masked positions, for a correlation over them
SAME = 1e-5  # relative: values that differ by less are one, and float32's rounding, as where all is masked
BINS = 10  # of token frequency
EXTREMES, LEAST = 10, 10  # tokens shown at either end; occurrences that a token shown has at least


class Mean(NamedTuple):
    """Over the sequences that have a value; nan where none has one."""

    mean: float
    standard_error: float
    sequences: int


def correlations(
    model,
    shards: ShardSet,
    indices: np.ndarray,
    draws: int = 1,
    seed: int = 0,
    batch: int = 32,
    grid=None,
    progress: str | None = None,
) -> dict[str, dict[str, Mean]]:
    """Pearson correlations over masked positions, of each of `TIMES` and `PAIRS`.

    They are between A, hatA and the network's confidence, within a sequence, for masked texts drawn from
    the forward process at times of the mixture. `model` is a LoMDM or an engine around it, in evaluation
    mode, and not `ar`. With a `grid` the sequences are shared out over its ranks; all get the result.
    """

    def of_batch(model, numbers, x, valid) -> Tensor:
        noise = (
            evaluation_noise(seed, draw, draws, numbers, len(indices), shards.length).to(x.device)
            for draw in range(draws)
        )
        return sequence_correlations(model, x, valid, noise)

    width = len(TIMES) * len(PAIRS)
    found = over_sequences(model, of_batch, width, shards, indices, batch, grid, progress)
    columns = iter(found.unbind(dim=1))
    return {time: {pair: mean(next(columns)) for pair in PAIRS} for time in TIMES}


def exponents(
    model,
    shards: ShardSet,
    indices: np.ndarray,
    batch: int = 32,
    grid=None,
    progress: str | None = None,
) -> Tensor | None:
    """The forward exponents of the sequences at `indices`, [N, L], float64: large ones are generated early.

    None where the schedule has none (window, polynomial).
    """

    def of_batch(model, numbers, x, valid) -> Tensor:
        schedule = model.order(x, valid)
        if not isinstance(schedule, PowerSchedule):
            return torch.full(x.shape, math.nan)
        return schedule.exponent.expand(x.shape)

    found = over_sequences(model, of_batch, shards.length, shards, indices, batch, grid, progress)
    return None if found.isnan().all() else found


def sequence_correlations(model, x: Tensor, valid: Tensor | None, noise) -> Tensor:
    """[B, times x pairs], float64: the mean of a sequence's draws, nan where none has a correlation.

    noise: uniforms [B, 2 + L] of each draw. Within a sequence A = e / t and hatA = hat_e / t have one t.
    """
    outputs = model.order_outputs(x, valid)
    schedule = model.schedule(outputs, x, valid)
    found, t = [], []
    for uniforms in noise:
        time, masks = uniforms.split([2, x.shape[1]], dim=1)
        draw = draw_masks(schedule, x, valid, time, [masks], "mixture", 0.0, model.mask_id)
        z, masked = draw.z[0], draw.masked[0]
        seen = model.denoise(z, x, masked, valid)
        velocity, velocity_hat = (s.velocity(draw.t).expand(x.shape) for s in (schedule, seen.reverse))
        confidence = seen.log_confidence.double().exp()
        pairs = (velocity, velocity_hat), (velocity, confidence), (velocity_hat, confidence)
        found.append(torch.stack([pearson(a, b, masked) for a, b in pairs], dim=1))
        t.append(draw.t)
    found, t = torch.stack(found), torch.stack(t)[..., None]  # [K, B, 3], [K, B, 1]
    by_time = [found.where((low < t) & (t <= high), math.nan).nanmean(dim=0) for low, high in TIMES.values()]
    return torch.cat(by_time, dim=1)


def pearson(a: Tensor, b: Tensor, where: Tensor) -> Tensor:
    """Pearson's correlation over the positions of each row that `where` picks: [B, L] -> [B], float64.

    nan where they are fewer than `FEWEST`, or all have one value.
    """
    count = where.sum(dim=1, keepdim=True)

    def centred(values: Tensor) -> Tensor:
        values = torch.where(where, values.double(), 0.0)
        residual = torch.where(where, values - values.sum(dim=1, keepdim=True) / count.clamp(min=1), 0.0)
        constant = residual.abs().amax(dim=1) <= SAME * values.abs().amax(dim=1)
        return torch.where((constant | (count[:, 0] < FEWEST))[:, None], math.nan, residual)

    a, b = centred(a), centred(b)
    return (a * b).sum(dim=1) / (a.norm(dim=1) * b.norm(dim=1))


def left_to_right(lateness: Tensor, where: Tensor | None = None) -> Mean:
    """Spearman's correlation of when a position is generated with where it is: +1 is left to right.

    lateness [N, L]: large for what comes late, a step say, or minus an exponent; where [N, L]: not padding.
    """
    where = torch.ones_like(lateness, dtype=torch.bool) if where is None else where
    ranked = torch.zeros(lateness.shape, dtype=torch.float64)
    for row, picked, ranks_of_row in zip(lateness, where, ranked, strict=True):
        ranks_of_row[picked] = ranks(row[picked])
    return mean(pearson(ranked, where.cumsum(dim=1), where))


def ranks(values: Tensor) -> Tensor:
    """[n] -> [n], float64: 1 for the smallest; equal values share the mean of their ranks."""
    _, place, counts = values.unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(dim=0) - (counts.double() - 1) / 2)[place]


def exponent_by_frequency(exponent: Tensor, ids: Tensor, where: Tensor) -> list[dict]:
    """The mean exponent of rare and of frequent tokens; all [N, L], ids and their frequencies of these data.

    Tokens are put in order of their frequency and cut into `BINS` bins that hold about as many positions
    each; a token is in one bin, and tokens of one frequency may be in two.
    """
    counts = torch.bincount(ids[where])
    order = counts.argsort(stable=True)
    middle = counts[order].cumsum(dim=0) - counts[order].double() / 2
    bin_of = torch.empty_like(counts)
    bin_of[order] = (middle * BINS / counts.sum()).long().clamp(max=BINS - 1)
    rows = []
    for number in range(BINS):
        tokens = counts[(bin_of == number) & (counts > 0)]
        inside = where & (bin_of[ids * where] == number)  # padding may have an id of no text
        found = share((exponent * inside).sum(dim=1), inside.sum(dim=1))
        rows.append(
            {
                "least": int(tokens.min()) if len(tokens) else None,
                "most": int(tokens.max()) if len(tokens) else None,
                "types": len(tokens),
                "tokens": int(tokens.sum()),
                "exponent": found.mean,
                "standard_error": found.standard_error,
            }
        )
    return rows


def extreme_tokens(exponent: Tensor, ids: Tensor, where: Tensor) -> dict[str, list[dict]]:
    """The tokens with the largest and the smallest mean exponents, of those with `LEAST` occurrences."""
    ids, exponent = ids[where], exponent[where]
    counts = torch.bincount(ids)
    means = torch.zeros(len(counts), dtype=torch.float64).index_add(0, ids, exponent) / counts
    means, often = torch.where(counts >= LEAST, means, math.nan), int((counts >= LEAST).sum())
    order = means.argsort(stable=True)[:often].tolist()  # nan comes last

    def rows(tokens: list[int]) -> list[dict]:
        return [{"id": k, "exponent": float(means[k]), "occurrences": int(counts[k])} for k in tokens]

    return {"earliest": rows(order[::-1][:EXTREMES]), "latest": rows(order[:EXTREMES])}


def speech_shares(classes: list[list[str]], revealed_at: Tensor, steps: int) -> dict:
    """The share of each part of speech among the tokens revealed early and late, over samples.

    classes: of each token [N][L], names; revealed_at [N, L]: 1 to `steps`. Early are the steps 1 to
    steps / 8, late those from steps - steps / 8 on (rounded down): of 128, 1 to 16 and 112 to 128.
    """
    eighth = max(1, steps // 8)
    parts = {"early": (1, eighth), "late": (steps - eighth, steps)}
    names = sorted({name for row in classes for name in row})
    is_class = {name: torch.tensor([[c == name for c in row] for row in classes]) for name in names}
    result = {}
    for part, (first, last) in parts.items():
        inside = (first <= revealed_at) & (revealed_at <= last)
        shares = {name: share((inside & is_class[name]).sum(dim=1), inside.sum(dim=1)) for name in names}
        result[part] = {
            "steps": [first, last],
            "tokens": int(inside.sum()),
            "shares": {name: found._asdict() for name, found in shares.items()},
        }
    return result


def mean(values: Tensor) -> Mean:
    """The mean of [N], nan left out, and its standard error, which is nan of one value."""
    values = values[~values.isnan()].double()
    n = len(values)
    error = float(values.std()) / math.sqrt(n) if n > 1 else math.nan
    return Mean(float(values.mean()) if n else math.nan, error, n)


def share(part: Tensor, whole: Tensor) -> Mean:
    """sum part / sum whole, both [N], with its standard error over the sequences that have any of it."""
    some = whole > 0
    return Mean(*ratio(part[some], whole[some]), int(some.sum()))
