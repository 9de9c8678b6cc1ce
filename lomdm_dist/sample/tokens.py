"""Drawing tokens from logits."""

import torch
from torch import Tensor

from lomdm_dist.config import SamplerConfig


def restrict(logits: Tensor, settings: SamplerConfig, never: tuple[int, ...] = ()) -> Tensor:
    """Temperature and top-p: logits [N, V] -> [N, V], float64, -inf where a token is not to be drawn.

    `never` lists ids that are not text (padding). The most probable token always stays.
    """
    logits = logits.double()
    logits[:, list(never)] = -torch.inf
    if settings.temperature != 1:
        logits = (logits - logits.amax(dim=1, keepdim=True)) / settings.temperature
    if settings.top_p < 1:
        ordered, order = logits.sort(dim=1, descending=True)
        probs = ordered.softmax(dim=1)
        outside = probs.cumsum(dim=1) - probs >= settings.top_p
        logits = logits.masked_fill(torch.zeros_like(outside).scatter(1, order, outside), -torch.inf)
    return logits


def draw_tokens(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Exact draws: logits [N, V], uniforms [N] -> ids [N], by the inverse of the distribution in float64.

    float32 noise would cut the distribution's tail, which lowers the temperature without saying so.
    """
    cumulative = logits.double().softmax(dim=1).cumsum(dim=1)
    cumulative = cumulative / cumulative[:, -1:]  # ends at 1, so a uniform below 1 always lands
    return torch.searchsorted(cumulative, uniforms[:, None].contiguous(), right=True)[:, 0]


def race_float32(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The draw of older trainers: argmax of weights / exponential noise, all of it in float32.

    weights [N, K] float32, not normalised; uniforms [N, K] float32 -> [N]. float32 has no uniform
    within 6e-8 of 1, hence no noise below it, so an unlikely outcome can hardly win: it is drawn
    too seldom. Exists to reproduce old tables.
    """
    noise = 1e-10 - (uniforms + 1e-10).log()
    return (weights / noise).argmax(dim=1)
