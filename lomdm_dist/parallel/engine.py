"""A model built, spread over the grid, and filled, without any process holding the whole of it.

An engine is one of two classes, `DeepSpeed` (zero.py) and `Fsdp2` (fsdp2.py), alike in use:

    engine(function, ...)         a forward pass of the model, as `LoMDM.forward`
    engine.backward(loss, more)   add the gradients of a loss, over the ranks their mean; `more` says that
                                  more of the same parameters follow in this micro-batch
    engine.step(good)             once a step: clip each parameter group, update; returns their norms before
                                  clipping. Where one is no number, or on any rank not `good`, the gradients
                                  go and nothing changes
    engine.local                  whether the ranks compute by themselves until the step
    engine.drop()                 if so: forget the gradients of the step so far
    engine.pieces                 the float32 master weights and moments that live here (layout.py)
    engine.fill(read)             set the weights: `read` fills the masters of pieces
    engine.module, .optimizer     the model, and the AdamW at work on the masters
"""

from collections.abc import Callable
from functools import partial

import torch

from lomdm_dist.config import Config
from lomdm_dist.model import LoMDM
from lomdm_dist.model.initial import draw_start, starts
from lomdm_dist.model.kernels import choose_kernels
from lomdm_dist.parallel.grid import Grid
from lomdm_dist.parallel.layout import Piece, whole_layouts


class Blueprint:
    """A model on the meta device, split over the tensor-parallel ranks: shapes and no memory."""

    def __init__(self, config: Config, grid: Grid):
        self.config, self.grid = config, grid
        with torch.device("meta"):
            self.model = LoMDM(config.model, config.objective, config.data.attend)
        self.kernels = choose_kernels(self.model, config, grid.device)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.starts = starts(self.model)
        self.layouts = whole_layouts(self.model)
        if grid.tensor_size > 1:
            from lomdm_dist.parallel.tensor import split  # imports Megatron's layers, which takes a second

            self.layouts = split(self.model, grid, config.parallel.sequence_parallel)

    def draw(self, pieces: list[Piece], seed: int) -> None:
        """Fill the masters of the pieces with the weights that a new model of this seed starts with."""
        for piece in pieces:
            piece.master.zero_()  # padding
            for box in piece.boxes():
                part = piece.master[box.start : box.start + box.numel]
                index = partial(box.index, piece.layout.shape, device=part.device)
                draw_start(part, seed, piece.name, self.starts[piece.name], index)


class Alone:
    """A model in one process, its gradients where torch puts them: for measuring and for tests."""

    def __init__(self, model: LoMDM):
        self.module = model

    def __call__(self, function: Callable, *arguments):
        return self.module(function, *arguments)

    def backward(self, loss: torch.Tensor, more: bool = False) -> None:
        loss.backward()


def start_engine(blueprint: Blueprint, make_optimizer: Callable):
    """The engine that the config names, its weights not yet set, AdamW's moments and step 0.

    make_optimizer(model, config.optim) -> AdamW over its parameters.
    """
    if blueprint.config.parallel.engine == "fsdp2":
        from lomdm_dist.parallel.fsdp2 import Fsdp2 as Engine
    else:
        from lomdm_dist.parallel.zero import DeepSpeed as Engine
    return Engine(blueprint, make_optimizer)
