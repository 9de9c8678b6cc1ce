"""Samples of a table model against its exact distribution, all V**L texts."""

import itertools

import pytest
import torch
from scipy import stats

from lomdm_dist.config import SamplerConfig
from tests.sample.test_ancestral import Draws, one_step
from tests.table import CODES, FAMILY, MASK, TEXTS, L, V, table_model

# windows so narrow that nothing happens outside them, and one case more with an eps of their own
CASES = {n: o | ({"window_eps": 1e-9} if o["name"] == "window" else {}) for n, o in FAMILY.items()}
NOTHING = int((torch.full((L,), MASK) * CODES).sum())
CLEAN = list(itertools.product(range(V), repeat=L))


def network(model):
    """Of all texts: probabilities of the tokens [texts, L, V], and the reverse schedule."""
    features, reverse, condition = model.see(TEXTS)
    return model.backbone.output(features, condition).double().softmax(-1)[..., :V], reverse


def jump_chain(model, name: str, start: int = NOTHING) -> dict[tuple, float]:
    """Where the odds of what is revealed next do not depend on time: a sum over all orders from `start`."""
    probs, reverse = network(model)
    if name in ("left to right", "permutation", "blocks"):
        rank = torch.tensor({"left to right": [0, 1, 2], "permutation": [1, 2, 0], "blocks": [0, 0, 1]}[name])
        masked = TEXTS == MASK
        first = torch.where(masked, rank, L).amin(dim=1, keepdim=True)
        odds = ((rank == first) & masked).double()[..., None] * probs
    elif name == "genmd4":
        odds = probs * model.token_exponents().double()[:V]
    else:
        odds = reverse.exponent.expand(TEXTS.shape)[..., None] * probs

    chance = torch.zeros(len(TEXTS), dtype=torch.float64)
    chance[start] = 1
    for code in sorted(range(len(TEXTS)), key=lambda c: -int((TEXTS[c] == MASK).sum())):
        open_positions = torch.nonzero(TEXTS[code] == MASK)[:, 0]
        total = odds[code][open_positions].sum()
        for i, v in itertools.product(open_positions.tolist(), range(V)):
            chance[code + (v - MASK) * CODES[i]] += chance[code] * odds[code, i, v] / total
    return {text: chance[int((torch.tensor(text) * CODES).sum())].item() for text in CLEAN}


def master_equation(model) -> dict[tuple, float]:
    """The polynomial schedule: the jump at time 1, then Runge-Kutta from 1 to 0."""
    probs, reverse = network(model)
    chance = torch.zeros(len(TEXTS), dtype=torch.float64)
    chance[NOTHING] = 1
    moves = [
        (i, v, torch.nonzero(TEXTS[:, i] == MASK)[:, 0]) for i, v in itertools.product(range(L), range(V))
    ]

    def jump(chance):
        reveal = reverse.log_keep_prob(torch.ones(len(TEXTS))).exp()[NOTHING]
        for i in range(L):  # independent positions, all seen from nothing
            source = moves[i * V][2]
            after = chance.clone()
            after[source] *= 1 - reveal[i]
            for v in range(V):
                after[source + (v - MASK) * CODES[i]] += chance[source] * reveal[i] * probs[NOTHING, i, v]
            chance = after
        return chance

    def change(chance, t):
        rate = reverse.velocity(torch.full((len(TEXTS),), t, dtype=torch.float64))
        flow = torch.zeros_like(chance)
        for i, v, source in moves:
            moved = chance[source] * rate[source, i] * probs[source, i, v]
            flow[source] -= moved
            flow[source + (v - MASK) * CODES[i]] += moved
        return flow

    chance, h = jump(chance), 1 / 400
    for k in range(400):
        t = 1 - k * h
        one = change(chance, t)
        two = change(chance + h / 2 * one, t - h / 2)
        three = change(chance + h / 2 * two, t - h / 2)
        four = change(chance + h * three, t - h)
        chance = chance + h / 6 * (one + 2 * two + 2 * three + four)
    return {text: chance[int((torch.tensor(text) * CODES).sum())].item() for text in CLEAN}


def chi_square_p(texts: torch.Tensor, exact: dict[tuple, float]) -> float:
    assert sum(exact.values()) == pytest.approx(1, abs=1e-4)
    exact = {text: p for text, p in exact.items() if p > 0}
    counts = torch.bincount((texts * CODES).sum(dim=1), minlength=len(TEXTS))
    observed = [int(counts[int((torch.tensor(text) * CODES).sum())]) for text in exact]
    expected = [p * len(texts) / sum(exact.values()) for p in exact.values()]
    assert sum(observed) == len(texts) and min(expected) > 3
    return stats.chisquare(observed, expected).pvalue


def draw(model, count: int, steps: int, start: int = NOTHING, **settings) -> torch.Tensor:
    z, t, noise = TEXTS[start].repeat(count, 1), torch.ones(count, dtype=torch.float64), Draws(count, 5)
    settings = SamplerConfig(**settings)
    with torch.no_grad():
        for k in range(steps):
            z, t = one_step(model, z, t, k, steps, noise, settings)
    return z


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("count", "steps"), [(20_000, 300), pytest.param(200_000, 1000, marks=pytest.mark.slow)]
)
def test_samples_have_the_exact_distribution(name, count, steps):
    model = table_model(CASES[name], seed=2)
    with torch.no_grad():
        exact = master_equation(model) if name == "polynomial" else jump_chain(model, name)
    assert chi_square_p(draw(model, count, steps), exact) > 1e-3
    others = table_model(CASES[name], seed=3)
    assert chi_square_p(draw(others, 20_000, 50), exact) < 1e-6


@pytest.mark.parametrize(
    "name", ["lomdm", "genmd4", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mdlm", "blocks"))]
)
@pytest.mark.parametrize(
    ("settings", "start"),
    [
        ({"grid": "even"}, NOTHING),
        ({"dtype": "float32"}, NOTHING),  # so few tokens have no tail to lose
        ({}, int((torch.tensor([MASK, 2, MASK]) * CODES).sum())),  # a gap on both sides of a given token
    ],
)
def test_grids_float32_and_infilling_have_it_too(name, settings, start):
    model = table_model(CASES[name], seed=2)
    with torch.no_grad():
        exact = jump_chain(model, name, start)
        assert chi_square_p(draw(model, 10_000, 100, start, **settings), exact) > 1e-3


def test_even_steps_reveal_evenly_where_uniform_steps_leave_half_to_the_last():
    """With exponents of 0.1 uniform steps of time reveal 8% in 15 of 16 steps."""
    model = table_model({"name": "lomdm", "c1": 0.1, "c2": 0.0})
    revealed = {}
    for grid in ("uniform", "even"):
        z, t, noise = torch.full((4000, L), MASK), torch.ones(4000, dtype=torch.float64), Draws(4000, 5)
        with torch.no_grad():
            for k in range(8):
                z, t = one_step(model, z, t, k, 16, noise, SamplerConfig(grid=grid))
        revealed[grid] = (z != MASK).double().mean().item()
    assert revealed["even"] == pytest.approx(0.5, abs=0.02)
    assert revealed["uniform"] == pytest.approx(1 - 0.5**0.1, abs=0.02)


def test_even_steps_count_what_a_schedule_reveals_before_time_one():
    """Of a polynomial 0.7% is clean at time 1: the first of 100 steps gives 1%, not 1.7%."""
    model, count = table_model(CASES["polynomial"]), 100_000
    z, t = torch.full((count, L), MASK), torch.ones(count, dtype=torch.float64)
    with torch.no_grad():
        z, _ = one_step(model, z, t, 0, 100, Draws(count, 5), SamplerConfig(grid="even"))
    assert (z != MASK).double().mean().item() == pytest.approx(0.01, abs=6e-4)
