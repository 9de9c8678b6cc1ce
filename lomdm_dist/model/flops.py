"""Floating-point operations of a training step: of all its matrix products, counted from the shapes.

A product of [n, k] with [k, m] is 2 n k m. Backwards there are two more of that size, or one where the
gradient ends. A test holds it to the count of torch's FlopCounterMode, to the last digit. One thing is not
counted as there: of causal attention what is needed, L (L + 1) / 2 pairs of tokens a sequence. Torch counts
all L^2, which simple kernels compute to hide half of them.

These are operations that a step needs: recomputation is not among them, nor is what is no matrix product
(norms, activations, softmax, the embedding's lookup, AdamW). Only predicted positions are projected.
"""

import math

from lomdm_dist.config import Config, ModelConfig, Objective
from lomdm_dist.model.backbone import FREQUENCIES, MLP_RATIO
from lomdm_dist.model.lomdm import GAMMA_MAX, GAMMA_MIN


def step_flops(config: Config, tokens: int, pairs: int, predicted: float, micro_batches: float) -> float:
    """Forward and backward of a step, of all ranks together.

    tokens         clean ones, without padding
    pairs          of tokens that see each other, in the clean text; `seen_pairs` of each sequence
    predicted      positions projected onto the vocabulary, of all samples; all where `kernels.loss` is plain
    micro_batches  in all: each has a few products of one row, of the adaLN condition
    """
    model, objective = config.model, config.objective
    passes, samples = micro_batches * config.passes[0], math.prod(config.passes)
    flops = 3 * _blocks(model, model.blocks, samples * tokens, samples * pairs)
    flops += _conditions(model, model.blocks, passes, 3)
    flops += (
        3
        * 2
        * (model.width * model.vocab_size * predicted + 2 * model.condition_width * model.width * passes)
    )
    if objective.name == "genmd4":  # <w, p> of each predicted position, and its gradient by w
        flops += 2 * 2 * model.vocab_size * predicted
    if objective.name == "lomdm":
        flops += _head(config, samples * tokens, samples * pairs, passes)
        flops += _head(config, tokens, pairs, micro_batches)
        directions = 1 if objective.stop_gradient else 3  # of the features that phi reads
        flops += directions * _blocks(model, model.blocks, tokens, pairs)
        flops += _conditions(model, model.blocks, micro_batches, directions)
    return flops


def seen_pairs(length: int, causal: bool) -> int:
    """Pairs of tokens of a sequence of which the first sees the second."""
    return length * (length + 1) // 2 if causal else length**2


def predicted_share(objective: Objective, length: float = math.inf) -> float:
    """Expected share of positions that are projected onto the vocabulary; exponents as at the start."""
    if objective.name == "ar":
        return 1.0
    if objective.time != "uniform" or objective.name in ("window", "genmd4"):
        certain = 1 if objective.time == "pinned" else 0
        return 0.5 + certain / (2 * length)
    if objective.name == "lomdm" and objective.schedule == "polynomial":
        # the mean over t of sigmoid(gamma), gamma linear
        return (math.log1p(math.exp(GAMMA_MAX)) - math.log1p(math.exp(GAMMA_MIN))) / (GAMMA_MAX - GAMMA_MIN)
    softmax = objective.name == "lomdm" and objective.normalize == "softmax"
    return 1 / (1 + objective.c1 + (objective.c2 / length if softmax else 0.0))


def step_flops_a_sequence(config: Config, every_position: bool = False) -> float:
    """Forward and backward of one clean sequence without padding, all its samples included; expected.

    every_position: all are projected onto the vocabulary, as `kernels.loss: plain` does.
    """
    length, objective = config.model.length, config.objective
    share = 1.0 if every_position else predicted_share(objective, length)
    predicted = math.prod(config.passes) * share * length
    micro = 1 if config.train.micro_batch == "auto" else config.train.micro_batch
    return step_flops(config, length, seen_pairs(length, objective.name == "ar"), predicted, 1 / micro)


def _blocks(model: ModelConfig, blocks: int, tokens: float, pairs: float) -> float:
    """Forward: projections, MLP, and the two products of attention."""
    return blocks * (2 * model.width**2 * (4 + 2 * MLP_RATIO) * tokens + 4 * model.width * pairs)


def _conditions(model: ModelConfig, blocks: int, passes: float, directions: int) -> float:
    """The adaLN condition of each pass and its blocks' modulation, a row each. directions 1: forward only."""
    condition = model.condition_width
    of_constant = 2 * FREQUENCIES * condition * min(2, directions)  # which has no gradient
    return passes * (of_constant + directions * 2 * condition * (condition + blocks * 6 * model.width))


def _head(config: Config, tokens: float, pairs: float, passes: float) -> float:
    """phi or psi: their block, if they have one, and the linear layer to the schedule's numbers."""
    model, objective = config.model, config.objective
    whole = 2 if objective.stop_gradient else 3  # the gradient ends at the features, and at the condition
    linear = 2 * model.width * (1 if objective.schedule == "power" else 3) * tokens
    if objective.head == "linear":
        return whole * linear
    modulation = 2 * model.condition_width * 6 * model.width * passes
    return 3 * (_blocks(model, 1, tokens, pairs) + linear) + whole * modulation
