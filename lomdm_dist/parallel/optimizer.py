"""What both engines share: AdamW's state, and the norms that the gradients are clipped by."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lomdm_dist.parallel.grid import Grid

MOMENTS = ("exp_avg", "exp_avg_sq")


def new_state(master: Tensor, optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    """AdamW's state of a tensor before its first step."""
    device = master.device if optimizer.defaults["fused"] else "cpu"
    step = torch.zeros((), dtype=torch.float32, device=device)
    return {"step": step, **{moment: torch.zeros_like(master) for moment in MOMENTS}}


def set_update_count(optimizer: torch.optim.AdamW, updates: int) -> None:
    """Set AdamW's step counter, which corrects the bias of the moments."""
    for state in optimizer.state.values():
        state["step"].fill_(updates)


def leave_out_bad_steps(optimizer: torch.optim.AdamW, is_bad: Callable[[], bool]) -> None:
    """`optimizer.step` then does nothing where `is_bad()`: weights, moments and counters stay."""
    kept = []

    def empty(optimizer, *_):
        if is_bad():
            for group in optimizer.param_groups:
                kept.append((group, group["params"]))
                group["params"] = []

    def refill(*_):
        for group, parameters in kept:
            group["params"] = parameters
        kept.clear()

    optimizer.register_step_pre_hook(empty)
    optimizer.register_step_post_hook(refill)


def clip_gradients(gradients: list[Tensor], norm: float, clip: float) -> None:
    """Scale the gradients of a parameter group to the norm `clip`, where their own is larger."""
    if gradients:
        torch._foreach_mul_(gradients, min(1.0, clip / (norm + 1e-6)))


def gradients_by_group(optimizer: torch.optim.AdamW, model: nn.Module, layouts: dict) -> list[list]:
    """The gradients of each parameter group, and whether each is split over the tensor-parallel ranks."""
    is_split = {p: layouts[name].dim is not None for name, p in model.named_parameters()}
    return [
        [(p.grad, is_split[p]) for p in group["params"] if p.grad is not None]
        for group in optimizer.param_groups
    ]


def gradient_norms(groups: list[list[tuple[Tensor, bool]]], grid: Grid, shards=None) -> list[float]:
    """The norm of each parameter group's gradient, over all ranks.

    groups: (what this rank has of a gradient, whether it is split over the tensor-parallel ranks); shards:
    the group over which the data-parallel ranks have shared them out, None where each has all.
    """
    squares = torch.zeros(2, len(groups), dtype=torch.float64, device=grid.device)
    for number, gradients in enumerate(groups):
        for kind in (False, True):
            of_kind = [gradient for gradient, is_split in gradients if is_split == kind]
            if of_kind:
                squares[int(kind), number] = torch.stack(torch._foreach_norm(of_kind)).double().square().sum()
    if shards is not None:
        dist.all_reduce(squares, group=shards)
    if grid.tensor_size > 1:
        of_split = squares[1].clone()
        dist.all_reduce(of_split, group=grid.tensor_group)
        squares[1] = of_split
    return squares.sum(dim=0).sqrt().tolist()
