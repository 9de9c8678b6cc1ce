"""Dropout whose mask is a hash of what it is for, fused into the residual.

The mask of an element depends on the key of its row (a token position of one sequence and pass), the
branch and the channel, and on nothing else: not on which rows lie beside it, on the device or on the
order of calls. So it is the same on any grid, and is computed again in the backward pass, not kept.

Keys are mixed in 64 bits, one a row and one a channel, and cut to 32; an element then costs two rounds
of 32-bit arithmetic. Integers are signed and wrap.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lomdm_dist.ops.compiled import compiled
from lomdm_dist.ops.hash import GOLDEN, mix, signed

CHUNK = 131_072  # elements, CPU: few enough for the caches, enough to hide the cost of a call


LOWBIAS = signed(0x7FEB352D, 32), signed(0x846CA68B, 32)  # found by search for low bias in 32 bits


def row_keys(sequence_keys: Tensor, length: int) -> Tensor:
    """One key a token position: int64 [B], random numbers -> int64 [B * length], sequence by sequence."""
    return mix(sequence_keys[:, None] + _numbers(length, sequence_keys) * GOLDEN).flatten()


def residual_dropout(
    x: Tensor, mixed: Tensor, gate: Tensor, rate: float, rows: Tensor | None, branch: int
) -> Tensor:
    """x + gate * dropout(mixed); x, mixed [N, D] and gate [1, D] of one float dtype -> [N, D].

    rows int64 [N], of `row_keys` or any part of it; branch tells apart the dropouts that a row meets.
    Without rows the mask is torch's own. 0 < rate < 1; what is kept is divided by 1 - rate.
    """
    if rows is None:
        return x + gate * F.dropout(mixed, rate, True)
    return _ResidualDropout.apply(x, mixed, gate, rate, rows, branch)


def keyed_mask(rows: Tensor, branch: int, width: int, rate: float) -> Tensor:
    """The mask of `residual_dropout`, plainly: rows int64 [N] -> bool [N, width], True where kept."""
    return _kept(*_keys(rows, branch, _numbers(width, rows)), _threshold(rate)).bool()


def _numbers(count: int, like: Tensor) -> Tensor:
    return torch.arange(1, count + 1, device=like.device)


def _keys(rows: Tensor, branch: int, channels: Tensor) -> tuple[Tensor, Tensor]:
    """The keys of one branch, int32: of its rows [N, 1] and of its channels [1, D], numbered 1 to D.

    Row keys are random, so adding a small number meets no other row.
    """
    both = torch.cat([rows + branch, channels * GOLDEN])  # in one go: small tensors cost calls
    mixed = (mix(both) >> 32).int()
    return mixed[: len(rows), None], mixed[None, len(rows) :]


def _threshold(rate: float) -> int:
    """That share of the 2**32 hashes lies below."""
    return min(round(rate * 2**32), 2**32 - 1) - 2**31


def _kept(rows: Tensor, channels: Tensor, threshold: int) -> Tensor:
    """int32 [N, D], 1 where kept and else 0: with masks of bool, torch takes several times longer."""
    z = rows ^ channels
    z.mul_(LOWBIAS[0])
    z.bitwise_xor_((z >> 15).bitwise_and_((1 << 17) - 1))
    z.mul_(LOWBIAS[1])
    return z.ge_(threshold)


def _forward(
    x: Tensor, mixed: Tensor, gate: Tensor, rows: Tensor, channels: Tensor, threshold: int
) -> Tensor:
    """gate, here and below: in float32 or wider, and divided by 1 - rate."""
    factor = _kept(rows, channels, threshold).to(gate.dtype).mul_(gate)
    return factor.mul_(mixed).add_(x).to(x.dtype)


def _backward(
    grad: Tensor, mixed: Tensor, gate: Tensor, rows: Tensor, channels: Tensor, threshold: int
) -> tuple[Tensor, Tensor]:
    """The gradients of mixed, [N, D], and of gate, [1, D]."""
    passed = _kept(rows, channels, threshold).to(gate.dtype).mul_(grad)
    of_gate = (passed * mixed).sum(dim=0, keepdim=True)
    return passed.mul_(gate).to(mixed.dtype), of_gate


def _chunks(x: Tensor) -> list[slice] | None:
    """The rows of x in parts, where it is large and on a CPU."""
    if x.is_cuda or x.numel() <= CHUNK:
        return None
    size = max(1, CHUNK // x.shape[1])
    return [slice(start, start + size) for start in range(0, len(x), size)]


class _ResidualDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mixed, gate, rate, rows, branch):
        ctx.rate, ctx.threshold, ctx.dtype = rate, _threshold(rate), gate.dtype
        gate = gate.to(torch.promote_types(gate.dtype, torch.float32)) / (1 - rate)
        rows, channels = compiled(_keys, x.device)(rows, branch, _numbers(x.shape[1], rows))
        ctx.save_for_backward(mixed, gate, rows, channels)
        chunks = _chunks(x)
        if chunks is None:
            return compiled(_forward, x.device)(x, mixed, gate, rows, channels, ctx.threshold)
        out = torch.empty_like(x)
        for part in chunks:
            out[part] = _forward(x[part], mixed[part], gate, rows[part], channels, ctx.threshold)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        mixed, gate, rows, channels = ctx.saved_tensors
        chunks = _chunks(mixed)
        if chunks is None:
            arguments = grad, mixed, gate, rows, channels, ctx.threshold
            of_mixed, of_gate = compiled(_backward, grad.device)(*arguments)
        else:
            of_mixed, of_gate = torch.empty_like(mixed), torch.zeros_like(gate)
            for part in chunks:
                arguments = grad[part], mixed[part], gate, rows[part], channels, ctx.threshold
                of_mixed[part], summed = _backward(*arguments)
                of_gate += summed
        return grad, of_mixed, (of_gate / (1 - ctx.rate)).to(ctx.dtype), None, None, None
