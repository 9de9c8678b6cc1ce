"""Where every parameter of a new model starts.

| parameter                                              | starts at                           |
|---|---|
| weight of a norm                                       | 1                                   |
| adaLN modulation, output matrix, outputs of the heads  | 0                                   |
| exponents of GenMD4                                    | softplus^-1(1)                      |
| any other matrix [n, m], and the bias that goes with it | uniform on +- 1/sqrt(m)            |

An element depends on (seed, name, index in the whole parameter) alone, so any part of it can be drawn by
itself, and a model that is spread over processes starts the same on any grid.
"""

import hashlib
import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from lomdm_dist.ops.hash import hashed_uniforms

CHUNK = 2**22  # elements drawn at a time


def starts(model: nn.Module) -> dict[str, tuple[float, float]]:
    """The (low, high) between which each parameter starts, by name; equal where it is a constant.

    Of a model as it is constructed, before it is split: a bound comes from the shape of a matrix.
    """
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    found = {}
    for name in shapes:
        module, _, kind = name.rpartition(".")
        owner = module.rpartition(".")[2]
        if owner.startswith("norm"):
            found[name] = (1.0, 1.0)
        elif owner in ("modulation", "output", "phi", "psi"):
            found[name] = (0.0, 0.0)
        elif kind == "theta":
            found[name] = (math.log(math.e - 1),) * 2
        else:
            bound = 1 / math.sqrt(shapes[f"{module}.weight"][1])
            found[name] = (-bound, bound)
    return found


def draw_start(
    out: Tensor, seed: int, name: str, start: tuple[float, float], index: Callable[[int, int], Tensor]
) -> None:
    """Fill `out` [n] with elements of parameter `name`.

    index(first, last): where elements first .. last of `out` lie in the whole parameter, flattened.
    """
    low, high = start
    if low == high:
        out.fill_(low)
        return
    key = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "little")
    for first in range(0, len(out), CHUNK):
        part = out[first : first + CHUNK]
        part.copy_(low + (high - low) * hashed_uniforms(key, index(first, first + len(part))))


@torch.no_grad()
def initialize(model: nn.Module, seed: int) -> None:
    """Fill all parameters of a model that is not split. One on the meta device has nothing to fill."""
    for name, start in starts(model).items():
        parameter = model.get_parameter(name)
        if parameter.is_meta:
            return
        index = partial(torch.arange, device=parameter.device)
        draw_start(parameter.view(-1), seed, name, start, index)
