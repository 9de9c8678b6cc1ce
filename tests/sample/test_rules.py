"""Deterministic orders: which positions a step reveals."""

import pytest
import torch

from lomdm_dist.config import OBJECTIVES, SamplerConfig
from lomdm_dist.errors import UserError
from lomdm_dist.sample import sample
from lomdm_dist.sample.look import Look
from lomdm_dist.sample.rules import check_rule, choose
from tests.sample.test_reuse import GAPS, MASK, L, random_model

RULES = ("confidence", "exponent", "left_to_right")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("steps", "shares"), [(1, [10]), (3, [4, 3, 3]), (4, [3, 3, 2, 2]), (10, [1] * 10), (25, [1] * 10)]
)
def test_steps_share_out_the_positions_evenly(rule, steps, shares):
    found = sample(random_model("lomdm"), 3, L, steps, 0, settings=SamplerConfig(rule=rule), batch=2)
    for row in found.revealed_at:
        assert row.unique(return_counts=True)[1].tolist() == shares
        assert row.max() == len(shares)
    assert found.network_calls == len(shares) and found.steps == steps


@torch.no_grad()
@pytest.mark.parametrize("name", ["lomdm", "genmd4", "mdlm"])
def test_each_step_reveals_what_the_network_ranks_first(name):
    """The whole trajectory, against the definition written out for one sequence at a time."""
    model = random_model(name)
    for rule in ("confidence", "exponent") if name != "mdlm" else ("confidence",):
        settings = SamplerConfig(rule=rule, temperature=20)
        found = sample(model, 3, L, 4, 1, settings=settings, given=GAPS, batch=3)
        for ids, at in zip(found.token_ids, found.revealed_at, strict=True):
            for k in range(1, int(at.max()) + 1):
                before = torch.where(at < k, ids, MASK)
                features, reverse, condition = model.see(before[None])
                probs = (model.backbone.output(features, condition)[0].double() / 20).softmax(dim=-1)
                if rule == "confidence":
                    score = probs.amax(dim=-1)
                elif name == "genmd4":
                    score = probs @ model.token_exponents().double()
                else:
                    score = reverse.exponent[0]
                later = score[at > k]
                assert not len(later) or score[at == k].min() > later.max() - 1e-6
        assert rule == "exponent" or score.std() > 0.01


def test_ties_go_to_the_left_and_rounding_is_a_tie():
    """All exponents of a new model are equal, but for the last digits of their mean."""
    z = torch.tensor([[MASK, 1, MASK, MASK, MASK, MASK, 2, MASK, MASK, MASK]])
    look = Look(random_model("lomdm"), z)
    noise = 1e-9 * torch.randn(1, L, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    look.exponents = lambda: 0.7 + noise
    assert choose(look, "exponent", look.masked, 2)[0].nonzero()[:, 0].tolist() == [0, 2, 3, 4]


@pytest.mark.parametrize(
    ("objective", "rule", "message"),
    [
        ({"name": "mdlm"}, "exponent", "mdlm has no learned exponents"),
        ({"name": "window"}, "exponent", "window has no learned exponents"),
        ({"name": "lomdm", "schedule": "polynomial"}, "exponent", "polynomial schedule has no learned"),
        ({"name": "ar"}, "confidence", "an ar model can only go from left to right"),
    ],
)
def test_an_order_that_is_not_there_is_refused(objective, rule, message):
    with pytest.raises(UserError, match=message):
        check_rule(rule, OBJECTIVES[objective["name"]](**objective))
    check_rule("left_to_right", OBJECTIVES[objective["name"]](**objective))


def test_a_rule_has_no_times():
    with pytest.raises(ValueError, match="no times to reveal at"):
        SamplerConfig(rule="confidence", grid="even")
    with pytest.raises(ValueError, match="no times to reveal at"):
        SamplerConfig(rule="confidence", dtype="float32")
