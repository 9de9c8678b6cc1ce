"""PyTorch's FSDP2 as the engine: parameters are sharded by rows, a block at a time is whole."""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lomdm_dist.model.backbone import Block
from lomdm_dist.ops.phase import phase
from lomdm_dist.parallel.engine import Blueprint
from lomdm_dist.parallel.layout import Piece
from lomdm_dist.parallel.optimizer import (
    MOMENTS,
    clip_gradients,
    gradient_norms,
    gradients_by_group,
    new_state,
)

for _name in ("post_backward", "finalize_backward"):  # hooks of the backward pass: here gradients are reduced
    setattr(FSDPParamGroup, _name, phase("reduction")(getattr(FSDPParamGroup, _name)))


class Fsdp2:
    """See engine.py. ZeRO 2 keeps a block's parameters whole between forward and backward, 3 does not."""

    local = False

    def __init__(self, blueprint: Blueprint, make_optimizer: Callable):
        config, grid, model = blueprint.config, blueprint.grid, blueprint.model
        self.module, self.layouts, self.grid = model, blueprint.layouts, grid
        self.clip = config.optim.clip
        mesh = grid.data_mesh(config.parallel.shard_group)
        self.shards = mesh.get_group("shards")
        bf16 = config.train.precision == "bf16"
        options = {
            "mesh": mesh,
            "reshard_after_forward": config.parallel.zero_stage == 3,
            # the shards are the masters, in float32; inputs are what the network makes of them
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=torch.bfloat16 if bf16 else None,
                reduce_dtype=torch.float32,
                cast_forward_inputs=False,
            ),
        }
        if config.parallel.offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=grid.device.type == "cuda")
        for block in [module for module in model.modules() if isinstance(module, Block)]:
            fully_shard(block, **options)
        fully_shard(model, **options)
        model.to_empty(device="cpu" if config.parallel.offload else grid.device)
        self.optimizer = make_optimizer(model, config.optim)
        for parameter in model.parameters():
            self.optimizer.state[parameter] = new_state(parameter, self.optimizer)
        self.pieces = list(self._pieces())

    def __call__(self, function: Callable, *arguments):
        return self.module(function, *arguments)

    def backward(self, loss: Tensor, more: bool = False) -> None:
        """Where more is to come, what there is waits, whole, on each rank: gradients are reduced once."""
        self.module.set_requires_gradient_sync(not more)
        loss.backward()

    @phase("optimiser")
    def step(self, good: bool = True) -> list[float]:
        groups = [
            [(gradient.to_local(), is_split) for gradient, is_split in group]
            for group in gradients_by_group(self.optimizer, self.module, self.layouts)
        ]
        norms = gradient_norms(groups, self.grid, self.shards)
        for gradients, norm in zip(groups, norms, strict=True):
            clip_gradients([gradient for gradient, _ in gradients], norm, self.clip)
        if good and all(map(math.isfinite, norms)):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return norms

    def fill(self, read: Callable[[list[Piece]], None]) -> None:
        read(self.pieces)

    def _pieces(self) -> Iterator[Piece]:
        for name, parameter in self.module.named_parameters():
            master = _flat(parameter.data)
            if len(master):
                _, offsets = compute_local_shape_and_global_offset(
                    parameter.shape, parameter.device_mesh, parameter.placements
                )
                start = offsets[0] * math.prod(parameter.shape[1:])
                moments = {m: _flat(self.optimizer.state[parameter][m]) for m in MOMENTS}
                yield Piece(name, self.layouts[name], start, master, moments)


def _flat(tensor: DTensor) -> Tensor:
    """This rank's rows, as a view."""
    return tensor.to_local().view(-1)
