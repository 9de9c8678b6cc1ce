"""Rotary positions, turned in place: the backward pass keeps no copy of what was turned."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lomdm_dist.ops.compiled import compiled

BASE = 10_000.0


def rotary_table(length: int, head_width: int, device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, each [L, head_width / 2], float32."""
    exponents = torch.arange(0, head_width, 2, device=device, dtype=torch.float32) / head_width
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), BASE**-exponents)
    return angles.cos(), angles.sin()


def rotate(qkv: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """qkv [N, 3, H, d] with q and k turned by the angles of their positions; overwrites what it is given.

    The table [L, d/2] is that of each L tokens, one sequence after the other; or of all N. The pairs
    are (i, i + d/2). Computed in float32 or wider.
    """
    return _Rotate.apply(qkv, *table)


def plain_rotate(qkv: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """The same, as one would write it."""
    cos, sin = (angles.repeat(len(qkv) // len(angles), 1)[:, None, None] for angles in table)
    first, second = qkv[:, :2].to(torch.promote_types(qkv.dtype, torch.float32)).chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([turned.to(qkv.dtype), qkv[:, 2:]], dim=1)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, cos, sin):
        ctx.save_for_backward(cos, sin)
        ctx.mark_dirty(qkv)
        compiled(_turn_, qkv.device)(qkv, cos, sin)
        return qkv

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        cos, sin = ctx.saved_tensors
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        compiled(_turn_, gradient.device)(gradient, cos, -sin)
        return gradient, None, None


def _turn_(qkv: Tensor, cos: Tensor, sin: Tensor) -> None:
    runs = qkv.unflatten(0, (-1, len(cos)))[:, :, :2]
    cos, sin = cos[:, None, None], sin[:, None, None]
    first, second = runs.chunk(2, dim=-1)
    wide = torch.promote_types(qkv.dtype, torch.float32)
    a, b = first.to(wide), second.to(wide)  # themselves where they are wide
    of_a = a * sin
    a.mul_(cos).addcmul_(b, sin, value=-1)
    b.mul_(cos).add_(of_a)
    if wide != qkv.dtype:
        first.copy_(a)
        second.copy_(b)
