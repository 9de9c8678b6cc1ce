"""`auto` in the config: what the planner chooses for the devices at hand, and chooses again after one try."""

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from lomdm_dist.config import Config
from lomdm_dist.parallel.grid import Grid, place_on_machine
from lomdm_dist.study.plan import CHOSEN, Calibration, Plan, device_here, plan, wanted


def fit(
    config: Config, grid: Grid, before: Plan | None = None, calibration: Calibration | None = None
) -> Plan:
    """The plan for all ranks: of the device with the least free memory, and the largest factors of any."""
    fixed = tuple(key for key in CHOSEN if key not in wanted(config))
    if before is None:
        _, processes = place_on_machine()
        here = device_here(processes)
        device = replace(here, memory_gib=min(grid.gather(here.memory_gib)))
    else:
        device = before.device
    if calibration is not None:
        of_all = grid.gather((calibration.compute, calibration.activations))
        calibration = Calibration(*(max(factors) for factors in zip(*of_all, strict=True)))
    return plan(config, grid.data_size * grid.tensor_size, device, calibration, fixed)


def probe(run_one: Callable[[], None]) -> tuple[float, int]:
    """Seconds and peak memory in bytes of a micro-batch on a GPU: the second of two."""
    run_one()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    run_one()
    torch.cuda.synchronize()
    return time.perf_counter() - start, torch.cuda.max_memory_allocated()
