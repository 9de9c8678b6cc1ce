"""The DiT backbone of SEDD and MDLM, as its public trainers build it.

Pre-norm blocks with adaLN modulation, rotary positions, bidirectional attention (causal for the
autoregressive baseline). It does not depend on time: the adaLN condition is present, but its input
is a constant.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lomdm_dist.config import ModelConfig
from lomdm_dist.ops.cross_entropy import linear_cross_entropy, linear_cross_entropy_and_mean, subs_logits

MLP_RATIO = 4
FREQUENCIES = 256  # width of the time embedding that the condition starts from
ROTARY_BASE = 10_000.0


class LayerNorm(nn.Module):
    """Weight and no bias; computed in float32 whatever the input's dtype."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return (F.layer_norm(x.float(), x.shape[-1:]) * self.weight.float()).to(x.dtype)


class Condition(nn.Module):
    """The adaLN condition at time 0, the only time there is: [1, condition_width].

    The sinusoidal embedding of 0 is cos(0) = 1 for its first half and sin(0) = 0 for the second.
    """

    def __init__(self, condition_width: int):
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(FREQUENCIES, condition_width),
            nn.SiLU(),
            nn.Linear(condition_width, condition_width),
        )

    def forward(self) -> Tensor:
        weight = self.mlp[0].weight
        embedding = torch.zeros(1, FREQUENCIES, dtype=weight.dtype, device=weight.device)
        embedding[:, : FREQUENCIES // 2] = 1
        return F.silu(self.mlp(embedding))


def rotary_table(length: int, head_width: int, device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, each [L, head_width / 2], float32."""
    exponents = torch.arange(0, head_width, 2, device=device, dtype=torch.float32) / head_width
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), ROTARY_BASE**-exponents)
    return angles.cos(), angles.sin()


def rotate(x_BHLd: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the pairs (i, i + d/2) of each head by the angle of their position."""
    cos, sin = rotary
    first, second = x_BHLd.float().chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(x_BHLd.dtype)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale) + shift


def zero_linear(width_in: int, width_out: int) -> nn.Linear:
    """A linear layer that starts at zero."""
    linear = nn.Linear(width_in, width_out)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


class Block(nn.Module):
    """One transformer block. Its adaLN gates start at zero, so a new block is the identity."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        width = config.width
        self.heads, self.dropout = config.heads, config.dropout
        self.norm1 = LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.norm2 = LayerNorm(width)
        self.mlp_in = nn.Linear(width, MLP_RATIO * width)
        self.mlp_out = nn.Linear(MLP_RATIO * width, width)
        self.modulation = zero_linear(config.condition_width, 6 * width)

    def attention(self, x: Tensor, rotary, attend: dict) -> Tensor:
        B, L, D = x.shape
        q, k, v = self.qkv(x).view(B, L, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, rotary), rotate(k, rotary)
        mixed = F.scaled_dot_product_attention(q, k, v, **attend)
        return self.attention_out(mixed.transpose(1, 2).reshape(B, L, D))

    def mlp(self, x: Tensor) -> Tensor:
        return self.mlp_out(F.gelu(self.mlp_in(x), approximate="tanh"))

    def forward(self, x: Tensor, condition: Tensor, rotary, attend: dict) -> Tensor:
        """x [B, L, D] -> [B, L, D]; attend: who sees whom, in the words of torch's attention."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition).chunk(6, dim=-1)
        mixed = self.attention(modulate(self.norm1(x), shift1, scale1), rotary, attend)
        x = x + gate1 * F.dropout(mixed, self.dropout, self.training)
        mixed = self.mlp(modulate(self.norm2(x), shift2, scale2))
        return x + gate2 * F.dropout(mixed, self.dropout, self.training)


class Output(nn.Module):
    """Final norm and projection onto the vocabulary. Starts at zero: a new model is uniform."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.mask_id = config.mask_id
        self.norm = LayerNorm(config.width)
        self.modulation = zero_linear(config.condition_width, 2 * config.width)
        # Parameters of this very module, not of a child: its forward reads them, and ZeRO 3 gathers
        # a module's own parameters only.
        self.weight = nn.Parameter(torch.zeros(config.vocab_size, config.width))
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(
        self, x: Tensor, condition: Tensor, targets: Tensor | None = None, values: Tensor | None = None
    ):
        """Features [..., D] -> logits [..., V], float32; with targets [N], features [N, D] -> CE [N].

        With values [V] besides, CE and the mean of the values under the network, each [N].
        """
        shift, scale = self.modulation(condition).chunk(2, dim=-1)
        x = modulate(self.norm(x), shift, scale)
        if targets is None:
            return subs_logits(x, self.weight, self.bias, self.mask_id)
        if values is None:
            return linear_cross_entropy(x, self.weight, self.bias, targets, self.mask_id)
        return linear_cross_entropy_and_mean(x, self.weight, self.bias, targets, self.mask_id, values)


def attention(valid: Tensor | None, documents: Tensor | None, causal: bool) -> dict:
    """Who sees whom, in the words of torch's attention.

    A causal model needs no `valid`: padding ends a sequence, and nothing looks ahead. Everyone sees
    itself, padding too: a position that sees nothing would be nan.
    """
    if documents is None:
        if causal:
            return {"is_causal": True}
        return {} if valid is None else {"attn_mask": valid[:, None, None, :]}
    sees = documents[:, :, None] == documents[:, None, :]
    if causal:
        sees = sees.tril()
    elif valid is not None:
        itself = torch.eye(valid.shape[1], dtype=torch.bool, device=valid.device)
        sees = (sees & valid[:, None, :]) | itself
    return {"attn_mask": sees[:, None]}


class Backbone(nn.Module):
    """Token ids -> features [B, L, D] of the last block; `output` turns them into logits."""

    def __init__(self, config: ModelConfig, causal: bool = False):
        super().__init__()
        self.head_width, self.causal = config.width // config.heads, causal
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        nn.init.kaiming_uniform_(self.embedding.weight, a=math.sqrt(5))
        self.condition = Condition(config.condition_width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))
        self.output = Output(config)

    def context(self, valid: Tensor | None, length: int, documents: Tensor | None = None) -> tuple:
        """What every block of a forward pass shares: condition, rotary table, who sees whom.

        valid [B, L]: who is seen at all; documents [B, L]: numbers, equal for those who see each other.
        """
        condition = self.condition()
        rotary = rotary_table(length, self.head_width, condition.device)
        return condition, rotary, attention(valid, documents, self.causal)

    def forward(self, tokens: Tensor, context: tuple) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, *context)
        return x
