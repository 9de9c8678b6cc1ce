"""Floating-point operations of a training step, counted from the shapes.

A matrix product of [n, k] with [k, m] is 2 n k m. Attention is bidirectional: no causal discount.
The backward pass costs twice the forward. Only masked positions are projected.
"""

from lomdm_dist.config import Config, ModelConfig, ObjectiveConfig
from lomdm_dist.model.backbone import MLP_RATIO


def block_flops(model: ModelConfig) -> int:
    """Forward of one block, a token: projections, MLP, and the two products of attention."""
    matrices = model.width**2 * (4 + 2 * MLP_RATIO)
    return 2 * matrices + 4 * model.width * model.length


def masked_share(objective: ObjectiveConfig) -> float:
    """Expected share of masked positions, with every exponent at c1."""
    if objective.time == "uniform":
        return 1 / (1 + objective.c1)
    return 0.5


def step_flops_a_sequence(config: Config) -> float:
    """Forward and backward of one clean sequence in a training step, all its samples included."""
    model, objective = config.model, config.objective
    block, length = block_flops(model), model.length
    projection = 2 * model.width * model.vocab_size * masked_share(objective)
    backbone = model.blocks * block
    flops = objective.samples * 3 * (backbone + projection) * length
    if objective.learned:
        head = block + 2 * model.width
        psi, phi, features = objective.samples * 3 * head, 3 * head, backbone
        flops += (psi + phi + features) * length
    return flops
