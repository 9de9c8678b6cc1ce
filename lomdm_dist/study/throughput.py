"""Training steps through the real engine, timed: how fast a grid is, and where the time goes."""

import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from lomdm_dist import machine
from lomdm_dist.config import Config
from lomdm_dist.data.reader import Reader, Rows
from lomdm_dist.data.shards import unpack
from lomdm_dist.model.flops import seen_pairs, step_flops
from lomdm_dist.ops.phase import PHASES, listening, phase
from lomdm_dist.parallel.engine import Blueprint, start_engine
from lomdm_dist.parallel.grid import Grid, place_on_machine
from lomdm_dist.study.bench import matmul_rate, middle
from lomdm_dist.train.gradients import add_gradients
from lomdm_dist.train.optim import WeightAverage, make_optimizer, set_learning_rates

OTHER = "other"  # what no part of a step owns up to


class PhaseClock:
    """A listener of phases: the seconds of each, none of them twice. The device is waited for at each change.

    So nothing overlaps: communication that hides behind computation shows here in full.
    """

    def __init__(self, device: torch.device, now: Callable[[], float] = time.perf_counter):
        self.device, self.now, self.seconds = device, now, Counter()

    def start(self) -> None:
        self._name, self._since = None, self._time()

    def __call__(self, name: str | None) -> None:
        now = self._time()
        self.seconds[self._name or OTHER] += now - self._since
        self._name, self._since = name, now

    def _time(self) -> float:
        machine.wait_for(self.device)
        return self.now()


class Steps:
    """Training steps of one rank, as the loop of a run takes them, without what it writes and watches."""

    def __init__(self, config: Config, grid: Grid, reader: Reader | None):
        """reader None: synthetic sequences, without padding."""
        self.config, self.grid = config, grid
        self.share = config.train.global_batch // grid.data_size  # sequences of this rank in a step
        blueprint = Blueprint(config, grid)
        self.kernels, self.parameters = blueprint.kernels, blueprint.parameters
        self.engine = start_engine(blueprint, make_optimizer)
        self.engine.fill(partial(blueprint.draw, seed=config.train.seed))
        self.average = WeightAverage(self.engine.pieces, config.optim.ema_decay)
        self.pad_id = reader.first.pad_id if reader else None
        self.rows = self._read(reader) if reader else synthetic(config, self.share, grid.data_rank)
        self.projected = 0  # rows since it was last asked
        self.engine.module.backbone.output.norm.register_forward_hook(self._count_rows)

    def _read(self, reader: Reader) -> Iterator[Rows]:
        start, every = self.grid.data_rank * self.share, self.config.train.global_batch
        return reader.stream(start, every, self.share, self.config.data.workers, self.grid.device)

    def _count_rows(self, _, arguments: tuple, __) -> None:
        self.projected += len(arguments[0])

    def step(self, number: int) -> dict[str, float]:
        """One optimiser step, with the noise of this number; returns sums over all ranks."""
        config, grid = self.config, self.grid
        set_learning_rates(self.engine.optimizer, config.optim, number)
        with phase("data"):
            ids = next(self.rows).ids
        self.projected, parts = 0, ids.split(config.train.micro_batch)
        sums = add_gradients(self.engine, parts, self.pad_id, number, config, grid)
        sums.add({"pairs": self._pairs(ids), "predicted": torch.tensor(self.projected)})
        sums = sums.reduced(grid)
        self.engine.step()
        self.average.update()
        return sums

    def _pairs(self, ids: Tensor) -> Tensor:
        x, valid = unpack(ids, self.pad_id, self.grid.device)
        lengths = torch.tensor(len(x) * [x.shape[1]]) if valid is None else valid.sum(dim=1)
        return seen_pairs(lengths, self.config.objective.name == "ar").sum()


def synthetic(config: Config, count: int, rank: int) -> Iterator[Rows]:
    """Random tokens, no two ranks' alike; the mask token is not among them."""
    model, generator = config.model, torch.Generator().manual_seed(rank)
    while True:
        ids = torch.randint(model.vocab_size, (count, model.length), generator=generator)
        ids[ids == model.mask_id] = (model.mask_id + 1) % model.vocab_size
        yield Rows(ids, 0)


def pin() -> bool:
    """On a CPU each process computes on a core of its own, where there are enough; says whether it does."""
    place, processes = place_on_machine()
    if torch.cuda.is_available() or not hasattr(os, "sched_setaffinity"):
        return False
    cores = sorted(os.sched_getaffinity(0))
    if processes > len(cores):
        return False
    os.sched_setaffinity(0, {cores[place]})
    torch.set_num_threads(1)
    return True


def measure(config: Config, grid: Grid, reader: Reader | None, steps: int, warmup: int) -> dict:
    """A row: the speed of this grid, the seconds by phase, the peak memory of a rank.

    Each step is taken twice with the same noise, plainly and with the clock, which waits for the device
    at each change of phase: what is said of the step's speed is of the plain ones.
    """
    if config.parallel.engine == "deepspeed":
        from lomdm_dist.parallel.zero import import_deepspeed

        import_deepspeed(grid)  # its memory is not the model's
    before = machine.peak_memory()
    run = Steps(config, grid, reader)
    plain, clocked, totals = [], [], Counter()
    for number in range(warmup + steps):
        for with_clock in (False, True) if number % 2 else (True, False):
            seconds, sums = _clocked(run, number) if with_clock else _timed(run, number)
            if number >= warmup:
                (clocked if with_clock else plain).append(seconds)
                totals.update({} if with_clock else sums)
    run.rows.close()
    of_ranks = grid.gather((plain, _middle(clocked), machine.peak_memory() - before))
    counts = {name: totals[name] / steps for name in ("tokens", "pairs", "predicted")}
    flops = step_flops(config, **counts, micro_batches=config.train.global_batch // config.train.micro_batch)
    return _row(config, grid, run, of_ranks, counts, flops) | {
        "data": "synthetic" if reader is None else "config"
    }


def _timed(run: Steps, number: int) -> tuple[float, dict]:
    machine.wait_for(run.grid.device)
    start = time.perf_counter()
    sums = run.step(number)
    machine.wait_for(run.grid.device)
    return time.perf_counter() - start, sums


def _clocked(run: Steps, number: int) -> tuple[Counter, dict]:
    clock = PhaseClock(run.grid.device)
    with listening(clock):
        clock.start()
        sums = run.step(number)
        clock(None)
    return clock.seconds, sums


def _middle(steps: list[Counter]) -> Counter:
    """The mean over the middle half of the steps, by their length: of these the phases add up."""
    ordered = sorted(steps, key=lambda seconds: seconds.total())
    quarter = len(ordered) // 4
    kept = ordered[quarter : len(ordered) - quarter]
    total = sum(kept, Counter())
    return Counter({name: seconds / len(kept) for name, seconds in total.items()})


def _row(config: Config, grid: Grid, run: Steps, of_ranks: list, counts: dict, flops: float) -> dict:
    """of_ranks: of each its seconds of each step, its seconds by phase, its peak memory."""
    ranks = len(of_ranks)
    seconds = [statistics.fmean(step) for step in zip(*(rank[0] for rank in of_ranks), strict=True)]
    taken, spread = middle(seconds)
    phases = {
        name: statistics.fmean(rank[1][name] for rank in of_ranks)
        for name in (*PHASES, OTHER)
        if any(name in rank[1] for rank in of_ranks)
    }
    rate, peak = flops / taken / ranks, machine.peak_flops()
    on_gpu = grid.device.type == "cuda"
    matmul = None if on_gpu else matmul_rate(config, grid.device)
    return {
        "ranks": ranks,
        "device": torch.cuda.get_device_name(grid.device) if on_gpu else "cpu",
        "parameters": run.parameters,
        "global_batch": config.train.global_batch,
        "micro_batch": config.train.micro_batch,
        "step_seconds": taken,
        "spread": spread,
        "phases": phases,
        "phases_sum": sum(phases.values()),
        "tokens_per_second": counts["tokens"] / taken,
        "tokens_per_second_per_gpu": counts["tokens"] / taken / ranks,
        "tflops_per_gpu": rate / 1e12,
        "mfu": rate / peak if peak else None,
        "share_of_matmul_rate": rate / matmul if matmul else None,
        "peak_memory_bytes": max(rank[2] for rank in of_ranks),
        "flops": flops,
        **counts,
        "kernels": run.kernels,
        "error": None,
    }
