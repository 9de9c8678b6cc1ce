"""DeepSpeed as the engine: ZeRO 0 to 3, and which piece of which parameter lives here."""

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from lomdm_dist.config import Config
from lomdm_dist.parallel.grid import Grid

MOMENTS = ("exp_avg", "exp_avg_sq")


def start_engine(model: nn.Module, optimizer: torch.optim.AdamW, config: Config, grid: Grid):
    """Wrap the model: returns DeepSpeed's engine, optimiser moments in place and counted from 0."""
    # extensions that DeepSpeed may compile belong to the environment, not to the home folder
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    if grid.device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise it warns that it looked in vain
    import deepspeed

    _use_plain_gloo(deepspeed)
    train, bf16 = config.train, config.train.precision == "bf16"
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        mpu=grid.mpu,
        config={
            "train_micro_batch_size_per_gpu": train.micro_batch,
            "gradient_accumulation_steps": config.accumulation(grid.data_size),
            "gradient_clipping": config.optim.clip,
            "zero_optimization": {"stage": config.parallel.zero_stage},
            "bf16": {"enabled": bf16},
            "data_types": {"grad_accum_dtype": "fp32"},
            "steps_per_print": sys.maxsize,
        },
    )
    _make_moments(engine)
    return engine


def _use_plain_gloo(deepspeed) -> None:
    """Leave out DeepSpeed's shared-memory all-reduce for CPUs.

    It is compiled at first use (a minute, and a killed compilation leaves a lock that hangs the
    next run without a word); gloo does the same work.
    """
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _inner_optimizer(engine) -> torch.optim.AdamW:
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def _masters(engine) -> list[Tensor]:
    """The tensors that AdamW updates: flat float32 partitions under ZeRO, else the parameters."""
    if engine.zero_optimization_stage() == 3:
        return engine.optimizer.fp32_partitioned_groups_flat
    return [p for group in _inner_optimizer(engine).param_groups for p in group["params"]]


def _make_moments(engine) -> None:
    """Create the moments now rather than in the first step, so that a checkpoint can fill them."""
    optimizer = _inner_optimizer(engine)
    for master in _masters(engine):
        device = master.device if optimizer.defaults["fused"] else "cpu"
        optimizer.state[master] = {
            "step": torch.zeros((), dtype=torch.float32, device=device),
            **{moment: torch.zeros_like(master) for moment in MOMENTS},
        }


def set_update_count(engine, updates: int) -> None:
    """Set AdamW's step counter, which corrects the bias of the moments."""
    for state in _inner_optimizer(engine).state.values():
        state["step"].fill_(updates)


def set_learning_rates(engine, rates: list[float]) -> None:
    """A rate for each parameter group, in the order of the optimiser's; those without a group are left."""
    for group, rate in zip(engine.optimizer.param_groups, rates, strict=False):
        group["lr"] = rate


def take_step(engine) -> float | None:
    """`engine.step()`; where it ends an accumulation, the global gradient norm before clipping.

    DeepSpeed keeps the norm for ZeRO 1 to 3 only; without ZeRO the reduced gradients lie here whole
    until the step.
    """
    if not engine.is_gradient_accumulation_boundary():
        engine.step()
        return None
    if engine.zero_optimization_stage() > 0:
        engine.step()
        return float(engine.get_global_grad_norm())
    gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
    norm = float(torch.nn.utils.get_total_norm(gradients))
    engine.step()
    return norm


@dataclass(frozen=True)
class Piece:
    """The part of one parameter whose master weights live on this rank.

    Elements start .. start + len(master) of the flattened parameter of `numel` elements. The
    tensors are float32 views: writing to them changes the engine's own state.
    """

    name: str
    numel: int
    start: int
    master: Tensor
    moments: dict[str, Tensor]


def pieces(engine) -> Iterator[Piece]:
    """This rank's pieces of all parameters; over the ranks they cover every parameter."""
    optimizer = _inner_optimizer(engine)
    for name, parameter in engine.module.named_parameters():
        if hasattr(parameter, "ds_id"):
            yield from _zero3_piece(name, parameter)
        elif hasattr(parameter, "_hp_mapping"):
            yield from _zero12_piece(name, parameter, optimizer)
        else:
            flat = {m: optimizer.state[parameter][m].view(-1) for m in MOMENTS}
            yield Piece(name, parameter.numel(), 0, parameter.data.view(-1), flat)


def _zero12_piece(name: str, parameter, optimizer) -> Iterator[Piece]:
    here = parameter._hp_mapping  # None where no part of it is on this rank
    if here is not None:
        partition = optimizer.param_groups[here.param_group_index]["params"][0]
        address = here.hp_fragment_address
        moments = {m: optimizer.state[partition][m].narrow(0, address.start, address.numel) for m in MOMENTS}
        start = here.lp_fragment_address.start
        yield Piece(name, parameter.numel(), start, here.hp_fragment.data, moments)


def _zero3_piece(name: str, parameter) -> Iterator[Piece]:
    from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state

    share = parameter.ds_tensor.ds_numel  # equal on all ranks; the last one's end is padding
    start = share * torch.distributed.get_rank(parameter.ds_process_group)
    size = min(share, parameter.ds_numel - start)
    if size > 0:
        moments = {m: safe_get_local_optimizer_state(parameter, m)[:size] for m in MOMENTS}
        master = safe_get_local_fp32_param(parameter)[:size]
        yield Piece(name, parameter.ds_numel, start, master, moments)
