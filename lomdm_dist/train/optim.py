"""Two parameter groups, their learning rates, and the average of the weights."""

from collections.abc import Iterable

import torch
from torch import Tensor

from lomdm_dist.config import OptimConfig
from lomdm_dist.model import LoMDM
from lomdm_dist.ops.phase import phase
from lomdm_dist.parallel.layout import Piece


def make_optimizer(model: LoMDM, config: OptimConfig, fused: bool | None = None) -> torch.optim.AdamW:
    """AdamW; rate 0. The scheduler heads, where there are any, are a second group; the rest is the first.

    fused: one kernel, without memory of its own; by default where there is a GPU.
    """
    heads = [p for head in (model.phi, model.psi) if head is not None for p in head.parameters()]
    of_heads = {id(p) for p in heads}
    groups = [[p for p in model.parameters() if id(p) not in of_heads], heads]
    return torch.optim.AdamW(
        [{"params": group, "number": number} for number, group in enumerate(groups) if group],
        lr=0.0,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=torch.cuda.is_available() if fused is None else fused,
    )


def learning_rates(config: OptimConfig, step: int) -> list[float]:
    """The rates of backbone and heads in step 0, 1, ...: linear warm-up, then constant."""
    rates = (config.learning_rate, config.warmup_steps), (config.heads_learning_rate, config.heads_warmup)
    return [rate * min(1.0, (step + 1) / (steps + 1)) for rate, steps in rates]


def set_learning_rates(optimizer: torch.optim.AdamW, config: OptimConfig, step: int) -> None:
    """Those of the step, of each parameter group; without heads there is one group."""
    for group, rate in zip(optimizer.param_groups, learning_rates(config, step), strict=False):
        group["lr"] = rate


class WeightAverage:
    """Exponential moving average (EMA) of the float32 master weights, by name, sharded like them.

    The decay warms up: min(decay, (1 + n) / (10 + n)) after n updates.
    """

    def __init__(self, pieces: Iterable[Piece], decay: float):
        self.decay, self.updates = decay, 0
        self._masters: list[Tensor] = []
        self.averages: dict[str, Tensor] = {}
        for piece in pieces:
            self._masters.append(piece.master)
            self.averages[piece.name] = piece.master.clone()

    @phase("optimiser")
    def update(self) -> None:
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        if self._masters:  # a small model on many ranks leaves some without a part
            torch._foreach_lerp_(list(self.averages.values()), self._masters, 1 - decay)
        self.updates += 1
