"""Projection onto the vocabulary and weighted cross-entropy in one pass, under SUBS.

SUBS: the mask token has probability zero. The weight of each row is known before its logits are, so the
gradient of the weighted sum is computed beside its value, a chunk of rows at a time: three matrix products
instead of the four of recomputation, and no tensor of all rows by all of the vocabulary.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lomdm_dist.ops.collective import same_on
from lomdm_dist.ops.compiled import compiled
from lomdm_dist.ops.precision import wide

CHUNK_BYTES = {"cpu": 2**27, "cuda": 2**29}  # of a chunk's logits, which are float32
MOST_ROWS = 8192  # of a chunk: more gain nothing


def subs_logits(hidden: Tensor, weight: Tensor, bias: Tensor, mask_id: int) -> Tensor:
    """hidden [..., D], weight [V, D], bias [V] -> logits [..., V], float32 or wider, -inf at `mask_id`."""
    never = torch.arange(weight.shape[0], device=hidden.device) == mask_id
    return wide(F.linear(hidden, weight, bias)).masked_fill(never, -torch.inf)


def default_chunk(part: int, device_type: str) -> int:
    """Rows whose logits are in memory at once, of a vocabulary (or this process's part of it)."""
    return min(MOST_ROWS, max(1, CHUNK_BYTES[device_type] // (4 * part)))


def masked_linear_ce(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    targets: Tensor,
    weights: Tensor,
    mask_id: int,
    vocab_size: int,
    values: Tensor | None = None,
    value_weights: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    chunk: int | None = None,
):
    """sum_i weights_i CE_i, where CE_i = -log p_i(target_i); CE itself; and log p_i at its largest.

    hidden [N, D] of masked positions, targets [N], weights [N]; N may be 0. Returns the sum, a float64
    scalar whose gradient reaches hidden, weight, bias and weights; CE [N] and max_v log p_iv [N], float32
    or wider, detached.

    With values [vocab_size] and value_weights [N] (detached), value_weights_i E_i is added to the sum,
    where E_i = sum_v p_iv values_v, its gradient reaches values too, and E [N] is returned fourth.

    group: the processes over which the vocabulary is split in equal parts, in the order of the ranks.
    weight and bias are then this one's part, of which rows from vocab_size on are padding, never
    predicted; hidden, targets, values and what is returned are the same on all.
    """
    if group is not None:
        hidden = same_on(hidden, group)
        values = None if values is None else same_on(values, group)
    chunk = chunk or default_chunk(len(weight), hidden.device.type)
    rows = targets, weights, values, value_weights
    total, *of_rows, expected = _MaskedLinearCE.apply(
        hidden, weight, bias, *rows, mask_id, vocab_size, group, chunk, torch.is_grad_enabled()
    )
    return (total, *of_rows) if values is None else (total, *of_rows, expected)


def plain_masked_linear_ce(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    targets: Tensor,
    weights: Tensor,
    mask_id: int,
    vocab_size: int,
    values: Tensor | None = None,
    value_weights: Tensor | None = None,
):
    """The same on one process, as one would write it: all logits, and torch's own gradients."""
    log_p = subs_logits(hidden, weight, bias, mask_id)[:, :vocab_size].log_softmax(dim=-1)
    ce = F.nll_loss(log_p, targets, reduction="none")
    total = (weights.double() * ce.double()).sum()
    of_rows = ce.detach(), log_p.detach().amax(dim=-1)
    if values is None:
        return total, *of_rows
    expected = log_p.exp() @ wide(values)
    return total + (value_weights.double() * expected.double()).sum(), *of_rows, expected.detach()


class _MaskedLinearCE(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, hidden, weight, bias, targets, weights, values, value_weights, mask_id, vocab_size, *how
    ):
        group, _, with_gradient = how
        first = 0 if group is None else dist.get_rank(group) * len(weight)
        never = _columns_never(mask_id - first, vocab_size - first, len(weight))
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        known = None if values is None else _part(values.to(dtype), first, len(weight))
        rows = targets - first, weights, value_weights
        ce, peak, expected, *gradients, of_known = _over_chunks(
            hidden, weight, bias, *rows, known, never, *how
        )

        total = (weights.double() * ce.double()).sum()
        if values is not None:
            total += (value_weights.double() * expected.double()).sum()
            ctx.mark_non_differentiable(expected)
        ctx.mark_non_differentiable(ce, peak)
        if with_gradient:
            of_values = None if values is None else _whole(of_known, first, values)
            ctx.save_for_backward(ce, *gradients, of_values)
        ctx.dtype_of_weights = weights.dtype
        return total, ce, peak, expected

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream, *_):
        ce, *gradients = ctx.saved_tensors
        for gradient in gradients:
            if gradient is not None:
                gradient.mul_(upstream)  # in place, so torch refuses a second backward pass
        of_weights = (ce * upstream).to(ctx.dtype_of_weights)
        of_hidden, of_weight, of_bias, of_values = gradients
        return of_hidden, of_weight, of_bias, None, of_weights, of_values, *[None] * 6


def _over_chunks(
    hidden, weight, bias, targets, weights, value_weights, known, never, group, chunk, with_gradient
):
    """CE, log p at its largest, E; and the gradients of the sum by hidden, weight, bias and known, or None.

    targets count from this part's first row; known [part] are the values of its rows.
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    ce = torch.empty(len(hidden), dtype=dtype, device=hidden.device)
    peak, expected = torch.empty_like(ce), None if known is None else torch.empty_like(ce)
    of_hidden = of_weight = of_bias = of_known = None
    if with_gradient:
        of_hidden = torch.empty_like(hidden)
        of_weight, of_bias = (torch.zeros_like(whole, dtype=dtype) for whole in (weight, bias))
        of_known = None if known is None else torch.zeros_like(known)
    row_terms = compiled(_row_terms, hidden.device) if group is None else _row_terms
    for start in range(0, len(hidden), chunk):
        rows = slice(start, start + chunk)
        logits = torch.addmm(bias, hidden[rows], weight.t())
        weighted = weights[rows].to(dtype), None if known is None else value_weights[rows].to(dtype)
        ce[rows], peak[rows], e, of_logits, of_known_here = row_terms(
            logits, targets[rows], *weighted, known, never, group, with_gradient
        )
        if known is not None:
            expected[rows] = e
        if with_gradient:
            torch.mm(of_logits, weight, out=of_hidden[rows])
            _add_product(of_weight, of_logits.t(), hidden[rows])
            of_bias += of_logits.sum(dim=0)
            if known is not None:
                of_known += of_known_here
        del logits, of_logits  # before the next chunk's
    if with_gradient:
        of_weight, of_bias = of_weight.to(weight.dtype), of_bias.to(bias.dtype)
    return ce, peak, expected, of_hidden, of_weight, of_bias, of_known


def _row_terms(logits, targets, weights, value_weights, known, never, group, wants_gradient):
    """CE, log p at its largest, E, the gradient of the sum by the logits and by `known`, of a chunk of rows.

    logits [n, part] are overwritten where they are float32. targets count from this part's first row.
    """
    z = wide(logits)
    for columns in never:
        z[:, columns] = -torch.inf
    largest = z.amax(dim=1)
    if group is not None:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    mine = (targets >= 0) & (targets < z.shape[1])
    column = targets.clamp(0, z.shape[1] - 1)[:, None]
    picked = torch.where(mine, z.gather(1, column)[:, 0] - largest, 0.0)
    exponentials = z.sub_(largest[:, None]).exp_()
    sums = torch.stack([exponentials.sum(dim=1), picked, *([] if known is None else [exponentials @ known])])
    if group is not None:
        dist.all_reduce(sums, group=group)
    total, picked = sums[0], sums[1]
    log_total = total.log()
    ce, peak = log_total - picked, -log_total  # the largest logit is at 0
    expected = None if known is None else sums[2] / total
    if not wants_gradient:
        return ce, peak, expected, None, None
    of_known = None
    if known is None:
        z.mul_((weights / total)[:, None])
    else:
        of_known = (value_weights / total) @ exponentials
        factor = ((weights - value_weights * expected) / total)[:, None].expand_as(z)
        z.mul_(torch.addr(factor, value_weights / total, known))
    z.scatter_add_(1, column, -torch.where(mine, weights, 0.0)[:, None])
    return ce, peak, expected, z.to(logits.dtype), of_known


def _part(values: Tensor, first: int, size: int) -> Tensor:
    """values[first : first + size], filled up with zeros."""
    here = values[first : first + size]
    return torch.cat([here, here.new_zeros(size - len(here))])


def _whole(part: Tensor, first: int, like: Tensor) -> Tensor:
    """Zeros but for the part, which may reach over the end."""
    whole = torch.zeros_like(like)
    here = whole[first : first + len(part)]
    here.copy_(part[: len(here)])
    return whole


def _columns_never(mask_id: int, vocab_size: int, part: int) -> list[slice]:
    """Columns of this part of the vocabulary that are never predicted: the mask, and padding."""
    never = [slice(mask_id, mask_id + 1)] if 0 <= mask_id < part else []
    return [*never, slice(max(0, vocab_size), part)] if vocab_size < part else never


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, where total may be of a wider dtype."""
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, out=total)  # torch does not count the operations of `addmm_`
    else:
        total += a @ b
