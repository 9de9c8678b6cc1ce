"""The mathematics of order-expressive masked diffusion (docs/design.md, sections 3 and 10).

Pure tensor functions: no network, no rank, no file. Shapes: B sequences, L positions. Times and
everything of shape [B, L] computed from them are float64, because u**(1/e) leaves float32's range
at e = 0.05 and these numbers cost nothing beside the network.
"""

from lomdm_dist.process.noise import keyed_uniforms
from lomdm_dist.process.objective import corrupt, genmd4_integrand, log_q, nelbo_integrand, rloo_surrogate
from lomdm_dist.process.schedules import (
    PolynomialSchedule,
    PowerSchedule,
    WindowSchedule,
    norm_sig,
    softmax_weights,
)
from lomdm_dist.process.time import draw_pinned, draw_time, pinned_weight, sample_time, stratify

__all__ = [
    "PolynomialSchedule",
    "PowerSchedule",
    "WindowSchedule",
    "corrupt",
    "draw_pinned",
    "draw_time",
    "genmd4_integrand",
    "keyed_uniforms",
    "log_q",
    "nelbo_integrand",
    "norm_sig",
    "pinned_weight",
    "rloo_surrogate",
    "sample_time",
    "softmax_weights",
    "stratify",
]
