"""Scaling laws of finished trainings: a surface over size and tokens, and parabolas by compute budget.

M is the size, in training FLOPs a clean token (forward and backward, as counted, not 6N); D the tokens;
C = M D the compute. The methods are approaches 3 and 2 of Hoffmann et al. 2022 ("Training compute-optimal
large language models"). Both end in the same law of the best model for a budget, a `Frontier`:

    M* = G C^m    D* = C / M*    L* = E + K C^-g

Every number here is a float64 or an array of them, one of each draw of the bootstrap.
"""

from dataclasses import dataclass

import numpy as np

from lomdm_dist.errors import UserError

DELTA = 1e-3  # of Huber's loss, on log loss: beyond it a point pulls no harder
EXPONENTS = np.geomspace(0.02, 1.5, 14)  # where the search starts
LIMITS = np.log([0.01, 3])  # of an exponent's logarithm: beyond, a power is a constant or a wall
STARTS = 8  # the best of those, each followed to its end
EXACT = 1e-6  # of log loss: smaller changes are rounding
SAME_BUDGET = 0.05  # in log C: points of one budget differ by less from the next


@dataclass(frozen=True)
class Points:
    """Losses of one objective. Each [n]; `run` numbers the training that a point is of."""

    size: np.ndarray
    tokens: np.ndarray
    loss: np.ndarray
    run: np.ndarray

    @property
    def compute(self) -> np.ndarray:
        return self.size * self.tokens

    @property
    def curves(self) -> bool:
        """Whether trainings have more points here than their last."""
        return len(np.unique(self.run)) < len(self.run)


@dataclass(frozen=True)
class Frontier:
    """The best that a compute budget C (FLOPs) buys."""

    irreducible: np.ndarray  # E, nats a token
    log_k: np.ndarray
    gamma: np.ndarray
    log_g: np.ndarray
    size_exponent: np.ndarray  # m

    def loss(self, compute):
        return self.irreducible + np.exp(self.log_k - self.gamma * np.log(compute))

    def size(self, compute):
        return np.exp(self.log_g + self.size_exponent * np.log(compute))

    def compute_for(self, loss):
        """C at which the loss is reached; infinite at and below the irreducible one."""
        above = np.maximum(loss - self.irreducible, 0)
        with np.errstate(divide="ignore"):
            return np.exp((self.log_k - np.log(above)) / self.gamma)


@dataclass(frozen=True)
class Surface:
    """L(M, D) = E + A M^-a + B D^-b, nats a token."""

    irreducible: np.ndarray
    log_a: np.ndarray  # of the coefficient A
    log_b: np.ndarray
    alpha: np.ndarray  # the exponent a
    beta: np.ndarray

    def loss(self, size, tokens):
        by_size = np.exp(self.log_a - self.alpha * np.log(size))
        return self.irreducible + by_size + np.exp(self.log_b - self.beta * np.log(tokens))

    def tokens_for(self, size, loss):
        """D at which a model of this size reaches the loss; infinite where it never does."""
        left = loss - self.irreducible - np.exp(self.log_a - self.alpha * np.log(size))
        with np.errstate(divide="ignore"):
            return np.exp((self.log_b - np.log(np.maximum(left, 0))) / self.beta)

    def frontier(self) -> Frontier:
        """The minimum at M D = C, in closed form."""
        a, b = self.alpha, self.beta
        log_g = (np.log(a / b) + self.log_a - self.log_b) / (a + b)
        log_k = np.logaddexp(self.log_a - a * log_g, self.log_b + b * log_g)
        return Frontier(self.irreducible, log_k, a * b / (a + b), log_g, b / (a + b))


# von Rutte et al. 2025, arXiv 2512.10858, masked diffusion: table 7 ("method 1", "sq. fit"), by parabolas and
# without an irreducible loss. M = 6P + 12 layers width length: forward and backward, attention counted,
# embeddings and the projection onto the vocabulary not. L: negative ELBO, nats a token of a vocabulary of
# 131,072, without annealing.
PUBLISHED = Frontier(*np.array([0, np.log(27.21883), 0.04961, np.log(0.01761), 0.56629]))
# The same work's surface as others quote it. Its own text has none, and calls such a fit unreliable.
PUBLISHED_SURFACE = Surface(*np.array([2.17, np.log(222), np.log(1920), 0.292, 0.367]))


def fit_surface(points: Points, draws: int, seed: int | list[int] = 0) -> tuple[Surface, Surface]:
    """Method 1, by Huber's loss on log loss: the fit, and `draws` of its bootstrap. UserError."""
    check_points(points)
    x = np.log(np.stack([points.size, points.tokens], axis=1))
    centre = x.mean(axis=0)
    fit = _fit_powers(x - centre, np.log(points.loss)[None], DELTA)
    value, slopes = _log_sum(fit, x - centre)
    noise = Noise.of(_gradient(slopes, fit, x - centre)[0], np.log(points.loss) - value[0], points.run)
    drawn = _descend(
        np.repeat(fit, draws, axis=0), x - centre, value + noise.draw(draws, seed), DELTA, gain=1e-6
    )
    return _surface(fit[0], centre), _surface(drawn, centre)


def _surface(theta: np.ndarray, centre: np.ndarray) -> Surface:
    e, a, b, log_alpha, log_beta = np.moveaxis(theta, -1, 0)
    alpha, beta = np.exp(log_alpha), np.exp(log_beta)
    return Surface(np.exp(e), a + alpha * centre[0], b + beta * centre[1], alpha, beta)


def check_points(points: Points) -> None:
    """Can five coefficients be told from these points? UserError."""
    sizes, tokens = len(distinct(points.size)), len(distinct(points.tokens))
    if len(points.loss) < 7 or sizes < 3 or tokens < 3:
        raise UserError(
            f"{len(points.loss)} points of {sizes} sizes and {tokens} numbers of tokens: a surface's five "
            "coefficients take 7 points, 3 sizes and 3 numbers of tokens at least"
            + ("" if points.curves else " (--curve takes validations during a training, too)")
        )


def untold(log_scale, exponent, drawn: np.ndarray, log_x: np.ndarray, loss: np.ndarray, noise: float) -> str:
    """Why the losses do not determine a fit's falling power scale x^-exponent; empty where they do.

    drawn: the exponents of the bootstrap. noise: of log loss, the standard deviation of what is left over.
    """
    low, high = np.exp(LIMITS)
    ends = [np.isclose(values, low) | np.isclose(values, high) for values in (exponent, drawn)]
    if ends[0] or (drawn.size and ends[1].mean() > 0.5):
        return f"not determined: the exponent is at an end of its range, {low:g} to {high:g}"
    change = np.ptp(np.exp(log_scale - exponent * log_x) / loss)
    if change <= max(noise, EXACT):
        return f"not determined: it changes the losses by {change:.2g} of them, and {noise:.2g} is noise"
    return ""


def distinct(values: np.ndarray) -> np.ndarray:
    """Values that differ by more than 1%."""
    values = np.sort(values)
    return values[np.diff(np.log(values), prepend=-np.inf) > 0.01]


# ---- the bootstrap


@dataclass(frozen=True)
class Noise:
    """What is left of log loss after a fit: normal, with an error of its own for each training.

    A parametric bootstrap. Resampled points and residuals cover too little or too much: of few points the fit
    goes near five whatever they are (docs/scaling_laws.md has what each covers). `sd` counts the coefficients
    that were fitted, and is itself uncertain: each draw takes it from its chi-squared with `freedom`, which
    makes the intervals of a linear fit the exact ones of Student's t.
    """

    sd: float
    shared: float  # share of the variance that all points of a training have in common
    freedom: float
    run: np.ndarray

    @classmethod
    def of(cls, design: np.ndarray, residual: np.ndarray, run: np.ndarray) -> "Noise":
        """design [n, p]: slopes of the fit in its coefficients; residual [n]; run [n], from 0."""
        n, runs = len(residual), run.max() + 1
        alone = n - np.linalg.matrix_rank(design, rtol=1e-9)
        together = max(runs - (design.shape[1] + 1) // 2, 1)  # half of the coefficients are told by the runs
        shares = np.linspace(0, 0.95, 20) if runs < n else np.zeros(1)
        likelihood, variance = zip(*(_reml(design, residual, run, share) for share in shares), strict=True)
        best = int(np.argmax(likelihood))
        freedom = 1 / (shares[best] / together + (1 - shares[best]) / alone)
        return cls(float(np.sqrt(variance[best])), float(shares[best]), float(freedom), run)

    def draw(self, draws: int, seed: int | list[int]) -> np.ndarray:
        """[draws, n]"""
        noise = np.random.default_rng(seed)
        of_points = noise.standard_normal((draws, len(self.run)))
        of_runs = noise.standard_normal((draws, self.run.max() + 1))[:, self.run]
        sd = self.sd * np.sqrt(self.freedom / noise.chisquare(self.freedom, (draws, 1)))
        return sd * (np.sqrt(1 - self.shared) * of_points + np.sqrt(self.shared) * of_runs)


def _reml(design: np.ndarray, residual: np.ndarray, run: np.ndarray, shared: float) -> tuple[float, float]:
    """The restricted log-likelihood of this share, and the variance that goes with it."""
    covariance = np.where(run[:, None] == run, shared, 0.0) + (1 - shared) * np.eye(len(run))
    root = np.linalg.cholesky(covariance)
    basis, singular, _ = np.linalg.svd(np.linalg.solve(root, design), full_matrices=False)
    kept = singular > 1e-9 * singular[0]
    white = np.linalg.solve(root, residual)
    white = white - basis[:, kept] @ (basis[:, kept].T @ white)
    free = len(run) - kept.sum()
    variance = max(float(white @ white) / free, 1e-30)  # a fit may be exact
    logs = free * np.log(variance) + 2 * np.log(np.diag(root)).sum() + 2 * np.log(singular[kept]).sum()
    return -logs / 2, variance


# ---- L = exp(e) + sum of exp(A_k) x_k^-exp(a_k), fitted to many sets of losses at once


def _log_sum(theta: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Log loss [R, n] and each term's share of the loss [R, n, 1 + k]; theta [R, 1 + 2k], log x [n, k]."""
    k = x.shape[1]
    powers = theta[:, None, 1 : 1 + k] - np.exp(theta[:, None, 1 + k :]) * x
    constant = np.broadcast_to(theta[:, None, :1], (*powers.shape[:2], 1))
    terms = np.concatenate([constant, powers], axis=2)
    top = terms.max(axis=2, keepdims=True)
    parts = np.exp(terms - top)
    whole = parts.sum(axis=2, keepdims=True)
    return (top + np.log(whole))[..., 0], parts / whole


def _gradient(shares: np.ndarray, theta: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The gradient of log loss in theta, [R, n, 1 + 2k]."""
    k = x.shape[1]
    return np.concatenate([shares, -shares[..., 1:] * np.exp(theta[:, None, 1 + k :]) * x], axis=2)


def _huber(residual: np.ndarray, delta: float) -> np.ndarray:
    """Summed over the last axis."""
    far = np.abs(residual)
    return np.where(far <= delta, residual**2 / 2, delta * (far - delta / 2) if delta < np.inf else 0).sum(-1)


def _fit_powers(x: np.ndarray, log_loss: np.ndarray, delta: float) -> np.ndarray:
    """theta [R, 1 + 2k] of each row of log_loss [R, n], from the best of many starts."""
    found = [
        _descend(start, x, log_loss, delta)
        for start in np.moveaxis(np.stack([_starts(x, row) for row in log_loss]), 1, 0)
    ]
    value = np.stack([_huber(_log_sum(theta, x)[0] - log_loss, delta) for theta in found])
    return np.stack(found)[value.argmin(axis=0), np.arange(len(log_loss))]


def _starts(x: np.ndarray, log_loss: np.ndarray) -> np.ndarray:
    """[STARTS, 1 + 2k]: for given exponents the rest is linear, so a grid of exponents is cheap."""
    grid = np.stack(np.meshgrid(*[EXPONENTS] * x.shape[1], indexing="ij"), axis=-1).reshape(-1, x.shape[1])
    powers = np.exp(-grid[:, None] * x)
    terms = np.concatenate([np.ones((*powers.shape[:2], 1)), powers], axis=2) / np.exp(log_loss)[:, None]
    scale = np.maximum(np.linalg.pinv(terms).sum(axis=2), 1e-3 * np.exp(log_loss.min()))
    error = ((terms @ scale[..., None])[..., 0] - 1) ** 2
    best = error.sum(axis=1).argsort()[:STARTS]
    return np.log(np.concatenate([scale, grid], axis=1)[best])


def _descend(theta: np.ndarray, x: np.ndarray, log_loss: np.ndarray, delta: float, gain: float = 1e-10):
    """Levenberg-Marquardt on Huber's loss, reweighted; each row by itself, until it gains less than that."""
    theta, damping = theta.copy(), np.full(len(theta), 1e-3)
    value = _huber(_log_sum(theta, x)[0] - log_loss, delta)
    rows = np.arange(len(theta))
    for _ in range(1000):
        at, shares = _log_sum(theta[rows], x)
        residual, slopes = at - log_loss[rows], _gradient(shares, theta[rows], x)
        weighted = slopes * np.minimum(1, delta / np.maximum(np.abs(residual), 1e-300))[..., None]
        hessian = weighted.swapaxes(1, 2) @ slopes
        gradient = weighted.swapaxes(1, 2) @ residual[..., None]
        diagonal = np.einsum("rii->ri", hessian)
        diagonal += damping[rows, None] * (diagonal + 1e-9 * diagonal.max(axis=1, keepdims=True))
        new = theta[rows] - np.clip(np.linalg.solve(hessian, gradient)[..., 0], -1, 1)
        new[:, 1 + x.shape[1] :] = new[:, 1 + x.shape[1] :].clip(*LIMITS)
        reached = _huber(_log_sum(new, x)[0] - log_loss[rows], delta)
        better = reached < value[rows]
        ended = (better & (reached > (1 - gain) * value[rows])) | (damping[rows] > 1e8)
        theta[rows[better]], value[rows[better]] = new[better], reached[better]
        damping[rows] *= np.where(better, 1 / 3, 4)
        rows = rows[~ended]
        if not len(rows):
            break
    return theta


# ---- method 2


@dataclass(frozen=True)
class Parabolas:
    """Method 2: log loss over log size, a parabola a budget, and the law of their minima.

    points, budget [n]: what it was fitted to. compute [K]; coefficients [K, 3] of 1, x and x^2, x being the
    log size less `centre` [K]; kept [K]: has its minimum between the smallest and the largest of its sizes.
    power_law: the exponent of L* ~ C^-g without an irreducible loss, as published work gives it.
    """

    points: Points
    budget: np.ndarray
    compute: np.ndarray
    centre: np.ndarray
    coefficients: np.ndarray
    kept: np.ndarray
    frontier: Frontier
    power_law: np.ndarray
    noise: float  # standard deviation of log loss


def budgets_of(points: Points, bins: int | None = None) -> np.ndarray:
    """The budget [n] of each point, -1 for none: points of one compute, or `bins` of equal width in log C."""
    log_c = np.log(points.compute)
    if bins:
        edges = np.linspace(log_c.min(), log_c.max(), bins + 1)[1:-1]
        group = np.searchsorted(edges, log_c)
    else:
        order = np.argsort(log_c)
        group = np.empty(len(log_c), int)
        group[order] = np.cumsum(np.r_[0, np.diff(log_c[order]) > SAME_BUDGET])
    # without bins a chain of near neighbours is no budget
    enough = [
        k
        for k in np.unique(group)
        if len(distinct(points.size[group == k])) >= 3
        and (bins or np.ptp(log_c[group == k]) < 4 * SAME_BUDGET)
    ]
    number = {k: at for at, k in enumerate(enough)}
    return np.array([number.get(k, -1) for k in group], dtype=int)


def fit_parabolas(
    points: Points, budget: np.ndarray, draws: int, seed: int | list[int] = 0
) -> tuple[Parabolas, Frontier, np.ndarray]:
    """Method 2, by least squares: the fit; of each draw of its bootstrap the frontier and the power law.

    budget [n] from 0, -1 leaves a point out. UserError where three parabolas with a minimum cannot be had.
    """
    curves, points = points.curves, Points(*(values[budget >= 0] for values in vars(points).values()))
    budget, count = budget[budget >= 0], budget.max(initial=-1) + 1
    if count < 3 or len(budget) <= 3 * count + 1:
        raise UserError(
            f"{len(budget)} points in {count} compute budgets of 3 sizes or more: parabolas take 3 budgets, "
            "better 5, of 4 sizes (tokens = C / flops_per_token for a few C; or --bins K"
            + (")" if curves else ", or --curve)")
        )
    mean = (budget == np.arange(count)[:, None]) / np.bincount(budget)[:, None]
    log_c, centre = mean @ np.log(points.compute), mean @ np.log(points.size)
    design = _parabolas_design(points, budget, log_c, centre)
    solve = np.linalg.pinv(design, rcond=1e-9)
    fit = solve @ np.log(points.loss)
    coefficients = fit[:-1].reshape(3, count).T
    kept = _kept(coefficients, np.log(points.size) - centre[budget], budget)
    run = np.unique(points.run, return_inverse=True)[1]
    noise = Noise.of(design, np.log(points.loss) - design @ fit, run)
    drawn = ((design @ fit + noise.draw(draws, seed)) @ solve[:-1].T).reshape(draws, 3, count).swapaxes(1, 2)

    bent = (drawn[:, kept, 2] > 0).mean(axis=0) >= 0.95 if draws else kept[kept]
    if bent.sum() < 2 or np.ptp(np.log(points.loss)) < EXACT:  # of pure noise 1 in 40 has two
        raise UserError(
            f"not determined: {bent.sum()} of {count} compute budgets have a best size in 95% of the draws, "
            "and it takes 2: the rest bend too little against the noise; take sizes further apart"
        )

    at = log_c[kept], centre[kept]
    frontier, theta, power_law = _law_of_minima(coefficients[None, kept], *at)
    frontier = Frontier(*(law[0] for law in vars(frontier).values()))
    found = Parabolas(
        points, budget, np.exp(log_c), centre, coefficients, kept, frontier, power_law[0], noise.sd
    )
    of_draws, _, power_laws = _law_of_minima(drawn[:, kept], *at, start=theta)
    return found, of_draws, power_laws


def _parabolas_design(points: Points, budget: np.ndarray, log_c: np.ndarray, centre: np.ndarray):
    """[n, 3K + 1]: 1, x and x^2 of each budget, and one slope in log C for all.

    Points of a budget need not have exactly its compute: the slope carries them there.
    """
    x = (np.log(points.size) - centre[budget])[:, None]
    inside = budget[:, None] == np.arange(len(log_c))
    drift = (np.log(points.compute) - log_c[budget])[:, None]
    return np.concatenate([inside * x**power for power in range(3)] + [drift], axis=1)


def _kept(coefficients: np.ndarray, x: np.ndarray, budget: np.ndarray) -> np.ndarray:
    """[K] bool: which have a minimum inside their sizes. UserError where fewer than three have."""
    with np.errstate(divide="ignore", invalid="ignore"):
        lowest = -coefficients[:, 1] / (2 * coefficients[:, 2])
    inside = [x[budget == k].min() < at < x[budget == k].max() for k, at in enumerate(lowest)]
    kept = (coefficients[:, 2] > 0) & np.array(inside)
    if kept.sum() < 3:
        raise UserError(
            f"{kept.sum()} of {len(kept)} compute budgets have their best size between the smallest and the "
            "largest of it, and parabolas take 3: add sizes beyond the best, or budgets"
        )
    return kept


def _law_of_minima(
    coefficients: np.ndarray, log_c: np.ndarray, centre: np.ndarray, start: np.ndarray | None = None
) -> tuple[Frontier, np.ndarray, np.ndarray]:
    """The frontier of coefficients [R, K, 3], its parameters [R, 3] for a later start, the power law [R].

    nan where a draw has a parabola without a minimum.
    """
    constant, slope, bend = np.moveaxis(coefficients, -1, 0)
    at = -slope / (2 * np.where(bend > 0, bend, np.nan))
    log_size, log_loss = at + centre, constant + slope * at / 2
    there = np.isfinite(at).all(axis=1)
    mean = log_c.mean()
    x = log_c - mean
    theta = np.full((len(at), 3), np.nan)
    if start is None:
        theta[there] = _fit_powers(x[:, None], log_loss[there], np.inf)
    else:
        theta[there] = _descend(np.repeat(start, there.sum(), axis=0), x[:, None], log_loss[there], np.inf)
    gamma, exponent = np.exp(theta[:, 2]), log_size @ x / (x @ x)
    log_g = log_size.mean(axis=1) - exponent * mean
    frontier = Frontier(np.exp(theta[:, 0]), theta[:, 1] + gamma * mean, gamma, log_g, exponent)
    return frontier, theta, -log_loss @ x / (x @ x)
