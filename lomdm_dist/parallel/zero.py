"""DeepSpeed as the engine: ZeRO 0 to 3."""

import contextlib
import io
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from lomdm_dist.config import Config
from lomdm_dist.ops.phase import phase
from lomdm_dist.parallel.engine import Blueprint
from lomdm_dist.parallel.grid import Grid
from lomdm_dist.parallel.layout import Layout, Piece
from lomdm_dist.parallel.optimizer import (
    MOMENTS,
    clip_gradients,
    gradient_norms,
    gradients_by_group,
    leave_out_bad_steps,
    new_state,
)

REDUCE_BUCKET = 50_000_000  # elements; ZeRO 3 has a buffer of this size, by default of 2 GB


class DeepSpeed:
    """See engine.py."""

    def __init__(self, blueprint: Blueprint, make_optimizer: Callable):
        config, grid, model = blueprint.config, blueprint.grid, blueprint.model
        deepspeed = import_deepspeed(grid)
        self.stage, self.layouts, self.grid = config.parallel.zero_stage, blueprint.layouts, grid
        self.clip = config.optim.clip
        self.local = self.stage < 2 and grid.tensor_size == 1
        settings = _settings(config, grid)
        dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
        for module in reversed(list(model.modules())):  # children first: a module converts its children too
            _materialise(module, dtype, grid.device)
            if self.stage == 3:  # partitioned at once, so that one module at a time is whole
                group = grid.mpu.get_data_parallel_group()
                deepspeed.zero.Init(
                    module=module, data_parallel_group=group, config_dict_or_path=settings, mpu=grid.mpu
                )
        for name, parameter in model.named_parameters():
            # DeepSpeed's norms count such a parameter on every tensor-parallel rank, others once
            parameter.tensor_model_parallel = self.layouts[name].dim is not None
        with contextlib.redirect_stdout(io.StringIO()):  # it prints the memory of each of its steps
            self.engine, *_ = deepspeed.initialize(
                model=model, optimizer=make_optimizer(model, config.optim), mpu=grid.mpu, config=settings
            )
        self.module = self.engine.module
        self.optimizer = getattr(self.engine.optimizer, "optimizer", self.engine.optimizer)
        self.groups, self.norms = len(self.optimizer.param_groups), None
        self._watch_norms()
        self.optimizer.register_step_pre_hook(self._clip)
        leave_out_bad_steps(
            self.optimizer, lambda: not (self.good and all(map(math.isfinite, self._norms())))
        )
        self._make_moments()
        self.pieces = list(self._pieces())
        self._mark_reductions()

    def __call__(self, function: Callable, *arguments):
        return self.engine(function, *arguments)

    def backward(self, loss: Tensor, more: bool = False) -> None:
        """ZeRO 0 and 1 reduce once, in the step; 2 and 3, which hold no whole gradient, here, each time."""
        # Not the loss itself: where that is what the model returned, DeepSpeed divides its gradient all the
        # same, in a hook of its own that runs before it knows of this backward pass.
        self.engine.backward(loss * 1.0, scale_wrt_gas=False)

    def _mark_reductions(self) -> None:
        """ZeRO 0 and 1 reduce in one call of the step, 2 and 3 in hooks on the gradients, and after all."""
        marked, engine = phase("reduction"), self.engine
        engine.allreduce_gradients = marked(engine.allreduce_gradients)
        if self.stage > 1:
            for name in (
                "reduce_ready_partitions_and_remove_grads",
                "independent_gradient_partition_epilogue",
            ):
                setattr(engine.optimizer, name, marked(getattr(engine.optimizer, name)))

    def drop(self) -> None:
        self.engine.optimizer.zero_grad()

    @phase("optimiser")
    def step(self, good: bool = True) -> list[float]:
        self.good, self.norms = good, None
        self.seen.clear()
        self.engine.step()
        if self.stage == 3:
            # By itself it writes in the first backward pass of a step over what the step before has left,
            # and adds in later ones: wrong for a parameter that the first does not reach.
            self.engine.optimizer.grad_partitions_flat_buffer.zero_()
            self.engine.optimizer.micro_step_id = 1
        return self._norms()

    def _watch_norms(self) -> None:
        """DeepSpeed finds a norm for each parameter group (ZeRO 3: for parts of it), but keeps one of all."""
        self.seen: list[Tensor] = []
        for name in ("get_grad_norm_direct", "complete_grad_norm_calculation_for_cpu_offload"):
            if found := getattr(self.engine.optimizer, name, None):
                setattr(self.engine.optimizer, name, self._noting(found))

    def _noting(self, norm_of: Callable) -> Callable:
        def noted(*arguments, **named):
            self.seen.append(norm_of(*arguments, **named))
            return self.seen[-1]

        return noted

    def _norms(self) -> list[float]:
        """The norm of each parameter group's gradient, applied now or last; inf where it is no number."""
        if self.norms is None:
            zero = self.engine.optimizer
            if self.stage and not 0 <= float(zero._global_grad_norm) < math.inf:
                self.norms = [math.inf] * self.groups
            elif self.seen:
                squares = [0.0] * self.groups
                group_of = getattr(zero, "sub_group_to_group_id", range(self.groups))
                for part, norm in enumerate(self.seen):
                    squares[group_of[part]] += float(norm) ** 2
                self.norms = [math.sqrt(square) for square in squares]
            else:
                self.norms = gradient_norms(self._gradients(), self.grid)
        return self.norms

    def _gradients(self) -> list[list[tuple[Tensor, bool]]]:
        """For gradient_norms: without ZeRO; and of DeepSpeed's bf16 ZeRO 1, which holds whole gradients."""
        if self.stage == 0:
            return gradients_by_group(self.optimizer, self.module, self.layouts)
        zero = self.engine.optimizer
        groups = zip(
            zero.bf16_groups, zero.fp32_groups_gradients, zero.fp32_groups_has_gradients, strict=True
        )
        return [
            [
                (gradient, parameter.tensor_model_parallel)
                for parameter, gradient, there in zip(*group, strict=True)
                if there
            ]
            for group in groups
        ]

    def _clip(self, optimizer, *_) -> None:
        """ZeRO comes here once for each parameter group, or part of it; the others are left out, or empty."""
        norms = self._norms()
        for group in optimizer.param_groups:
            gradients = [p.grad for p in group["params"] if p.grad is not None]
            clip_gradients(gradients, norms[group["number"]], self.clip)

    def fill(self, read: Callable[[list[Piece]], None]) -> None:
        read(self.pieces)
        if self.stage in (1, 2):  # every rank holds what the network computes with, besides its masters
            read(
                [
                    Piece(name, self.layouts[name], 0, parameter.data.view(-1), {})
                    for name, parameter in self.module.named_parameters()
                ]
            )
        if self.stage == 3:
            parameters = dict(self.module.named_parameters())
            for piece in self.pieces:
                parameters[piece.name].ds_tensor.data[: len(piece.master)].copy_(piece.master)
            whole = self.engine.optimizer.persistent_parameters  # small ones, which stay gathered
            if whole:
                whole[0].partition(whole)

    def _masters(self) -> list[Tensor]:
        """The tensors that AdamW updates: flat float32 partitions under ZeRO, else the parameters."""
        if self.stage == 3:
            return self.engine.optimizer.fp32_partitioned_groups_flat
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _make_moments(self) -> None:
        """Create the moments now rather than in the first step, so that a checkpoint can fill them."""
        for master in self._masters():
            self.optimizer.state[master] = new_state(master, self.optimizer)

    def _pieces(self) -> Iterator[Piece]:
        """Over the ranks they cover every parameter."""
        for name, parameter in self.module.named_parameters():
            layout = self.layouts[name]
            if self.stage == 3:
                yield from _zero3_piece(name, layout, parameter)
            elif self.stage > 0:
                yield from _zero12_piece(name, layout, parameter, self.optimizer)
            else:
                flat = {m: self.optimizer.state[parameter][m].view(-1) for m in MOMENTS}
                yield Piece(name, layout, 0, parameter.data.view(-1), flat)


def import_deepspeed(grid: Grid):
    """The library, set up to be quiet and to compile nothing; once a process, it takes seconds."""
    # extensions that DeepSpeed may compile belong to the environment, not to the home folder
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if grid.device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise it warns that it looked in vain
    import deepspeed

    # Its shared-memory all-reduce for CPUs is compiled at first use (a minute, and a killed compilation
    # leaves a lock that hangs the next run without a word); gloo does the same work.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _settings(config: Config, grid: Grid) -> dict:
    """DeepSpeed's own configuration."""
    zero = {"stage": config.parallel.zero_stage, "reduce_bucket_size": REDUCE_BUCKET}
    if config.parallel.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": config.train.micro_batch,
        "gradient_accumulation_steps": config.accumulation(grid.data_size),
        "managed_gradient_accumulation": False,  # `step` ends a step, however many backward passes it has
        "gradient_clipping": 0.0,  # `_clip` does it, by parameter group
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,  # its own Adam for the host is compiled at first use
        # the network's gradients are added to those in float32 at once, and are not kept beside them
        "bf16": {"enabled": config.train.precision == "bf16", "immediate_grad_update": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",  # by default gradients are reduced in the network's bf16
        "steps_per_print": sys.maxsize,
    }


def _materialise(module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Give a module's own parameters memory, not yet set."""
    for name, parameter in module.named_parameters(recurse=False):
        empty = torch.empty(parameter.shape, dtype=dtype, device=device)
        module.register_parameter(name, nn.Parameter(empty))


def _zero12_piece(name: str, layout: Layout, parameter, optimizer) -> Iterator[Piece]:
    here = parameter._hp_mapping  # None where no part of it is on this rank
    if here is not None:
        partition = optimizer.param_groups[here.param_group_index]["params"][0]
        address = here.hp_fragment_address
        moments = {m: optimizer.state[partition][m].narrow(0, address.start, address.numel) for m in MOMENTS}
        yield Piece(name, layout, here.lp_fragment_address.start, here.hp_fragment.data, moments)


def _zero3_piece(name: str, layout: Layout, parameter) -> Iterator[Piece]:
    from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state

    share = parameter.ds_tensor.ds_numel  # equal on all ranks; the last one's end is padding
    start = share * torch.distributed.get_rank(parameter.ds_process_group)
    size = min(share, parameter.ds_numel - start)
    if size > 0:
        moments = {m: safe_get_local_optimizer_state(parameter, m)[:size] for m in MOMENTS}
        master = safe_get_local_fp32_param(parameter).detach()[:size]
        yield Piece(name, layout, start, master, moments)
