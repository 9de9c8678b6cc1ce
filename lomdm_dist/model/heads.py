"""The scheduler heads: from features to one logit a position, whose NormSig is the exponent."""

import torch
from torch import Tensor, nn

from lomdm_dist.config import ModelConfig
from lomdm_dist.model.backbone import Block


class SchedulerHead(nn.Module):
    """One more block, then one linear layer to a scalar a position (paper: phi and psi).

    It starts at zero, so a new LoMDM has the exponent c1 everywhere. It is computed
    in float32: bf16 would leave steps of half a percent in the exponents.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.block = Block(config)
        self.weight = nn.Parameter(torch.zeros(config.width))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, features: Tensor, context: tuple) -> Tensor:
        """features [B, L, D] -> logits g [B, L], float32."""
        hidden = self.block(features, *context).float()
        return hidden @ self.weight.float() + self.bias.float()
