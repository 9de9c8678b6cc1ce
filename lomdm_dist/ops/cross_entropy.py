"""Projection onto the vocabulary and cross-entropy under SUBS: the mask token has probability zero."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lomdm_dist.ops.collective import same_on, sum_over


def subs_logits(hidden: Tensor, weight: Tensor, bias: Tensor, mask_id: int) -> Tensor:
    """hidden [..., D], weight [V, D], bias [V] -> logits [..., V], float32, -inf at `mask_id`."""
    never = torch.arange(weight.shape[0], device=hidden.device) == mask_id
    return F.linear(hidden, weight, bias).float().masked_fill(never, -torch.inf)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    targets: Tensor,
    mask_id: int,
    vocab_size: int,
    values: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
):
    """-log p(target) of each row; hidden [N, D], targets [N] -> [N], float32. N may be 0.

    With values [vocab_size], also the mean sum_v p_v values_v of each row, [N], float32.

    group: the processes over which the vocabulary is split in equal parts, in the order of the ranks.
    weight and bias are then this one's part, of which rows from vocab_size on are padding, never
    predicted; hidden, targets, values and what is returned are the same on all.
    """
    if group is None:
        logits = subs_logits(hidden, weight, bias, mask_id)
        ce = F.cross_entropy(logits, targets, reduction="none")
        return ce if values is None else (ce, logits.softmax(dim=-1) @ values.float())
    return _split_cross_entropy(hidden, weight, bias, targets, mask_id, vocab_size, values, group)


def _split_cross_entropy(hidden, weight, bias, targets, mask_id, vocab_size, values, group):
    """One all-reduce of the maxima and one of the sums; gradients to hidden and values are summed too."""
    part = len(weight)
    ids = torch.arange(part, device=hidden.device) + dist.get_rank(group) * part
    never = (ids == mask_id) | (ids >= vocab_size)
    logits = F.linear(same_on(hidden, group), weight, bias).float().masked_fill(never, -torch.inf)

    largest = logits.detach().amax(dim=-1, keepdim=True)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    exponentials = (logits - largest).exp()
    mine = (targets >= ids[0]) & (targets <= ids[-1])
    column = (targets - ids[0]).clamp(0, part - 1)[:, None]
    picked = logits.gather(1, column)[:, 0].where(mine, torch.zeros((), device=hidden.device))
    sums = [exponentials.sum(dim=-1), picked]
    if values is not None:
        known = same_on(values.float(), group)[ids.clamp(max=vocab_size - 1)]
        sums.append(exponentials @ known)
    total, picked, *weighted = sum_over(torch.stack(sums), group)
    ce = total.log() + largest[:, 0] - picked
    return ce if values is None else (ce, weighted[0] / total)
