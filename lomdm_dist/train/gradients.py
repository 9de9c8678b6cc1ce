"""The gradients of a step: those of its micro-batches, added up, and the sums of what is logged of them."""

from collections.abc import Iterable

import torch
from torch import Tensor

from lomdm_dist.config import Config
from lomdm_dist.data.shards import unpack
from lomdm_dist.ops.phase import phase
from lomdm_dist.parallel.grid import Grid
from lomdm_dist.train.step import backpropagate, draw_noise


class StepSums:
    """Sums over the micro-batches of a step, added over ranks as one vector."""

    def __init__(self):
        self._sums: dict[str, Tensor] = {}

    def add(self, stats: dict[str, Tensor]) -> None:
        """Scalars, left on their device: nothing waits for a GPU here."""
        for name, value in stats.items():
            self._sums[name] = self._sums.get(name, 0) + value.double()

    def own(self, name: str) -> float:
        """What this rank has of a sum."""
        return float(self._sums[name])

    @phase("reduction")
    def reduced(self, grid: Grid) -> dict[str, float]:
        vector = torch.stack([value.to(grid.device) for value in self._sums.values()])
        return dict(zip(self._sums, grid.sum(vector).tolist(), strict=True))


def add_gradients(
    engine, micro_batches: Iterable[Tensor], pad_id: int | None, step: int, config: Config, grid: Grid
) -> StepSums:
    """Those of this rank's part of the global batch, which comes in micro-batches [n, length], as stored."""
    sums, share = StepSums(), config.train.global_batch // grid.data_size
    first = grid.data_rank * share  # in the global batch
    engine.module.train()
    for ids in micro_batches:
        with phase("data"):
            x, valid = unpack(ids, pad_id, grid.device)
        noise = draw_noise(config, step, torch.arange(first, first + len(ids)), grid.device)
        sums.add(backpropagate(engine, x, valid, noise, config, len(ids) / share))
        first += len(ids)
    return sums
