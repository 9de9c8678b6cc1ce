"""What learns an order: heads on the backbone's features (LoMDM), an exponent a token (GenMD4)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lomdm_dist.config import LomdmObjective, ModelConfig
from lomdm_dist.model.backbone import Block, Context
from lomdm_dist.ops.precision import wide


class SchedulerHead(nn.Module):
    """One more block, then one linear layer to the schedule of a position (paper: phi and psi).

    A power schedule has one output, the logit of its exponent, a polynomial one three. All start
    at zero: a new LoMDM has the same schedule everywhere. `head: linear` leaves the block out. The
    outputs are float32: bf16 would leave steps of half a percent in the exponents.
    """

    def __init__(self, config: ModelConfig, objective: LomdmObjective):
        super().__init__()
        self.block = Block(config, config.blocks) if objective.head == "transformer" else None
        outputs = 1 if objective.schedule == "power" else 3
        self.weight = nn.Parameter(torch.empty(outputs, config.width))
        self.bias = nn.Parameter(torch.empty(outputs))

    def forward(self, features: Tensor, context: Context) -> Tensor:
        """features [N, D] -> [B, L, outputs], float32; 0 at padding."""
        hidden = features if self.block is None else self.block(features, *context[:4])
        outputs = F.linear(wide(hidden), wide(self.weight), wide(self.bias))
        return context.spread(outputs).clone()  # FSDP2 warns of views, and this is small


class TokenExponents(nn.Module):
    """GenMD4's exponents: w_v = softplus(theta_v), one a vocabulary entry, 1 at the start."""

    def __init__(self, vocab_size: int):
        super().__init__()
        self.theta = nn.Parameter(torch.empty(vocab_size))

    def forward(self) -> Tensor:
        """w [V], float32."""
        return F.softplus(wide(self.theta))
