"""Each objective's bound against enumeration, on a model whose network is a table."""

import functools
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import integrate

from lomdm_dist.config import EvaluateConfig
from lomdm_dist.evaluate.perplexity import end_terms, sequence_bounds
from lomdm_dist.model.bound import draw_masks, estimate
from lomdm_dist.parallel.engine import Alone
from lomdm_dist.process import PolynomialSchedule, log_q, stratify
from lomdm_dist.train.step import Noise, backpropagate
from tests.table import FAMILY, MASK, PATTERNS, L, Reference, table_model

X = torch.tensor([0, 2, 1])
each_objective = pytest.mark.parametrize("name", FAMILY)
STAY = 1 - 2**-53  # a uniform that masks nothing, at any time below 1


def at(t: float, count: int = 1) -> torch.Tensor:
    return torch.full((count,), t, dtype=torch.float64)


def enumerated(reference: Reference, low: float = 0.0, given: int = 0) -> float:
    """The bound from its definition: quadrature of the sum over all patterns, velocities by autograd.

    The first `given` positions are never masked.
    """

    def slope(mask_prob, t):
        time = t.clone().requires_grad_()
        probs = mask_prob(time)
        rows = [torch.autograd.grad(p, time, retain_graph=True)[0] for p in probs.flatten()]
        return torch.stack(rows).view(probs.shape)

    def integrand(t):
        time = torch.tensor(t, dtype=torch.float64)
        m = reference.mask_prob(time)
        A = slope(reference.mask_prob, time) / m
        if reference.objective["name"] == "genmd4":
            expected = reference.log_probs.exp() @ reference.w
            hat = expected / time
            ce = reference.ce - reference.w[reference.x].log() + expected.log()
        else:
            hat, ce = slope(reference.hat_mask_prob, time) / reference.hat_mask_prob(time), reference.ce
        terms = A * ce + A * (A / hat).log() - (A - hat)
        m = torch.where(torch.arange(L) < given, 0.0, m)
        prob = torch.where(PATTERNS, m, 1 - m).prod(dim=1)
        return (prob * torch.where(PATTERNS, terms, 0.0).sum(dim=1)).sum().item()

    total = 0.0
    for a, b in itertools.pairwise([low, *(e for e in reference.edges() if e > low)]):
        # t = a + u**4 (b - a): small exponents live near 0
        total += integrate.quad(
            lambda u, a=a, b=b: 4 * u**3 * (b - a) * integrand(a + u**4 * (b - a)),
            0,
            1,
            epsabs=1e-9,
            limit=200,
        )[0]
    return total


@functools.cache
def exact(name: str, low: float = 0.0) -> float:
    """The same of an objective's table, once for all tests."""
    return enumerated(Reference(FAMILY[name], table_model(FAMILY[name]), X), low)


def jumps(reference: Reference) -> float:
    """What a schedule that stops short of its ends leaves out, by its definition."""
    if reference.objective.get("schedule") != "polynomial":
        return 0.0
    still_masked, clean = 1 / (1 + math.exp(13.3)), 1 / (1 + math.exp(5.0))
    prob = torch.where(PATTERNS, still_masked, 1 - still_masked).prod(dim=1)
    return (clean * reference.ce[-1].sum() + (prob[:, None] * PATTERNS * reference.ce).sum()).item()


def by_the_package(model, name: str, reference: Reference) -> float:
    """The package's estimator, its time drawn at the nodes of a quadrature and every pattern weighed."""
    x = X[None]
    with torch.no_grad():
        outputs = model.order_outputs(x)
        schedule = model.schedule(outputs, x, None)
        positions = (np.arange(L) + 0.5) / L  # the second uniform picks the position
        nodes, weights = np.polynomial.legendre.leggauss(60)
        levels = {round(float(schedule.mask_prob(at(e)).mean()), 9) for e in reference.edges()[1:-1]}
        total = 0.0
        for a, b in itertools.pairwise([0.0, *sorted(levels), 1.0]):
            u = (nodes + 1) / 2
            smooth = u**3 * (10 - 15 * u + 6 * u**2)  # tames square roots and small powers at both ends
            step = 30 * u**2 * (1 - u) ** 2 * weights / 2 * (b - a)
            for position in positions:
                for level, share in zip(a + smooth * (b - a), step / L, strict=True):
                    time = torch.tensor([[level, position]])
                    uniforms = list(torch.where(PATTERNS, 0.0, STAY).double()[:, None])
                    draw = draw_masks(schedule, x, None, time, uniforms, "mixture", 0.0, MASK)
                    terms = estimate(model, outputs, x, None, draw)
                    prob = torch.cat([log_q(m, schedule, draw.t) for m in draw.masked]).exp()
                    total += share * float((prob * (terms.main + terms.velocity)[:, 0]).sum())
        if isinstance(schedule, PolynomialSchedule):
            still_masked = schedule.mask_prob(at(0.0))
            for pattern in PATTERNS:
                prob = torch.where(pattern, still_masked, 1 - still_masked).prod()
                uniforms = torch.where(pattern, 0.0, STAY)[None].double()
                total += float(prob * end_terms(model, schedule, x, None, None, uniforms))
    return total


@each_objective
def test_bound_is_the_sum_over_all_masks_and_the_integral_over_time(name):
    model = table_model(FAMILY[name])
    reference = Reference(FAMILY[name], model, X)
    expected = exact(name) + jumps(reference)
    assert by_the_package(model, name, reference) == pytest.approx(expected, abs=1e-6)


def log_ratio(p, q):
    """p log(p / q), 0 where p is."""
    return torch.special.xlogy(p, p / q.clamp(min=1e-300))


@each_objective
def test_bound_is_the_discrete_time_elbo_with_1e5_steps(name):
    """-ELBO of the chain of reveals: from all masks, through 1e5 times, to all text."""
    model = table_model(FAMILY[name])
    reference = Reference(FAMILY[name], model, X)
    times = torch.linspace(0, 1, 100_001, dtype=torch.float64) ** 4
    total = 0.0
    for part in range(0, 100_000, 2000):
        s, t = times[part : part + 2000, None, None], times[part + 1 : part + 2001, None, None]
        m_s, m_t = reference.mask_prob(s), reference.mask_prob(t)
        reveal = (m_t - m_s) / m_t
        if reference.objective["name"] == "genmd4":
            stay_by_token = (s / t)[..., None] ** reference.w  # [T, 1, 1, V]
            probs = reference.log_probs.exp()
            hat_stay = (probs * stay_by_token).sum(dim=-1)
            own = reference.w[X]
            hat_reveal = (-reference.ce).exp() * (1 - (s / t) ** own)
            kl = log_ratio(reveal, hat_reveal) + log_ratio(1 - reveal, hat_stay)
        else:
            hat_s, hat_t = reference.hat_mask_prob(s), reference.hat_mask_prob(t)
            hat = (hat_t - hat_s) / hat_t
            kl = log_ratio(reveal, hat) + log_ratio(1 - reveal, 1 - hat) + reveal * reference.ce
        prob = torch.where(PATTERNS, m_t, 1 - m_t).prod(dim=-1)
        total += (prob * torch.where(PATTERNS, kl, 0.0).sum(dim=-1)).sum().item()
    assert total + jumps(reference) == pytest.approx(exact(name) + jumps(reference), abs=1e-3)


@each_objective
@pytest.mark.parametrize("rule", ["mixture", "uniform", "pinned"])
def test_the_estimate_has_no_bias_and_the_remainder_is_what_the_cut_leaves_out(name, rule):
    model, n, eps = table_model(FAMILY[name]), 40_000, 0.05
    reference = Reference(FAMILY[name], model, X)
    generator = torch.Generator().manual_seed(7)
    uniforms = torch.rand(n, 2 + L, generator=generator, dtype=torch.float64)
    uniforms[:, 0] = stratify(uniforms[:, 0], torch.arange(n), n)
    config = SimpleNamespace(objective=model.objective, evaluate=EvaluateConfig(time=rule, time_eps=eps))
    with torch.no_grad():
        above, below, ends = sequence_bounds(model, X.expand(n, L), None, None, [uniforms], 1, config)
    cut, whole = exact(name, eps), exact(name)
    for found, expected in (
        (above, cut),
        (below, whole - cut),
        (above + below, whole),
        (ends, jumps(reference)),
    ):
        error = found.std().item() / n**0.5
        assert (
            abs(found.mean().item() - expected) < 4 * error + 1e-4
        )  # the polynomial's rest is rarer than the draws


@pytest.mark.parametrize("name", ["lomdm", "softmax", "genmd4"])
def test_the_mean_gradient_of_the_two_sample_loss_is_that_of_the_bound(name):
    """Over all pairs of masks at one time: every gradient, that of the order among them, is exact."""
    objective = FAMILY[name] | ({} if name == "genmd4" else {"stop_gradient": False})
    model, x = table_model(objective), X[None]
    config = SimpleNamespace(objective=model.objective, train=SimpleNamespace(two_samples="split"))
    time = torch.tensor([[0.3, 0.9]], dtype=torch.float64)
    uniforms = list(torch.where(PATTERNS, 0.0, STAY).double()[:, None])

    outputs = model.order_outputs(x)
    schedule = model.schedule(outputs, x, None)
    draw = draw_masks(schedule, x, None, time, uniforms, "mixture", 0.0, MASK)
    prob = torch.cat([log_q(m, schedule, draw.t) for m in draw.masked]).exp()
    bounds = estimate(model, outputs, x, None, draw)
    likely = draw._replace(weight=draw.weight * prob.detach()[:, None])
    through_bounds = estimate(model, outputs, x, None, likely).total
    through_q = (prob * (bounds.main + bounds.velocity)[:, 0]).sum()
    ((through_bounds + through_q) / L).backward()
    exact = gradients(model)

    model.zero_grad()
    for first, second in itertools.product(range(len(PATTERNS)), repeat=2):
        pair = Noise(time, [uniforms[first], uniforms[second]])
        backpropagate(Alone(model), x, None, pair, config, float(prob[first] * prob[second]))
    mean = gradients(model)
    assert exact.abs().max() > 0.1
    assert torch.allclose(mean, exact, atol=1e-7)


def gradients(model) -> torch.Tensor:
    return torch.cat([parameter.grad.double().flatten() for parameter in model.parameters()])
