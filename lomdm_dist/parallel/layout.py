"""Where the elements that a process holds lie in the whole parameters.

Whatever the grid and the engine, a process holds of each parameter: a part of one dimension (tensor
parallelism), and of that part, flattened, a range (ZeRO, FSDP2). That is all there is to know to draw
initial weights, to save and to load; nothing has to be gathered, and no form of sharding written down.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Layout:
    """How the tensor of a tensor-parallel rank lies in the whole parameter.

    shape  of the whole, as saved: q, k and v of an attention are [3, D, D], each split by heads
    dim    that is split over the ranks; None: everyone has all of it
    part   what a rank has of that dimension; the last rank's may reach beyond the end, into padding
    first  where this rank's part begins
    """

    shape: tuple[int, ...]
    dim: int | None = None
    part: int = 0
    first: int = 0

    @property
    def held(self) -> tuple[int, ...]:
        """The shape that this rank holds, padding included."""
        return tuple(self.part if k == self.dim else size for k, size in enumerate(self.shape))


def whole_layouts(model: nn.Module) -> dict[str, Layout]:
    """The layout of each parameter of a model that is not split, by name."""
    layouts = {}
    for name, parameter in model.named_parameters():
        rows, *columns = parameter.shape
        layouts[name] = Layout((3, rows // 3, *columns) if ".qkv." in name else (rows, *columns))
    return layouts


def whole_pieces(model: nn.Module) -> list["Piece"]:
    """The parameters of a model that is not split."""
    layouts = whole_layouts(model)
    return [Piece(name, layouts[name], 0, p.data.view(-1), {}) for name, p in model.named_parameters()]


@dataclass(frozen=True)
class Box:
    """A rectangle of a whole parameter: `offsets` and `sizes` in it, from element `start` of a piece on."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def index(self, shape: tuple[int, ...], first: int, last: int, device=None) -> Tensor:
        """Places of its elements first .. last in the whole parameter of that shape, flattened: int64."""
        rest, index, stride = torch.arange(first, last, device=device), 0, 1
        for size, offset, count in zip(
            reversed(shape), reversed(self.offsets), reversed(self.sizes), strict=True
        ):
            index = index + (rest % count + offset) * stride
            rest, stride = rest // count, stride * size
        return index


def boxes(layout: Layout, start: int, count: int) -> list[Box]:
    """Elements start .. start + count of what a rank holds, as rectangles of the whole, without padding."""
    found = []
    for offsets, sizes, at in _rectangles(layout.held, start, start + count):
        if layout.dim is not None:
            shift = offsets[layout.dim] + layout.first
            offsets = (*offsets[: layout.dim], shift, *offsets[layout.dim + 1 :])
            inside = min(sizes[layout.dim], layout.shape[layout.dim] - shift)
            if inside <= 0:
                continue
            sizes = (*sizes[: layout.dim], inside, *sizes[layout.dim + 1 :])
        found.append(Box(offsets, sizes, at - start))
    return found


def _rectangles(shape: tuple[int, ...], start: int, end: int) -> Iterator[tuple]:
    """The range [start, end) of a tensor in row-major order: (offsets, sizes, first element) of each."""
    if start >= end:
        return
    if len(shape) == 1:
        yield (start,), (end - start,), start
        return
    rest = shape[1:]
    row = math.prod(rest)
    (top, left), (bottom, right) = divmod(start, row), divmod(end, row)

    def part_of_row(k: int, begin: int, stop: int):
        for offsets, sizes, at in _rectangles(rest, begin, stop):
            yield (k, *offsets), (1, *sizes), k * row + at

    if top == bottom:
        yield from part_of_row(top, left, right)
        return
    if left:
        yield from part_of_row(top, left, row)
        top += 1
    if bottom > top:
        yield (top, *[0] * len(rest)), (bottom - top, *rest), top * row
    yield from part_of_row(bottom, 0, right)


@dataclass(frozen=True)
class Piece:
    """What one process holds of one parameter: elements start .. start + len(master) of its layout.

    master and AdamW's moments are flat float32 views: to write to them is to change the engine's state.
    """

    name: str
    layout: Layout
    start: int
    master: Tensor
    moments: dict[str, Tensor]

    def boxes(self) -> list[Box]:
        return boxes(self.layout, self.start, len(self.master))
