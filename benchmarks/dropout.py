"""What keyed dropout costs: a share of a training step, beside torch's own dropout and none.

    python benchmarks/dropout.py [--rounds 15] [--json FILE]

A step is forward and backward of a stack of plain transformer blocks (norm, attention, MLP, two gated
residuals). There is no embedding, projection onto the vocabulary or optimiser, so the share of a real
step is smaller. The three ways are measured in turn, one after the other in every round, and the order
turns from round to round; a share is the median over rounds of the difference to `none` of the same
round, over the median of `none`. The operation is timed by itself as well: what it takes, times how
often a step has it, is the steadier measure where others use the machine. One thread on a CPU, float32;
on a GPU larger batches, bf16, and the compiled operation.
"""

import argparse
import statistics
import time
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lomdm_dist import machine
from lomdm_dist.ops.dropout import keyed_mask, residual_dropout, row_keys

RATE, SECONDS = 0.1, 0.3  # a measurement repeats a step for at least so long
WAYS = "none", "native", "keyed"
GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32)


class Shape(NamedTuple):
    width: int
    heads: int
    length: int
    batch: int
    blocks: int


SHAPES = [Shape(768, 12, 1024, 32 if GPU else 1, 2), Shape(96, 3, 64, 512 if GPU else 8, 3)]
CALL = 8192, 768  # rows and width of the operation by itself


def residual(way: str, x: Tensor, mixed: Tensor, gate: Tensor, rows: Tensor, branch: int) -> Tensor:
    if way == "none":
        return x + gate * mixed
    return residual_dropout(x, mixed, gate, RATE, rows if way == "keyed" else None, branch)


class Block(nn.Module):
    """x [N, D] -> [N, D]; pre-norm, full attention."""

    def __init__(self, shape: Shape, number: int):
        super().__init__()
        width, self.shape, self.number = shape.width, shape, number
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )
        self.gate1, self.gate2 = (nn.Parameter(torch.ones(1, width)) for _ in range(2))

    def attention(self, x: Tensor) -> Tensor:
        _, heads, length, batch, _ = self.shape
        q, k, v = self.qkv(x).view(batch, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))

    def forward(self, x: Tensor, rows: Tensor, way: str) -> Tensor:
        x = residual(way, x, self.attention(self.norm1(x)), self.gate1, rows, 2 * self.number)
        return residual(way, x, self.mlp(self.norm2(x)), self.gate2, rows, 2 * self.number + 1)


def step(blocks: nn.ModuleList, x: Tensor, sequence_keys: Tensor, length: int, way: str) -> None:
    rows = row_keys(sequence_keys, length) if way == "keyed" else None
    for block in blocks:
        x = block(x, rows, way)
    x.sum().backward()


def seconds(function, repeats: int) -> float:
    """Of one call of the function."""
    if GPU:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        function()
    if GPU:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def compare(function, rounds: int) -> dict:
    """Seconds of function(way=...) in every round, by way, and the two shares."""
    for way in WAYS:
        seconds(partial(function, way=way), 2)  # compiles, and fills the allocator
    repeats = 1 + int(SECONDS / seconds(partial(function, way="none"), 1))
    taken = {way: [] for way in WAYS}
    for turn in range(rounds):
        for way in WAYS[turn % 3 :] + WAYS[: turn % 3]:
            taken[way].append(seconds(partial(function, way=way), repeats))
    none = statistics.median(taken["none"])

    def share(way: str, other: str) -> float:
        return statistics.median(a - b for a, b in zip(taken[way], taken[other], strict=True)) / none

    shares = {f"{way}_share": share(way, "none") for way in ("native", "keyed")}
    return {"seconds": taken, **shares, "keyed_minus_native_share": share("keyed", "native")}


def draw(*size: int) -> Tensor:
    return torch.randn(size, device=DEVICE, dtype=DTYPE)


def by_itself(N: int, width: int, rounds: int) -> dict:
    """Forward and backward of one residual."""
    leaves = [tensor.requires_grad_() for tensor in (draw(N, width), draw(N, width), draw(1, width))]
    grad, rows = draw(N, width), row_keys(torch.randint(2**62, (1,), device=DEVICE), N)

    def call(way: str) -> None:
        torch.autograd.grad(residual(way, *leaves, rows, 0), leaves, grad)

    return compare(call, rounds)


def check() -> None:
    """The operation as measured obeys the plain mask; where it is compiled, this is what shows it."""
    rows = row_keys(torch.arange(4, device=DEVICE), 256)
    zeros, ones = torch.zeros(1024, 96, device=DEVICE), torch.ones(1024, 96, device=DEVICE)
    found = residual_dropout(zeros, ones, ones[:1], RATE, rows, 5)
    torch.testing.assert_close(found, keyed_mask(rows, 5, 96, RATE) / (1 - RATE))


def table(title: str, result: dict) -> None:
    print(f"\n{title}\n\n| | ms | range | over none |\n|---|---|---|---|")
    for way, taken in result["seconds"].items():
        share = f"{result[way + '_share']:+.2%}" if way != "none" else ""
        median, low, high = (1e3 * f(taken) for f in (statistics.median, min, max))
        print(f"| {way} | {median:,.2f} | {low:,.2f} .. {high:,.2f} | {share} |")
    print(f"\nkeyed minus native, over none: {result['keyed_minus_native_share']:+.2%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    check()
    where = torch.cuda.get_device_name() if GPU else machine.cpu()
    print(f"{where}, torch {torch.__version__}, {DTYPE}, rate {RATE}, {options.rounds} rounds")

    steps = []
    for shape in SHAPES:
        blocks = nn.ModuleList(Block(shape, k) for k in range(shape.blocks)).to(DEVICE, DTYPE)
        N = shape.batch * shape.length
        x = draw(N, shape.width)
        keys = torch.randint(2**62, (shape.batch,), device=DEVICE)
        result = compare(partial(step, blocks, x, keys, shape.length), options.rounds)
        table(", ".join(f"{name} {value}" for name, value in shape._asdict().items()), result)
        call, count = by_itself(N, shape.width, options.rounds), 2 * shape.blocks
        table(f"the operation by itself, forward and backward, {[N, shape.width]}", call)
        lone, whole = (statistics.median(found["seconds"]["none"]) for found in (call, result))
        shares = {way: count * call[f"{way}_share"] * lone / whole for way in WAYS[1:]}
        print(f"\n{count} of these a step, over a step of none:", end=" ")
        print(", ".join(f"{way} {share:+.2%}" for way, share in shares.items()), flush=True)
        steps.append(shape._asdict() | result | {"call": call, "shares_by_calls": shares})
    result = by_itself(*CALL, options.rounds)
    table(f"the operation by itself, forward and backward, {list(CALL)}", result)
    config = {"rate": RATE, "rounds": options.rounds, "dtype": str(DTYPE), "threads": 1}
    machine.write_result(options.json, {"steps": steps, "call": {"shape": CALL, **result}}, config)


if __name__ == "__main__":
    main()
