"""Rotary positions. The backward pass keeps nothing but the table of angles."""

import torch
from torch import Tensor

from lomdm_dist.ops.compiled import compiled
from lomdm_dist.ops.precision import wide

BASE = 10_000.0


def rotary_table(length: int, head_width: int, device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, each [L, head_width / 2], float32."""
    exponents = torch.arange(0, head_width, 2, device=device, dtype=torch.float32) / head_width
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), BASE**-exponents)
    return angles.cos(), angles.sin()


def rotate(qkv: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """qkv [N, 3, H, d] -> the same, contiguous, with q and k turned by the angles of their positions.

    The table [L, d/2] is that of each L tokens, one sequence after the other; or of all N. The pairs
    are (i, i + d/2). Computed in float32 or wider.
    """
    return compiled(_turned, qkv.device)(qkv, *table)


def _turned(qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    runs = qkv.unflatten(0, (-1, len(cos)))
    cos, sin = cos[:, None, None], sin[:, None, None]
    first, second = wide(runs[:, :, :2]).chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([turned.to(qkv.dtype), runs[:, :, 2:]], dim=2).flatten(0, 1)
