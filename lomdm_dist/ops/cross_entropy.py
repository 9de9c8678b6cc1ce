"""Projection onto the vocabulary and cross-entropy under SUBS: the mask token has probability zero."""

import torch
import torch.nn.functional as F
from torch import Tensor


def subs_logits(hidden: Tensor, weight: Tensor, bias: Tensor, mask_id: int) -> Tensor:
    """hidden [..., D], weight [V, D], bias [V] -> logits [..., V], float32, -inf at `mask_id`."""
    never = torch.arange(weight.shape[0], device=hidden.device) == mask_id
    return F.linear(hidden, weight, bias).float().masked_fill(never, -torch.inf)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, mask_id: int
) -> Tensor:
    """-log p(target) of each row; hidden [N, D], targets [N] -> [N], float32. N may be 0."""
    logits = subs_logits(hidden, weight, bias, mask_id)
    return F.cross_entropy(logits, targets, reduction="none")


def linear_cross_entropy_and_mean(
    hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, mask_id: int, values: Tensor
) -> tuple[Tensor, Tensor]:
    """Besides the cross-entropy [N], the mean sum_v p_v values_v of each row [N]; values [V]. float32."""
    logits = subs_logits(hidden, weight, bias, mask_id)
    ce = F.cross_entropy(logits, targets, reduction="none")
    return ce, logits.softmax(dim=-1) @ values.float()
