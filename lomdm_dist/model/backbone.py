"""The DiT backbone of SEDD and MDLM, as its public trainers build it.

Pre-norm blocks with adaLN modulation, rotary positions, bidirectional attention (causal for the
autoregressive baseline). It does not depend on time: the adaLN condition is present, but its input
is a constant, so it is computed once a pass, not once a token.

Between blocks the tokens of all sequences lie end to end, [N, D], and padding is left out. Nothing
here knows of processes: `parallel/tensor.py` splits a model from outside, and then a block may hold
some of the heads, or be given some of the tokens.
"""

import contextlib
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lomdm_dist.config import ModelConfig
from lomdm_dist.ops.attention import Sight, attention
from lomdm_dist.ops.dropout import residual_dropout, row_keys
from lomdm_dist.ops.masked_linear_ce import masked_linear_ce, plain_masked_linear_ce, subs_logits
from lomdm_dist.ops.precision import wide
from lomdm_dist.ops.rotary import rotary_table, rotate

MLP_RATIO = 4
FREQUENCIES = 256  # width of the time embedding that the condition starts from


class ModulatedNorm(nn.Module):
    """LayerNorm without bias, then adaLN's shift and scale; statistics in float32.

    The condition is the same for all tokens, so scale and shift are the norm's own affine map: one
    kernel, which keeps nothing but its input and two numbers a token for the backward pass.
    """

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def scale(self) -> Tensor:
        return self.weight

    def forward(self, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        """x [N, D]; shift and scale [1, D]."""
        gain = wide(self.scale()) * (1 + wide(scale[0]))
        return F.layer_norm(x, x.shape[-1:], gain.to(x.dtype), shift[0])


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


class Context(NamedTuple):
    """What all blocks of a forward pass share; and where its tokens lie in [B, L]."""

    condition: Tensor  # [1, condition_width]
    rotary: tuple[Tensor, Tensor]  # each [L, head_width / 2], or [N, head_width / 2]
    sight: Sight
    keys: Tensor | None  # [N] of dropout; None: torch's own random numbers
    shape: tuple[int, int]  # B, L
    real: Tensor | None  # [n] places of the tokens in B L, N - n to fill up left out; None: everywhere

    def rows(self, places: Tensor) -> Tensor:
        """Places in B L, all of them real -> their rows in [N, D]."""
        if self.real is None:
            return places
        row_of = places.new_empty(self.shape[0] * self.shape[1])
        row_of[self.real] = torch.arange(len(self.real), device=places.device)
        return row_of[places]

    def spread(self, rows: Tensor) -> Tensor:
        """[N, ...] -> [B, L, ...], zero at padding."""
        if self.real is not None:
            whole = rows.new_zeros(self.shape[0] * self.shape[1], *rows.shape[1:])
            rows = whole.index_copy(0, self.real, rows[: len(self.real)])
        return rows.unflatten(0, self.shape)


class Block(nn.Module):
    """One transformer block, `number` of its pass. The adaLN gates start at zero: it is the identity."""

    def __init__(self, config: ModelConfig, number: int):
        super().__init__()
        width = config.width
        self.head_width, self.dropout, self.number = width // config.heads, config.dropout, number
        self.recompute, self.offload = "none", False  # see `TrainConfig`
        self.norm1 = ModulatedNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.norm2 = ModulatedNorm(width)
        self.mlp_in = nn.Linear(width, MLP_RATIO * width)
        self.mlp_out = nn.Linear(MLP_RATIO * width, width)
        self.modulation = nn.Linear(config.condition_width, 6 * width)

    def attention(self, x: Tensor, shift: Tensor, scale: Tensor, rotary, sight: Sight) -> Tensor:
        qkv = self.qkv(self.norm1(x, shift, scale)).unflatten(-1, (3, -1, self.head_width))
        return self.attention_out(attention(rotate(qkv, rotary), sight).flatten(1))

    def mlp(self, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        return self.mlp_out(F.gelu(self.mlp_in(self.norm2(x, shift, scale)), approximate="tanh"))

    def add(self, x: Tensor, mixed: Tensor, gate: Tensor, rate: float, keys, branch: int) -> Tensor:
        if not rate:
            return torch.addcmul(x, mixed, gate)
        return residual_dropout(x, mixed, gate, rate, keys, 2 * self.number + branch)

    def forward(self, x: Tensor, condition: Tensor, rotary, sight: Sight, keys: Tensor | None) -> Tensor:
        """x [N, D] -> [N, D]; the rest is of a `Context`."""
        with offloaded() if self.offload else contextlib.nullcontext():
            rate = self.dropout if self.training else 0.0  # known when it is computed again
            if self.recompute == "block":
                return again(self.both_branches, self.offload, x, condition, rotary, sight, rate, keys)
            return self.both_branches(x, condition, rotary, sight, rate, keys)

    def both_branches(self, x: Tensor, condition: Tensor, rotary, sight: Sight, rate: float, keys) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition).chunk(6, dim=-1)
        of_attention = x, shift1, scale1, rotary, sight
        if self.recompute == "attention":
            mixed = again(self.attention, self.offload, *of_attention)
        else:
            mixed = self.attention(*of_attention)
        x = self.add(x, mixed, gate1, rate, keys, 0)
        return self.add(x, self.mlp(x, shift2, scale2), gate2, rate, keys, 1)


def again(function, offload: bool, x: Tensor, *arguments):
    """function(x, *arguments), computed again in the backward pass instead of kept.

    Only torch's reentrant form keeps the arguments where `offloaded` sees them; x must need a gradient then.
    """
    if offload and torch.is_grad_enabled() and not x.requires_grad:
        x = x.detach().requires_grad_()
    return checkpoint(function, x, *arguments, use_reentrant=offload and torch.is_grad_enabled())


def offloaded():
    """What the backward pass needs waits in the memory of the host, but for parameters."""

    def keep(tensor: Tensor):
        owner = tensor if tensor._base is None else tensor._base
        if isinstance(owner, nn.Parameter) or not tensor.is_floating_point():
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return tensor.device, host.copy_(tensor, non_blocking=True)

    def give_back(kept):
        return kept if isinstance(kept, Tensor) else kept[1].to(kept[0], non_blocking=True)

    return torch.autograd.graph.saved_tensors_hooks(keep, give_back)


class Output(nn.Module):
    """Final norm and projection onto the vocabulary. Starts at zero: a new model is uniform."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.mask_id, self.vocab_size = config.mask_id, config.vocab_size
        self.vocabulary = None  # the process group that a split vocabulary is spread over
        self.plain, self.chunk = False, None  # the loss unfused; rows of its chunk
        self.norm = ModulatedNorm(config.width)
        self.modulation = nn.Linear(config.condition_width, 2 * config.width)
        # Parameters of this very module, not of a child: its forward reads them, and ZeRO 3 gathers
        # a module's own parameters only.
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.width))
        self.bias = nn.Parameter(torch.empty(config.vocab_size))

    def forward(self, x: Tensor, condition: Tensor, rows: Tensor | None = None, *loss):
        """Features [..., D] -> logits [..., V], float32.

        With the rows [n] of features [N, D] that are predicted: what `masked_linear_ce` returns of
        them, given `loss` = (targets, weights) or (targets, weights, values, value_weights). All
        logits can be had of a model that is not split only.
        """
        shift, scale = self.modulation(condition).chunk(2, dim=-1)
        if rows is None:
            return subs_logits(self.norm(x, shift, scale), self.weight, self.bias, self.mask_id)
        if self.plain:
            return self._plain_loss(self.norm(x, shift, scale), rows, *loss)
        hidden = self.norm(x[rows], shift, scale)
        targets, weights, *values = loss
        known = targets, weights, self.mask_id, self.vocab_size, *(values or (None, None))
        return masked_linear_ce(hidden, self.weight, self.bias, *known, self.vocabulary, self.chunk)

    def _plain_loss(self, hidden: Tensor, rows: Tensor, targets: Tensor, weights: Tensor, *values):
        """All positions are projected, as public trainers do; those not predicted have the weight 0."""
        everywhere = targets.new_zeros(len(hidden)).index_copy(0, rows, targets)
        weighted = [weights.new_zeros(len(hidden)).index_copy(0, rows, w) for w in (weights, *values[1:])]
        known = everywhere, weighted[0], self.mask_id, self.vocab_size, *values[:1], *weighted[1:]
        total, *of_rows = plain_masked_linear_ce(hidden, self.weight, self.bias, *known)
        return total, *(of_row[rows] for of_row in of_rows)


class Backbone(nn.Module):
    """Token ids -> features [N, D] of the last block; `output` turns them into logits."""

    def __init__(self, config: ModelConfig, causal: bool = False):
        super().__init__()
        self.head_width, self.causal = config.width // config.heads, causal
        self.kernel, self.multiple = "sdpa", 1  # of attention; tokens are filled up to a multiple
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.condition = Condition(config.condition_width)
        self.blocks = nn.ModuleList(Block(config, number) for number in range(config.blocks))
        self.output = Output(config)

    def context(
        self,
        shape: tuple[int, int],
        valid: Tensor | None = None,
        documents: Tensor | None = None,
        dropout: Tensor | None = None,
    ) -> Context:
        """What every block of a forward pass over tokens of this shape, [B, L], shares.

        valid [B, L]: False at padding; documents [B, L]: numbers, equal for those who see each other;
        dropout [B]: the key of each sequence in this pass, int64.
        """
        length = shape[1]
        condition = self.condition()
        rotary = rotary_table(length, self.head_width, condition.device)
        keys = None if dropout is None else row_keys(dropout, length)
        if valid is None and documents is None:
            return Context(
                condition, rotary, Sight(self.causal, length, None, self.kernel), keys, shape, None
            )
        if valid is None:
            valid = torch.ones(shape, dtype=torch.bool, device=condition.device)
        real = valid.flatten().nonzero()[:, 0]
        fill = torch.zeros(-len(real) % self.multiple, dtype=torch.int64, device=real.device)
        starts = _starts(real, length, documents, len(fill))
        places = torch.cat([real, fill])
        sight = Sight(self.causal, int(starts.diff().max()), starts, self.kernel)
        rotary = tuple(angles[places % length] for angles in rotary)
        return Context(condition, rotary, sight, None if keys is None else keys[places], shape, real)

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        """tokens [B, L] -> features [N, D]."""
        tokens = tokens.flatten()
        if context.real is not None:
            fill = len(context.rotary[0]) - len(context.real)
            tokens = torch.cat([tokens[context.real], tokens[:fill]])
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, *context[:4])
        return x


def _starts(real: Tensor, length: int, documents: Tensor | None, fill: int) -> Tensor:
    """Where runs of tokens begin that see each other, and the end: int32.

    A run is a sequence, or a document in it; what is only filled up is one of its own.
    """
    sequence = real // length
    begins = sequence[1:] != sequence[:-1]
    if documents is not None:
        document = documents.flatten()[real]
        begins = begins | (document[1:] != document[:-1])
    first, last = real.new_zeros(1), real.new_full((1,), len(real))
    ends = [last] if fill == 0 else [last, last + fill]
    return torch.cat([first, begins.nonzero()[:, 0] + 1, *ends]).int()
