"""The DiT backbone of SEDD and MDLM, as its public trainers build it.

Pre-norm blocks with adaLN modulation, rotary positions, bidirectional attention (causal for the
autoregressive baseline). It does not depend on time: the adaLN condition is present, but its input
is a constant, so it is computed once a pass, not once a token.

Between blocks the tokens of all sequences lie end to end, [N, D] with N = B L. Nothing here knows of
processes: `parallel/tensor.py` splits a model from outside, and then a block may hold some of the
heads, or be given some of the tokens.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lomdm_dist.config import ModelConfig
from lomdm_dist.ops.cross_entropy import linear_cross_entropy, subs_logits
from lomdm_dist.ops.dropout import residual_dropout, row_keys

MLP_RATIO = 4
FREQUENCIES = 256  # width of the time embedding that the condition starts from
ROTARY_BASE = 10_000.0


class LayerNorm(nn.Module):
    """Weight and no bias; computed in float32 whatever the input's dtype."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def scale(self) -> Tensor:
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        return (F.layer_norm(x.float(), x.shape[-1:]) * self.scale().float()).to(x.dtype)


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


class Context(NamedTuple):
    """What all blocks of a forward pass share."""

    condition: Tensor  # [1, condition_width]
    rotary: tuple[Tensor, Tensor]  # each [L, head_width / 2]
    attend: dict  # who sees whom, in the words of torch's attention
    rows: Tensor | None  # [N] keys of dropout; None: torch's own random numbers


class Block(nn.Module):
    """One transformer block, `number` of its pass. The adaLN gates start at zero: it is the identity."""

    def __init__(self, config: ModelConfig, number: int):
        super().__init__()
        width = config.width
        self.head_width, self.dropout, self.number = width // config.heads, config.dropout, number
        self.norm1 = LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.norm2 = LayerNorm(width)
        self.mlp_in = nn.Linear(width, MLP_RATIO * width)
        self.mlp_out = nn.Linear(MLP_RATIO * width, width)
        self.modulation = nn.Linear(config.condition_width, 6 * width)

    def attention(self, x: Tensor, rotary, attend: dict) -> Tensor:
        length = len(rotary[0])
        qkv = self.qkv(x).unflatten(0, (-1, length)).unflatten(-1, (3, -1, self.head_width))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [B, heads, L, head_width]
        q, k = rotate(q, rotary), rotate(k, rotary)
        mixed = F.scaled_dot_product_attention(q, k, v, **attend)
        return self.attention_out(mixed.transpose(1, 2).flatten(2).flatten(0, 1))

    def mlp(self, x: Tensor) -> Tensor:
        return self.mlp_out(F.gelu(self.mlp_in(x), approximate="tanh"))

    def add(self, x: Tensor, mixed: Tensor, gate: Tensor, rows: Tensor | None, branch: int) -> Tensor:
        if not (self.training and self.dropout):
            return x + gate * mixed
        return residual_dropout(x, mixed, gate, self.dropout, rows, 2 * self.number + branch)

    def forward(self, x: Tensor, condition: Tensor, rotary, attend: dict, rows: Tensor | None) -> Tensor:
        """x [N, D] -> [N, D]; the rest is a `Context`."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition).chunk(6, dim=-1)
        mixed = self.attention(modulate(self.norm1(x), shift1, scale1), rotary, attend)
        x = self.add(x, mixed, gate1, rows, 0)
        mixed = self.mlp(modulate(self.norm2(x), shift2, scale2))
        return self.add(x, mixed, gate2, rows, 1)


class Output(nn.Module):
    """Final norm and projection onto the vocabulary. Starts at zero: a new model is uniform."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.mask_id, self.vocab_size = config.mask_id, config.vocab_size
        self.vocabulary = None  # the process group that a split vocabulary is spread over
        self.norm = LayerNorm(config.width)
        self.modulation = nn.Linear(config.condition_width, 2 * config.width)
        # Parameters of this very module, not of a child: its forward reads them, and ZeRO 3 gathers
        # a module's own parameters only.
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.width))
        self.bias = nn.Parameter(torch.empty(config.vocab_size))

    def forward(
        self, x: Tensor, condition: Tensor, targets: Tensor | None = None, values: Tensor | None = None
    ):
        """Features [..., D] -> logits [..., V], float32; with targets [N], features [N, D] -> CE [N].

        With values [V] besides, CE and the mean of the values under the network, each [N]. All
        logits can be had of a model that is not split only.
        """
        shift, scale = self.modulation(condition).chunk(2, dim=-1)
        x = modulate(self.norm(x), shift, scale)
        if targets is None:
            return subs_logits(x, self.weight, self.bias, self.mask_id)
        hidden = (x, self.weight, self.bias)
        return linear_cross_entropy(*hidden, targets, self.mask_id, self.vocab_size, values, self.vocabulary)


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
        self.condition = Condition(config.condition_width)
        self.blocks = nn.ModuleList(Block(config, number) for number in range(config.blocks))
        self.output = Output(config)

    def context(
        self,
        valid: Tensor | None,
        length: int,
        documents: Tensor | None = None,
        dropout: Tensor | None = None,
    ) -> Context:
        """What every block of a forward pass shares.

        valid [B, L]: who is seen at all; documents [B, L]: numbers, equal for those who see each other;
        dropout [B]: the key of each sequence in this pass, int64.
        """
        condition = self.condition()
        rotary = rotary_table(length, self.head_width, condition.device)
        rows = None if dropout is None else row_keys(dropout, length)
        return Context(condition, rotary, attention(valid, documents, self.causal), rows)

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        """tokens [B, L] -> features [B, L, D]."""
        x = self.embedding(tokens.flatten())
        for block in self.blocks:
            x = block(x, *context)
        return x.unflatten(0, tokens.shape)
