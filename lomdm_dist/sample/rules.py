"""Deterministic orders: which positions a step reveals. The sampler's, and its likelihood's (`eval rule`)."""

import torch
from torch import Tensor

from lomdm_dist.config import Objective
from lomdm_dist.errors import UserError
from lomdm_dist.sample.look import Look

DECIMALS = 6  # of a score: what is equal but for float32's rounding is a tie, and goes to the left


def check_rule(rule: str, objective: Objective) -> None:
    """UserError where an objective has no such order."""
    if objective.name == "ar" and rule not in ("random", "left_to_right"):
        raise UserError(f"sampler.rule={rule}: an ar model can only go from left to right")
    if rule == "exponent" and not (objective.pace or objective.name == "genmd4"):
        raise UserError(
            f"sampler.rule=exponent: {objective.name}"
            f"{' with a polynomial schedule' if objective.name == 'lomdm' else ''} has no learned exponents; "
            "take confidence or left_to_right"
        )


def choose(look: Look, rule: str, masked: Tensor, steps_left: Tensor | int) -> Tensor:
    """The positions that a step reveals, [B, L] bool, of those masked.

    confidence     those where the network is surest of a token: its largest probability
    exponent       those of the largest reverse exponents; GenMD4's are means under the network
    left_to_right  the first ones

    The steps left (of all, or of each sequence [B]) share out what is masked as evenly as can be, the
    larger shares first: of 5 positions 3 steps reveal 2, 2 and 1, and 8 steps one each in the first five.
    Ties go to the left.
    """
    count = -(-masked.sum(dim=1) // steps_left)
    score = _score(look, rule).round(decimals=DECIMALS).masked_fill(~masked, -torch.inf)
    rank = score.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return masked & (rank < count[:, None])


def _score(look: Look, rule: str) -> Tensor:
    """[B, L] float64: larger is revealed earlier."""
    if rule == "confidence":
        return look.confidence()
    if rule == "exponent":
        return look.exponents()
    length = look.z.shape[1]
    return -torch.arange(length, dtype=torch.float64, device=look.z.device).expand(look.z.shape)
