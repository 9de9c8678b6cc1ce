"""The two ways in which a value crosses a group of processes that share one computation.

Megatron-core has them too, but its all-reduce silently leaves a tensor unreduced that is not contiguous
(until 0.19), and gradients often are not.
"""

import torch
import torch.distributed as dist
from torch import Tensor


def sum_over(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of everyone's x. All go on with the same sum, so its gradient is that of each x."""
    return _SumOver.apply(x, group)


def same_on(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x, which is the same on all, and with which each goes on by itself: the gradients are summed."""
    return _SameOn.apply(x, group)


def _all_reduced(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class _SumOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group) -> Tensor:
        return _all_reduced(x, group)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gradient, None


class _SameOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return _all_reduced(gradient, ctx.group), None
