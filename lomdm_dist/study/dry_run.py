"""One optimiser step of one rank of any grid, in one process: what it holds, and what it sends.

The other ranks are imagined (torch's fake process group): the model, the engine and the step are the real
ones, tokens are random, and arithmetic on large tensors is left out. So nothing here says how long it takes.
"""

import contextlib
import os
from collections import Counter
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from tqdm import tqdm

from lomdm_dist.config import Config
from lomdm_dist.errors import UserError
from lomdm_dist.machine import Device
from lomdm_dist.model.kernels import loss_chunk
from lomdm_dist.parallel.engine import Blueprint, start_engine
from lomdm_dist.parallel.grid import Grid, process_grid
from lomdm_dist.parallel.zero import REDUCE_BUCKET
from lomdm_dist.study.counting import Counting, Held
from lomdm_dist.study.memory import LEFT_OUT, Parameters, memory
from lomdm_dist.study.plan import wanted
from lomdm_dist.study.throughput import synthetic
from lomdm_dist.study.traffic import Collective, traffic
from lomdm_dist.train.gradients import add_gradients
from lomdm_dist.train.optim import WeightAverage, make_optimizer

MIB = 2**20
COMPARED = "deepspeed.runtime.zero.partitioned_param_coordinator.assert_ints_same_as_other_ranks"
LAUNCHED = ("WORLD_SIZE", "RANK")
NOT_MODELLED = {"parallel": ("offload",), "train": ("offload_activations",)}
CONVENTION = {
    "memory": "storages that torch's operations made, each once, at the largest sum over a step",
    "bytes": "of the whole tensors of a step: what is reduced, or what is there when it is gathered",
    "kernels": "attention sdpa, pointwise operations one by one, loss_chunk and fused AdamW as on a GPU",
    "tokens": "random, sequences full; masked positions as drawn by this rank",
    "left_out": LEFT_OUT,
}


def dry_run(config: Config, world_size: int, rank: int) -> dict:
    """Count a step of `rank` of `world_size`. Raises UserError where there can be no such step."""
    check(config, world_size, rank)
    config = config.changed({"kernels.loss_chunk": loss_chunk(config, "cuda")})
    place = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0"}
    tensor_parallel = config.parallel.tensor_parallel
    with mock.patch.dict(os.environ, place), process_grid(tensor_parallel, FakeStore(), fake=True) as grid:
        return count_on(config, grid, imagined=True)


def count_on(config: Config, grid: Grid, imagined: bool = False) -> dict:
    """Count a step of this process. Of imagined others nothing comes that it could be compared with."""
    with Counting() as counting:
        run = _Run(config, grid, counting)
        is_zero3 = config.parallel.engine == "deepspeed" and config.parallel.zero_stage == 3
        steps = 2 if is_zero3 else 1  # it learns, and differs from step to step
        with mock.patch(COMPARED, lambda record: None) if is_zero3 and imagined else contextlib.nullcontext():
            for _ in range(steps):
                run.step()
            run.begin()
            for _ in range(steps):
                run.step()
            return run.result(steps)


def check(config: Config, world_size: int, rank: int) -> None:
    """UserError."""
    if launched := [name for name in LAUNCHED if name in os.environ]:
        raise UserError(
            f"a dry run is one process, but a launcher started this one ({launched[0]}="
            f"{os.environ[launched[0]]}): start it with python or lomdm"
        )
    if world_size < 1:
        raise UserError(f"--world-size {world_size}: give 1 or more")
    if not 0 <= rank < world_size:
        raise UserError(f"--rank {rank}: of --world-size {world_size} there are ranks 0 to {world_size - 1}")
    if keys := wanted(config):
        raise UserError(
            f"{keys[0]} is auto: give numbers, for example those of lomdm plan --gpus {world_size}"
        )
    for section, names in NOT_MODELLED.items():
        for name in names:
            if getattr(getattr(config, section), name):
                raise UserError(f"a dry run does not know {section}.{name}=true")
    if config.kernels.loss == "plain":
        raise UserError("a dry run does not know kernels.loss=plain: its logits are not in the plan")
    config.accumulation(config.data_parallel(world_size))


class _Run:
    """The parts of a training run that hold or send something."""

    def __init__(self, config: Config, grid: Grid, counting: Counting):
        self.config, self.grid, self.counting = config, grid, counting
        self.blueprint = Blueprint(config, grid)
        self.engine = start_engine(self.blueprint, partial(make_optimizer, fused=True))
        counting.name("parameters", _parameters(self.engine))
        counting.name("optimiser", (t for p in self.engine.pieces for t in (p.master, *p.moments.values())))
        self._name_gradients(since=0)
        self.average = WeightAverage(self.engine.pieces, config.optim.ema_decay)
        counting.name("ema", self.average.averages.values())
        self.engine.backward = self._backward(self.engine.backward)
        self.rows = 0  # projected onto the vocabulary
        self.engine.module.backbone.output.register_forward_pre_hook(self._project)
        self.started = counting.now
        self.begin()

    def begin(self) -> None:
        """Count from here on."""
        self.since, self.rows = self.counting.now, 0
        self.counting.sent.clear()

    def _project(self, output, arguments) -> None:
        self.rows += len(arguments[2])

    def _backward(self, backward):
        def named(loss: Tensor, more: bool = False) -> None:
            begun = self.counting.now
            backward(loss, more)
            self._name_gradients(begun)

        return named

    def _name_gradients(self, since: int) -> None:
        """What the engine has made and holds between passes, but for its bucket."""
        self.counting.name("gradients", _gradients(self.engine))
        for held in self.counting.alive():
            made = held.maker in ("engine", "backward") and held.bytes != 4 * REDUCE_BUCKET
            if held.born > since and made and not held.saved:
                held.part = held.part or "gradients"

    def step(self) -> None:
        """As the training loop's, but for the data."""
        config, grid = self.config, self.grid
        rows = synthetic(config, config.train.micro_batch, grid.data_rank)
        count = tqdm(range(config.accumulation(grid.data_size)), desc="micro-batches", disable=None)
        sums = add_gradients(self.engine, (next(rows).ids for _ in count), None, 0, config, grid)
        if self.engine.local:
            grid.all_agree(True)
        sums.add(dict.fromkeys(("asked", "unsaved", "replaced"), torch.zeros(())))  # as the loop's
        sums.reduced(grid)
        self.engine.step(True)
        self.average.update()

    def result(self, steps: int) -> dict:
        config, grid = self.config, self.grid
        parameters = Parameters(config)
        memory_now = memory(config, parameters, Device("cpu", 0.0), grid.data_size)
        start = sum(one.bytes for one in self.counting.at_peak(0, self.started))
        held = Counter()
        for one in self.counting.at_peak(self.since, self.counting.now):
            held[_part(one)] += one.bytes
        planned = traffic(config, parameters, grid.data_size, self.rows / steps)
        return {
            "world_size": dist.get_world_size(),
            "rank": dist.get_rank(),
            "data_rank": grid.data_rank,
            "tensor_rank": grid.tensor_rank,
            "accumulation": config.accumulation(grid.data_size),
            "how": _in_words(config, grid),
            "parameters": {
                "model": self.blueprint.parameters,
                "tensor_rank": parameters.of_rank(grid.tensor_size),
                "masters": sum(len(piece.master) for piece in self.engine.pieces),
            },
            "shapes": self._shapes(),
            "memory_bytes": dict(held) | {"total": held.total()},
            "planned_memory_bytes": memory_now | {"total": sum(memory_now.values())},
            "start_bytes": start,
            "collectives": _beside(self._sent(steps), planned),
            "projected_rows": self.rows / steps,
            "convention": CONVENTION,
        }

    def _shapes(self) -> dict[str, dict]:
        """Each parameter's shape, that of a tensor-parallel rank's part, the size of this rank's master."""
        masters = {piece.name: len(piece.master) for piece in self.engine.pieces}
        return {
            name: {"whole": layout.shape, "tensor_rank": layout.held, "masters": masters.get(name, 0)}
            for name, layout in self.blueprint.layouts.items()
        }

    def _sent(self, steps: int) -> list[Collective]:
        counts = {}
        for (kind, ranks, maker, single), (calls, size) in self.counting.sent.items():
            group = self._group(ranks, maker)
            key = kind, group, _purpose(kind, group, maker, single), len(ranks)
            before = counts.get(key, (0, 0))
            counts[key] = before[0] + calls, before[1] + size
        return [
            Collective(kind, group, part, calls / steps, size / steps, ranks)
            for (kind, group, part, ranks), (calls, size) in counts.items()
        ]

    def _group(self, ranks: tuple[int, ...], maker: str) -> str:
        if maker == "grid":
            return "world"
        if self.grid.tensor_size > 1 and ranks == tuple(dist.get_process_group_ranks(self.grid.tensor_group)):
            return "tensor"
        if len(ranks) > self.grid.data_size:
            return "world"
        if len(ranks) == self.grid.data_size:
            return "data"
        shards = self.config.parallel.shard_group
        neighbours = ranks[1] - ranks[0] == self.grid.tensor_size
        return "shards" if len(ranks) == shards and neighbours else "copies"


def _in_words(config: Config, grid: Grid) -> str:
    parallel, train = config.parallel, config.train
    return (
        f"{parallel.engine}, ZeRO {parallel.zero_stage}, {train.precision}, "
        f"{config.accumulation(grid.data_size)} micro-batches of {train.micro_batch} a step, "
        f"samples {train.two_samples}, recompute {train.recompute}"
    )


def _parameters(engine) -> list[Tensor]:
    """What the network computes with: of ZeRO 3 this rank's share, of FSDP2 its shards."""
    found = []
    for parameter in engine.module.parameters():
        parameter = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        found += [parameter.ds_tensor] if hasattr(parameter, "ds_tensor") else [parameter]
    return found


def _gradients(engine) -> list[Tensor]:
    gradients = [parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None]
    of_zero3 = getattr(getattr(engine, "engine", None), "optimizer", None)
    flat = getattr(of_zero3, "grad_partitions_flat_buffer", None)
    local = [g.to_local() if hasattr(g, "to_local") else g for g in gradients]
    return local if flat is None else [*local, flat]


def _part(held: Held) -> str:
    """Which of the planner's parts of memory it belongs to."""
    if held.part:
        return held.part
    if held.maker == "engine":
        return "communication"
    if held.saved:
        return "activations"
    return {"loss": "loss_chunk", "update": "update", "norm": "update", "average": "update"}.get(
        held.maker, "backward"
    )


def _purpose(kind: str, group: str, maker: str, single: bool) -> str:
    """See `Collective.part`."""
    if group == "world":
        return "metrics"
    if kind == "broadcast":
        return "order"
    if maker == "norm" or single:
        return "norm"
    if group == "tensor":
        return "loss" if maker == "loss" else "activations"
    return "weights" if kind == "all_gather" else "gradients"


def _beside(counted: list[Collective], planned: list[Collective]) -> list[dict]:
    """Rows of what was counted, and of what the formula says; the largest first."""
    rows = {}
    for name, found in (("", counted), ("planned_", planned)):
        for one in found:
            key = one.kind, one.group, one.part
            row = rows.setdefault(
                key,
                {"kind": one.kind, "group": one.group, "part": one.part, "ranks": one.ranks}
                | dict.fromkeys(("calls", "bytes", "planned_calls", "planned_bytes"), 0),
            )
            row[name + "calls"] += one.calls
            row[name + "bytes"] += one.bytes
    return sorted(rows.values(), key=lambda row: -row["bytes"])


def lines(result: dict) -> list[str]:
    """For people."""
    parameters, memory_now, planned = (
        result[key] for key in ("parameters", "memory_bytes", "planned_memory_bytes")
    )
    out = [
        f"dry run of rank {result['rank']} of {result['world_size']} (data-parallel {result['data_rank']}, "
        f"tensor-parallel {result['tensor_rank']}): {result['how']}",
        f"parameters: {parameters['model']:,} in all, {parameters['tensor_rank']:,} of a tensor-parallel "
        f"rank, {parameters['masters']:,} masters here",
        "",
        f"{'MiB at the peak of a step':28}{'counted':>12}{'planned':>12}",
    ]
    for part in [*dict.fromkeys([*planned, *memory_now])]:
        if memory_now.get(part) or planned.get(part):
            out.append(
                f"  {part:26}{memory_now.get(part, 0) / MIB:12,.2f}{planned.get(part, 0) / MIB:12,.2f}"
            )
    out += [
        f"  (while it starts: {result['start_bytes'] / MIB:,.2f})",
        f"  not in it: {'; '.join(LEFT_OUT)}",
        "",
        f"{'collectives of a step':40}{'ranks':>6}{'calls':>10}{'bytes':>18}{'planned':>18}{'off by':>9}",
    ]
    for row in result["collectives"]:
        name = f"{row['kind']} of {row['part']}, {row['group']}"
        off = f"{row['planned_bytes'] / row['bytes'] - 1:+.2%}" if row["bytes"] else "-"
        out.append(
            f"  {name:38}{row['ranks']:6}{row['calls']:10,.1f}{row['bytes']:18,.0f}"
            f"{row['planned_bytes']:18,.0f}{off:>9}"
        )
    return out
