"""Floating-point operations of a training step, counted from the shapes.

A matrix product of [n, k] with [k, m] is 2 n k m. Attention is bidirectional, or causal (half of
it) for `ar`. The backward pass costs twice the forward. Only predicted positions are projected.
"""

import math

from lomdm_dist.config import Config, ModelConfig, Objective
from lomdm_dist.model.backbone import MLP_RATIO
from lomdm_dist.model.lomdm import GAMMA_MAX, GAMMA_MIN


def block_flops(model: ModelConfig, causal: bool = False) -> int:
    """Forward of one block, a token: projections, MLP, and the two products of attention."""
    matrices = model.width**2 * (4 + 2 * MLP_RATIO)
    seen = model.length // 2 if causal else model.length
    return 2 * matrices + 4 * model.width * seen


def predicted_share(objective: Objective) -> float:
    """Expected share of positions that are projected onto the vocabulary; exponents as at the start."""
    if objective.name == "ar":
        return 1.0
    if objective.time != "uniform" or objective.name in ("window", "genmd4"):
        return 0.5
    if objective.name == "lomdm" and objective.schedule == "polynomial":
        # the mean over t of sigmoid(gamma), gamma linear
        return (math.log1p(math.exp(GAMMA_MAX)) - math.log1p(math.exp(GAMMA_MIN))) / (GAMMA_MAX - GAMMA_MIN)
    return 1 / (1 + objective.c1)


def step_flops_a_sequence(config: Config, every_position: bool = False) -> float:
    """Forward and backward of one clean sequence in a training step, all its samples included.

    every_position: all are projected onto the vocabulary, as `kernels.loss: plain` does.
    """
    model, objective = config.model, config.objective
    length, passes = model.length, max(1, objective.samples)
    backbone = model.blocks * block_flops(model, causal=objective.name == "ar")
    share = 1.0 if every_position else predicted_share(objective)
    projection = 2 * model.width * model.vocab_size * share
    flops = passes * 3 * (backbone + projection) * length
    if objective.name == "lomdm":
        outputs = 1 if objective.schedule == "power" else 3
        head = 2 * model.width * outputs + (block_flops(model) if objective.head == "transformer" else 0)
        psi, phi = passes * 3 * head, 3 * head
        features = backbone if objective.stop_gradient else 3 * backbone
        flops += (psi + phi + features) * length
    return flops
