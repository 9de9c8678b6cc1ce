"""Both methods on the points of each objective, and what one objective gains over another: the numbers."""

from dataclasses import dataclass

import numpy as np

from lomdm_dist.errors import UserError
from lomdm_dist.study.scaling_law import (
    Frontier,
    Parabolas,
    Points,
    Surface,
    budgets_of,
    distinct,
    fit_parabolas,
    fit_surface,
    untold,
)
from lomdm_dist.study.scaling_points import Training, points_at_budgets, points_of

AHEAD = (1, 5, 50)  # times the largest compute of the data: where L* is told
BUDGETS = 5  # read off the curves, where --bins does not say
SIZES = 6  # at which a gain is told, of those there are
M, N = "flops_per_token", "parameters"  # a training's size
FRONTIER = {"size_exponent", "tokens_exponent", "loss_exponent", "loss", "flops_per_token", "tokens"}
# a draw far off may overflow: it is one of the largest, and no more
WILD = np.errstate(over="ignore", divide="ignore", invalid="ignore")
SOURCE = 'von Rutte et al. 2025, "Scaling behavior of discrete diffusion language models", arXiv 2512.10858'
CONVENTION = {
    "size": "M: training FLOPs a clean token, forward and backward, all samples of the objective, attention "
    "and vocabulary projection as done; not 6N",
    "compute": "C = M tokens",
    "loss": "as in the table: a sweep writes the uncut validation bound, nats a token",
    "surface": "L = E + A M^-a + B D^-b by Huber's loss, delta 1e-3, on log loss",
    "parabolas": "least squares of log loss in log M by budget; one whose minimum lies outside its sizes is "
    "left out; L* = E + K C^-g through the minima",
    "intervals": "95%, percentiles of a parametric bootstrap: normal noise on log loss, its size from the "
    "residuals and itself uncertain, one error a training where a training has several points",
    "gain": "how many times the compute the first objective needs for the loss of the other",
    "published": f"{SOURCE}: masked diffusion, table 7, method 1, sq. fit. M = 6P + 12 layers width length: "
    "forward, backward and attention, neither embeddings nor vocabulary projection; L: negative ELBO, "
    "nats a token of a vocabulary of 131,072, Nemotron-CC, length 2,048, no annealing (it takes 2.45% off). "
    "The surface is as quoted by others; that text has none and calls such fits unreliable",
}


@dataclass(frozen=True)
class Fits:
    """What was fitted to an objective; what could not be is absent, with the reason in `missing`.

    Of a pair the first is the fit, the second holds a value of each draw. frontiers: by method, where the
    losses determine it. unknown: what they do not, by method, as the JSON file names it.
    """

    points: Points
    surface: tuple[Surface, Surface] | None
    parabolas: Parabolas | None
    of_draws: Frontier | None  # of the parabolas
    power_law: np.ndarray | None  # [draws], of the parabolas
    frontiers: dict[str, tuple[Frontier, Frontier]]
    of_parameters: tuple[Surface, Surface] | None
    missing: dict[str, str]
    unknown: dict[str, set[str]]


def fit_all(
    by_objective: dict[str, list[Training]], draws: int, seed: int, since: float | None, bins: int | None
) -> dict[str, Fits]:
    """The fits of each objective. Their draws are independent, else luck would cancel in the gain."""
    return {
        name: fit(those, draws, [seed, number], since, bins)
        for number, (name, those) in enumerate(by_objective.items())
    }


def fit(
    trainings: list[Training], draws: int, seed: int | list[int], since: float | None, bins: int | None
) -> Fits:
    """All that these trainings of one objective give. UserError where that is nothing."""
    found, missing = {}, {}
    points = {size: points_of(trainings, since, size) for size in (M, N)}
    methods = {
        "surface": (M, lambda: fit_surface(points[M], draws, seed)),
        "parabolas": (M, lambda: fit_parabolas(*_budgets(trainings, points[M], since, bins), draws, seed)),
        "surface of parameters": (N, lambda: fit_surface(points[N], draws, seed)),
    }
    for name, (size, method) in methods.items():
        try:
            _check_size(trainings, size)
            found[name] = method()
        except UserError as error:
            missing[name] = str(error)
    if not found:
        raise UserError(f"{trainings[0].objective}: {missing['surface']}")
    surface, of_parameters = found.get("surface"), found.get("surface of parameters")
    parabolas, of_draws, power_law = found.get("parabolas", (None, None, None))
    frontiers, unknown = {}, {"surface": set(), "parabolas": set()}
    if surface:
        frontiers["surface"] = surface[0].frontier(), surface[1].frontier()
        unknown["surface"] = _unknown(*surface, points[M], missing, "the surface")
        if not unknown["surface"]:
            unknown["surface"] = _unknown_frontier(frontiers["surface"][0], points[M], missing)
    if of_parameters and _unknown(*of_parameters, points[N], missing, "the surface of parameters"):
        of_parameters = None
    if parabolas:
        frontiers["parabolas"] = parabolas.frontier, of_draws
        unknown["parabolas"] = _unknown_law(parabolas, of_draws, missing)
    frontiers = {name: pair for name, pair in frontiers.items() if not unknown[name]}
    counted = all(training.flops_per_token is not None for training in trainings)
    shown = points[M if counted else N]
    return Fits(shown, surface, parabolas, of_draws, power_law, frontiers, of_parameters, missing, unknown)


@WILD
def _unknown(fit: Surface, draws: Surface, points: Points, missing: dict[str, str], of: str) -> set[str]:
    """The coefficients that the losses do not determine; why goes to `missing`."""
    value = fit.loss(points.size, points.tokens)
    residual = np.log(points.loss / value)
    noise = float(np.sqrt((residual**2).sum() / (len(residual) - 5)))
    terms = {
        ("A", "a"): (fit.log_a, fit.alpha, draws.alpha, np.log(points.size)),
        ("B", "b"): (fit.log_b, fit.beta, draws.beta, np.log(points.tokens)),
    }
    unknown = set()
    for names, term in terms.items():
        if why := untold(*term, value, noise):
            missing[f"{' and '.join(names)} of {of}"] = why
            unknown |= {"E", *names, *FRONTIER}
    return unknown


@WILD
def _unknown_frontier(law: Frontier, points: Points, missing: dict[str, str]) -> set[str]:
    """All of it where no budget of the data has its best size among those that were trained."""
    (low, high), best = _range(points.size), law.size(np.array(_range(points.compute)))
    if best[0] <= high and low <= best[1]:
        return set()
    side, more = ("below", "smaller ones, or these longer") if best[1] < low else ("above", "larger ones")
    missing["best size, tokens and loss of the surface"] = (
        f"not determined: at the compute of the data it has M* = {best[0]:.2g} to {best[1]:.2g}, {side} all "
        f"sizes trained, {low:.2g} to {high:.2g}: train {more}"
    )
    return FRONTIER


@WILD
def _unknown_law(found: Parabolas, draws: Frontier, missing: dict[str, str]) -> set[str]:
    """The same of the law of the minima: they may tell the best size, and no law of the loss."""
    law, compute = found.frontier, found.compute[found.kept]
    gamma = draws.gamma[~np.isnan(draws.gamma)]
    why = untold(law.log_k, law.gamma, gamma, np.log(compute), law.loss(compute), found.noise)
    if why:
        missing["L* = E + K C^-g of the parabolas"] = why
    return {"E", "loss_exponent", "loss"} if why else set()


def _check_size(trainings: list[Training], name: str) -> None:
    """UserError where some have no such size."""
    lack = sum(getattr(training, name) is None for training in trainings)
    if lack:
        why = ", and 6ND does not measure compute" if name == "flops_per_token" else ""
        raise UserError(f"{lack} of {len(trainings)} rows have no {name}{why}")


def _budgets(
    trainings: list[Training], points: Points, since: float | None, bins: int | None
) -> tuple[Points, np.ndarray]:
    """The points of method 2, and their budgets."""
    if since is not None:
        points, bins = points_at_budgets(trainings, since, bins or BUDGETS), None
    return points, budgets_of(points, bins)


# ---- as numbers


def interval(value, draws) -> dict:
    """A number with its 95% interval, null where no draw has it."""
    draws = np.asarray(draws)
    draws = draws[~np.isnan(draws)]
    # nearest: between two draws that are infinite nothing can be interpolated
    ends = np.quantile(draws, [0.025, 0.975], method="nearest").tolist() if draws.size else (None, None)
    return {"value": float(value), "low": ends[0], "high": ends[1]}


@WILD
def describe(fits: Fits, trainings: list[Training]) -> dict:
    """The fits of one objective, for the JSON file."""
    points = fits.points
    measured = all(training.flops_per_token is not None for training in trainings)
    return {
        "trainings": len(trainings),
        "points": len(points.loss),
        "tokens": _range(points.tokens),
        "loss": _range(points.loss),
        "flops_per_token": _range(points.size) if measured else None,
        "compute": _range(points.compute) if measured else None,
        "surface": fits.surface and _describe_surface(fits),
        "parabolas": fits.parabolas and _describe_parabolas(fits),
        "surface_of_parameters": fits.of_parameters and _coefficients(*fits.of_parameters),
        "missing": fits.missing,
    }


def _range(values: np.ndarray) -> list[float]:
    return [float(values.min()), float(values.max())]


def _describe_surface(fits: Fits) -> dict:
    residual = np.log(fits.points.loss / fits.surface[0].loss(fits.points.size, fits.points.tokens))
    laws = _coefficients(*fits.surface) | _laws(*(one.frontier() for one in fits.surface), fits.points)
    return {
        **_without(laws, fits.unknown["surface"]),
        "residual_rms": float(np.sqrt((residual**2).mean())),
        "largest_residual": float(np.abs(residual).max()),
    }


def _describe_parabolas(fits: Fits) -> dict:
    found, draws = fits.parabolas, fits.of_draws
    laws = {"E": interval(found.frontier.irreducible, draws.irreducible)}
    laws |= _laws(found.frontier, draws, fits.points)
    return {
        **_without(laws, fits.unknown["parabolas"]),
        "power_law_exponent": interval(found.power_law, fits.power_law),
        "budgets": [
            {"compute": float(c), "points": int((found.budget == k).sum()), "kept": bool(found.kept[k])}
            for k, c in enumerate(found.compute)
        ],
        "draws_without_minimum": int(np.isnan(draws.gamma).sum()),
    }


def _without(laws: dict, unknown: set[str]) -> dict:
    """Null for what is unknown, in the rows of the best, too."""

    def told(row: dict) -> dict:
        return {key: None if key in unknown else value for key, value in row.items()}

    return told(laws) | {"best": [told(row) for row in laws["best"]]}


def _coefficients(fit: Surface, draws: Surface) -> dict:
    return {
        "E": interval(fit.irreducible, draws.irreducible),
        "A": interval(np.exp(fit.log_a), np.exp(draws.log_a)),
        "a": interval(fit.alpha, draws.alpha),
        "B": interval(np.exp(fit.log_b), np.exp(draws.log_b)),
        "b": interval(fit.beta, draws.beta),
    }


def _laws(fit: Frontier, draws: Frontier, points: Points) -> dict:
    """The exponents of the best size, tokens and loss; what they say at the largest compute and beyond."""
    best = []
    for times in AHEAD:
        compute = times * points.compute.max()
        best.append(
            {
                "compute": float(compute),
                "times_the_data": times,
                "loss": interval(fit.loss(compute), draws.loss(compute)),
                "flops_per_token": interval(fit.size(compute), draws.size(compute)),
                "tokens": interval(compute / fit.size(compute), compute / draws.size(compute)),
            }
        )
    return {
        "size_exponent": interval(fit.size_exponent, draws.size_exponent),
        "tokens_exponent": interval(1 - fit.size_exponent, 1 - draws.size_exponent),
        "loss_exponent": interval(fit.gamma, draws.gamma),
        "best": best,
    }


@WILD
def gain(base: Fits, other: Fits, trainings: list[Training]) -> dict:
    """How many times the compute the base takes for the other's loss; infinite where it never gets there.

    On the frontier by each method that both have, at three budgets that both have data of; and at sizes of
    the other's `trainings`, the base being as large and taking more tokens. `extrapolated`: no data there.
    """
    low = max(base.points.compute.min(), other.points.compute.min())
    high = min(base.points.compute.max(), other.points.compute.max())
    budgets = np.geomspace(low, high, 3) if low < high else [low]
    return {
        "overlap": bool(low < high),
        "frontier": {
            name: [_frontier_gain(name, base, other, compute) for compute in budgets]
            for name in base.frontiers
            if name in other.frontiers
        },
        "at_size": _size_gains(base, other, trainings)
        if all(one.surface and "E" not in one.unknown["surface"] for one in (base, other))
        else [],
    }


def _frontier_gain(method: str, base: Fits, other: Fits, compute: float) -> dict:
    pairs = zip(base.frontiers[method], other.frontiers[method], strict=True)
    value, draws = (a.compute_for(b.loss(compute)) / compute for a, b in pairs)
    needed, size = compute * value, base.frontiers[method][0].size
    inside = _within(needed, base.points.compute) and _within(compute, base.points.compute)
    inside = inside and _within(size(needed), base.points.size)
    inside = inside and _within(other.frontiers[method][0].size(compute), other.points.size)
    return {"compute": float(compute), "gain": interval(value, draws), "extrapolated": not inside}


def _within(value: float, data: np.ndarray) -> bool:
    return bool(data.min() <= value <= data.max())


def _size_gains(base: Fits, other: Fits, trainings: list[Training]) -> list[dict]:
    longest = {one.flops_per_token: one.tokens for one in sorted(trainings, key=lambda one: one.tokens)}
    sizes = distinct(np.array(list(longest)))
    rows = []
    for size in sizes[np.unique(np.linspace(0, len(sizes) - 1, SIZES).round().astype(int))]:
        tokens = longest[size]
        value, draws = (
            a.tokens_for(size, b.loss(size, tokens)) / tokens
            for a, b in zip(base.surface, other.surface, strict=True)
        )
        inside = _within(size, base.points.size) and _within(tokens, base.points.tokens)
        inside = inside and _within(tokens * value, base.points.tokens)
        row = {"flops_per_token": float(size), "tokens": tokens, "gain": interval(value, draws)}
        rows.append(row | {"extrapolated": not inside})
    return rows
