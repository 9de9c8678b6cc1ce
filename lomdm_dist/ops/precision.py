"""What is never computed in bf16."""

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """In float32, or wider where it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
