"""The bound and its estimators against enumeration: every mask pattern summed, time by quadrature."""

import itertools

import numpy as np
import pytest
import torch
from scipy import integrate

from lomdm_dist.process import (
    PowerSchedule,
    WindowSchedule,
    draw_pinned,
    draw_time,
    genmd4_integrand,
    keyed_uniforms,
    log_q,
    nelbo_integrand,
    rloo_surrogate,
    sample_time,
    stratify,
)

L = 3
PATTERNS = torch.tensor(list(itertools.product([False, True], repeat=L)))
generator = torch.Generator().manual_seed(1)
# a table in the place of the network: CE and hat_e of each position under each mask pattern
CE = torch.rand(len(PATTERNS), L, generator=generator, dtype=torch.float64) * 3
HAT = 0.3 + torch.rand(len(PATTERNS), L, generator=generator, dtype=torch.float64)
EXPONENT = torch.tensor([[0.4, 0.8, 1.3]], dtype=torch.float64)


def integrands(exponent, t):
    """Integrand and log q of every pattern at a time: two [2**L]."""
    schedule, time = PowerSchedule(exponent), torch.full((len(PATTERNS),), t, dtype=torch.float64)
    main, velocity = nelbo_integrand(
        CE, PATTERNS, schedule.velocity(time).expand_as(CE), PowerSchedule(HAT).velocity(time)
    )
    return main + velocity, log_q(PATTERNS, schedule, time)


def expected_integrand(exponent, t):
    loss, log_prob = integrands(exponent, t)
    return (log_prob.exp() * loss).sum()


def exact_bound(exponent=EXPONENT, low=0.0):
    # substituting t = u**4 tames the t**(e - 1) at 0
    value, error = integrate.quad(
        lambda u: 4 * u**3 * expected_integrand(exponent, u**4).item(), low**0.25, 1, epsabs=1e-11
    )
    assert error < 1e-8
    return value


def test_bound_equals_the_discrete_time_elbo():
    """-ELBO of the reverse chain with T steps, written out independently: KL of each reveal."""
    grid = torch.linspace(0, 1, 20_001, dtype=torch.float64) ** 4  # fine near 0, where small exponents live
    t, s = grid[1:, None, None], grid[:-1, None, None]
    reveal = (t**EXPONENT - s**EXPONENT) / t**EXPONENT  # [T, 1, L]: (alpha(s) - alpha(t)) / (1 - alpha(t))
    hat = (t**HAT - s**HAT) / t**HAT  # [T, 2^L, L]
    stay = torch.special.xlogy(1 - reveal, (1 - reveal) / (1 - hat).clamp(min=1e-300))
    kl = reveal * (reveal / hat).log() + stay + reveal * CE
    pattern_prob = torch.where(PATTERNS, t**EXPONENT, 1 - t**EXPONENT).prod(-1)  # [T, 2^L]
    total = (pattern_prob * torch.where(PATTERNS, kl, 0.0).sum(-1)).sum().item()
    assert total == pytest.approx(exact_bound(), rel=1e-3)


@pytest.mark.parametrize(("rule", "eps"), [("mixture", 0.0), ("uniform", 0.05)])
def test_time_rules_estimate_the_integral(rule, eps):
    n = 16_384
    uniforms = keyed_uniforms(0, 0, 0, range(n), 2 + L)
    uniforms[:, 0] = stratify(uniforms[:, 0], torch.arange(n), n)
    t, weight = sample_time(EXPONENT.expand(n, L), uniforms[:, :2], rule, eps)
    masked = uniforms[:, 2:] < t[:, None] ** EXPONENT
    rows = (masked * torch.tensor([4, 2, 1])).sum(1)
    main, velocity = nelbo_integrand(
        CE[rows], masked, PowerSchedule(EXPONENT).velocity(t), PowerSchedule(HAT[rows]).velocity(t)
    )
    estimate = weight * (main + velocity)
    error = estimate.std().item() / n**0.5
    assert abs(estimate.mean().item() - exact_bound(low=eps)) < 4 * error


def test_times_of_a_shared_exponent_are_those_of_each_sequence():
    uniforms = keyed_uniforms(0, 0, 0, range(5), 2)
    whole = sample_time(EXPONENT.expand(5, L), uniforms, "mixture", 0.0)
    for shared in (EXPONENT, EXPONENT[0]):
        for ours, theirs in zip(sample_time(shared, uniforms, "mixture", 0.0), whole, strict=True):
            assert torch.equal(ours, theirs)
    t, weight = sample_time(torch.tensor(0.7), uniforms, "mixture", 0.0)
    assert torch.allclose(t, uniforms[:, 0] ** (1 / 0.7))
    assert torch.allclose(weight, t**0.3 / 0.7)


def test_uncut_bound_of_a_constant_network_and_what_a_cut_loses():
    exponent, n = torch.full((1, 8), 0.375, dtype=torch.float64), 4096
    uniforms = keyed_uniforms(0, 0, 0, range(n), 10)
    t, weight = sample_time(exponent.expand(n, 8), uniforms[:, :2], "mixture", 0.0)
    schedule = PowerSchedule(exponent.expand(n, 8))
    masked = uniforms[:, 2:] < schedule.log_mask_prob(t).exp()
    main, _ = nelbo_integrand(torch.ones(n, 8), masked, schedule.velocity(t), schedule.velocity(t))
    bound = weight * main / 8
    assert abs(bound.mean() - 1) < 4 * bound.std() / n**0.5
    cut = (bound * (t >= 1e-3)).mean()
    assert cut.item() == pytest.approx(1 - 1e-3**0.375, abs=4 * bound.std().item() / n**0.5)


def quadrature_of_bound(ce, schedule, edges=()):
    """The bound of a fixed schedule under a table of CE: sum over patterns, integral over time."""
    patterns = PATTERNS[:, : ce.shape[1]]

    def integrand(t):
        time = torch.tensor([t], dtype=torch.float64)
        velocity = schedule.velocity(time).expand_as(ce)
        log_prob = torch.where(patterns, schedule.log_mask_prob(time), schedule.log_keep_prob(time)).sum(1)
        return (log_prob.exp() * nelbo_integrand(ce, patterns, velocity, velocity)[0]).sum().item()

    pieces = [0.0, *edges, 1.0]
    return sum(
        integrate.quad(integrand, a, b, epsabs=1e-10, limit=200)[0] for a, b in itertools.pairwise(pieces)
    )


def row(*masked: bool) -> int:
    return int((torch.tensor(masked) * torch.tensor([4, 2, 1])).sum())


def test_left_to_right_is_the_chain_rule_up_to_eps():
    """And halving eps halves the difference."""
    chain = CE[row(1, 1, 1), 0] + CE[row(0, 1, 1), 1] + CE[row(0, 0, 1), 2]
    edges = (1 / 3, 2 / 3)
    differences = [
        quadrature_of_bound(CE, WindowSchedule.left_to_right(3, eps), edges) - chain.item()
        for eps in (2e-4, 1e-4)
    ]
    assert abs(differences[1]) < 50 * 1e-4
    assert differences[0] / differences[1] == pytest.approx(2, rel=0.01)


def test_a_permutation_is_the_chain_rule_in_its_order_and_its_inverse_another():
    order = torch.tensor([2, 0, 1])
    chain = CE[row(1, 1, 1), 2] + CE[row(1, 1, 0), 0] + CE[row(0, 1, 0), 1]
    inverse = CE[row(1, 1, 1), 1] + CE[row(1, 0, 1), 2] + CE[row(1, 0, 0), 0]
    assert abs(chain - inverse) > 0.1
    for permutation, expected in ((order, chain), (torch.argsort(order), inverse)):
        bound = quadrature_of_bound(CE, WindowSchedule.permutation(permutation, 1e-5), (1 / 3, 2 / 3))
        assert bound == pytest.approx(expected.item(), abs=1e-3)


def test_one_block_is_mdlm_in_another_clock_and_single_blocks_are_left_to_right():
    mdlm = quadrature_of_bound(CE, PowerSchedule(torch.ones(1, 3)))
    assert quadrature_of_bound(CE, WindowSchedule.blocks(3, 3, 1e-4)) == pytest.approx(mdlm, abs=1e-6)
    # MDLM in closed form: each order of generation is as likely as any other
    orders = [
        sum(CE[row(*(int(p in order[k:]) for p in range(3))), order[k]] for k in range(3))
        for order in itertools.permutations(range(3))
    ]
    assert mdlm == pytest.approx(float(sum(orders) / 6), abs=1e-8)


def test_genmd4_is_the_bound_with_the_reweighted_network():
    """A = w_x / t, hatA = <w, p> / t, and p w / <w, p> in place of p; to 1e-12, term by term."""
    V = 5
    log_probs = torch.randn(len(PATTERNS), L, V, generator=generator, dtype=torch.float64).log_softmax(-1)
    weights = torch.rand(V, generator=generator, dtype=torch.float64) + 0.2
    x = torch.tensor([[0, 3, 4]]).expand(len(PATTERNS), L)
    t = torch.full((len(PATTERNS),), 0.37, dtype=torch.float64)
    expected_weight = log_probs.exp() @ weights
    reweighted = log_probs + weights.log() - expected_weight.log()[..., None]
    ce = -reweighted.gather(2, x[..., None])[..., 0]
    main, velocity = nelbo_integrand(ce, PATTERNS, weights[x] / t[:, None], expected_weight / t[:, None])
    assert torch.allclose(genmd4_integrand(log_probs, x, PATTERNS, weights, t), main + velocity, atol=1e-12)
    equal = torch.full((V,), 0.7, dtype=torch.float64)
    ce = -log_probs.gather(2, x[..., None])[..., 0]
    fixed = PowerSchedule(torch.full((1, L), 0.7, dtype=torch.float64)).velocity(t)
    power, zero = nelbo_integrand(ce, PATTERNS, fixed, fixed)
    assert torch.allclose(genmd4_integrand(log_probs, x, PATTERNS, equal, t), power, atol=1e-12)
    assert (zero == 0).all()


def test_rloo_expectation_is_the_exact_gradient():
    t = 0.3
    exact = EXPONENT.clone().requires_grad_()
    expected_integrand(exact, t).backward()

    exponent = EXPONENT.clone().requires_grad_()
    loss, log_prob = integrands(exponent, t)
    first, second = zip(*itertools.product(range(len(PATTERNS)), repeat=2), strict=True)
    first, second = list(first), list(second)
    probability = (log_prob[first] + log_prob[second]).exp().detach()
    surrogate = (loss[first] + loss[second]) / 2 + rloo_surrogate(
        log_prob[first], log_prob[second], loss[first], loss[second]
    )
    (probability * surrogate).sum().backward()
    assert torch.allclose(exponent.grad, exact.grad, atol=1e-12)


def test_rloo_carries_no_gradient_into_the_losses():
    loss = torch.tensor([1.0, 2.0], requires_grad=True)
    log_prob = torch.tensor([-1.0, -2.0], requires_grad=True)
    rloo_surrogate(log_prob, log_prob * 2, loss, loss * 3).sum().backward()
    assert loss.grad is None and log_prob.grad is not None


def test_velocity_term_is_never_negative_and_zero_where_equal():
    velocity, hat = torch.rand(2, 100, 5, generator=generator, dtype=torch.float64) + 0.01
    masked = torch.rand(100, 5, generator=generator) < 0.5
    zeros = torch.zeros(100, 5)
    assert (nelbo_integrand(zeros, masked, velocity, hat)[1] >= 0).all()
    assert (nelbo_integrand(zeros, masked, velocity, velocity)[1] == 0).all()


def test_nothing_masked_costs_nothing():
    ce = torch.full((2, 8), torch.nan)
    none = torch.zeros(2, 8, dtype=torch.bool)
    exponent = torch.rand(2, 8, dtype=torch.float64).add(0.1).requires_grad_()
    velocity = PowerSchedule(exponent).velocity(torch.full((2,), 1e-9))
    main, term = nelbo_integrand(ce, none, velocity, velocity.detach() * 2)
    (main + term).sum().backward()
    assert (main == 0).all() and (term == 0).all() and (exponent.grad == 0).all()


@pytest.mark.parametrize("batch", [1, 2, 3, 7, 64, 96, 100, 1000])
def test_one_time_in_each_stratum_and_every_micro_batch_sees_all_of_time(batch):
    times = stratify(torch.full((batch,), 0.5, dtype=torch.float64), torch.arange(batch), batch)
    strata = np.floor(times.numpy() * batch).astype(int)
    assert sorted(strata) == list(range(batch))
    if batch >= 64:
        for part in times.split(batch // 4)[:4]:
            assert abs(part.mean() - 0.5) < 0.05


def test_nothing_lies_below_the_cut_of_large_exponents():
    schedule = PowerSchedule(torch.full((4, 3), 1000.0))
    t, weight = draw_time(schedule, keyed_uniforms(0, 0, 0, range(4), 2), "remainder", 1e-3)
    assert (t > 0).all() and (weight == 0).all()


def test_pinned_positions_are_never_padding():
    valid = torch.tensor([[True, False, True, False]]).expand(500, 4)
    uniforms = keyed_uniforms(0, 0, 0, range(500), 2)
    for schedule in (PowerSchedule(torch.rand(500, 4) + 0.1), WindowSchedule.left_to_right(4, 1e-3)):
        _, position, mass = draw_pinned(schedule, uniforms, 4, valid)
        assert set(position.flatten().tolist()) == {0, 2}
        assert torch.allclose(mass, torch.full((500,), 2.0, dtype=torch.float64))


def test_noise_is_a_function_of_its_key():
    whole = keyed_uniforms(3, 0, 7, range(10), 5)
    assert torch.equal(whole[4:7], keyed_uniforms(3, 0, 7, [4, 5, 6], 5))
    for other in (keyed_uniforms(4, 0, 7, range(10), 5), keyed_uniforms(3, 1, 7, range(10), 5)):
        assert not torch.equal(whole, other)
    assert not torch.equal(whole, keyed_uniforms(3, 0, 8, range(10), 5))
    assert len(torch.unique(whole)) == 50
