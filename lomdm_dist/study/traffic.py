"""What one rank sends and receives in an optimiser step, by formula: collectives, their bytes and calls.

`lomdm train --dry-run` counts the same in the engines themselves and prints both.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from lomdm_dist.config import Config
from lomdm_dist.model.flops import predicted_share
from lomdm_dist.model.kernels import loss_chunk
from lomdm_dist.parallel.zero import REDUCE_BUCKET
from lomdm_dist.study.memory import WHOLE_BUCKET, Parameters, network_bytes
from lomdm_dist.study.zero3 import gathered

SUMS = 12  # numbers that a step's metrics are made of
ALIGNED = 2  # elements a rank that DeepSpeed fills its flat tensors up to


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind and purpose in one step of one rank.

    kind   all_reduce, all_gather, reduce_scatter, broadcast
    group  data: the data-parallel ranks; shards, copies: those of `parallel.shard_group`; tensor; world
    part   gradients, weights, activations (and the gradients of what tensor-parallel ranks share), loss
           (statistics of a vocabulary in parts), norm (and checks of it), metrics. Not in the formula, nor
           in a dry run, and few bytes: order, with which ZeRO 3 compares what its ranks have recorded
    calls  in the step
    bytes  of the whole tensors: what is reduced, or what is there when it is gathered. A ring of n ranks
           moves (n - 1) / n of that over each link, an all_reduce twice that
    ranks  of the group
    """

    kind: str
    group: str
    part: str
    calls: float
    bytes: float
    ranks: int


def traffic(
    config: Config, parameters: Parameters, data_parallel: int, rows: float | None = None
) -> list[Collective]:
    """The collectives of an optimiser step, but those of one rank. bfloat16 counts 2 bytes, float32 4.

    rows: positions that this rank projects onto the vocabulary in the step; by default those expected.
    """
    found = [*_of_tensors(config, data_parallel, rows), *_of_data(config, parameters, data_parallel)]
    found += _norms(config, data_parallel)
    parallel = config.parallel
    world = data_parallel * parallel.tensor_parallel
    local = parallel.engine == "deepspeed" and parallel.zero_stage < 2 and parallel.tensor_parallel == 1
    # where the ranks compute by themselves they also agree on whether one was out of memory
    found.append(Collective("all_reduce", "world", "metrics", 1 + local, 8 * (SUMS + local), world))
    return [one for one in found if one.ranks > 1 and one.calls]


def _of_data(config: Config, parameters: Parameters, ranks: int) -> Iterator[Collective]:
    if config.parallel.engine == "fsdp2":
        yield from _fsdp2(config, parameters, ranks)
    elif config.parallel.zero_stage == 3:
        yield from _zero3(config, parameters, ranks)
    else:
        yield from _zero012(config, parameters, ranks)


def _zero012(config: Config, parameters: Parameters, ranks: int) -> Iterator[Collective]:
    """0 and 1 reduce once in the step, 2 in every backward pass what that has reached."""
    stage, size = config.parallel.zero_stage, network_bytes(config)
    shapes = parameters.shapes(config.parallel.tensor_parallel)
    of_order = _elements(shapes, ORDER)
    mine = _elements(shapes, "")
    if stage == 0:
        yield Collective("all_reduce", "data", "gradients", math.ceil(mine / WHOLE_BUCKET), 4 * mine, ranks)
        return
    heads = _elements(shapes, ("phi.", "psi."))  # a group of the optimiser's, flat like the other
    flat = [_fill(part, ALIGNED * ranks) for part in (mine - heads, heads) if part]
    if stage == 1:
        buckets = math.ceil(sum(flat) / REDUCE_BUCKET)
        yield Collective("all_reduce", "data", "gradients", buckets, 4 * sum(flat), ranks)
    else:
        times = _accumulation(config, ranks)
        reached = [mine - of_order] * config.passes[0] + [of_order] * (of_order > 0)  # of phi's head apart
        buckets = sum(math.ceil(part / REDUCE_BUCKET) for part in reached)
        yield Collective("all_reduce", "data", "gradients", times * buckets, times * 4 * sum(reached), ranks)
    yield Collective("all_gather", "data", "weights", len(flat), size * sum(flat), ranks)


def _zero3(config: Config, parameters: Parameters, ranks: int) -> Iterator[Collective]:
    """Tensors are shared out one by one, filled up; gradients are reduced in each backward pass."""
    shapes = parameters.shapes(config.parallel.tensor_parallel)
    plain = {name: math.prod(shape) for name, shape in shapes.items()}
    sizes = {name: _fill(count, ranks) for name, count in plain.items()}
    times, size = _accumulation(config, ranks), network_bytes(config)
    calls, elements = gathered(config, plain, ranks, times)
    of_order = sum(count for name, count in sizes.items() if name.startswith(ORDER))
    reached = [sum(sizes.values()) - of_order] * config.passes[0] + [of_order] * (of_order > 0)
    buckets = sum(math.ceil(part / REDUCE_BUCKET) for part in reached)
    yield Collective("all_gather", "data", "weights", calls, size * elements, ranks)
    yield Collective("reduce_scatter", "data", "gradients", times * buckets, times * 4 * sum(reached), ranks)


ORDER = ("phi.", "token_exponents.")  # whose gradient comes through the order's leaf, after all others


def _fsdp2(config: Config, parameters: Parameters, ranks: int) -> Iterator[Collective]:
    """Units are the blocks, and all that is outside: whole for a pass, or (stage 2) until the next backward.

    Tensors are sharded by rows, filled up.
    """
    objective, size = config.objective, network_bytes(config)
    shards = config.parallel.shard_group or ranks
    group, copies = "data" if shards == ranks else "shards", ranks // shards
    shapes = {
        name: (_fill(rows, shards), *rest)
        for name, (rows, *rest) in parameters.shapes(config.parallel.tensor_parallel).items()
    }
    outside = {name: shape for name, shape in shapes.items() if ".block" not in name}
    blocks = config.model.blocks, _elements(shapes, "backbone.blocks.")
    root = 1, _elements(outside, "")
    phi, psi = (
        (1 if part else 0, part) for part in (_elements(shapes, h) for h in ("phi.block.", "psi.block."))
    )
    leaf = objective.samples == 2  # the order's outputs, through which the gradient of phi comes
    through = blocks if objective.name == "lomdm" and not objective.stop_gradient else (0, 0)
    of_order = _sum(root, phi, blocks if objective.name == "lomdm" else (0, 0))
    a_pass, n = _sum(root, blocks, psi), config.passes[0]
    if config.parallel.zero_stage == 3:
        gathered = _sum(*[of_order] * leaf, *[a_pass] * 2 * n)
    else:
        gathered = _sum(root, blocks, phi, psi, *[a_pass] * (n - 1))
    gathered = _sum(gathered, *[_sum(root, phi, through)] * leaf)
    apart = _elements(outside, ORDER)  # reduced by itself, in the leaf's backward pass
    reduced = _sum((1, root[1] - apart), blocks, psi, (1 if leaf else 0, apart), phi)
    if through[0]:
        reduced = _sum(reduced, blocks, (0, _elements(outside, ("backbone.embedding", "backbone.condition"))))
    times = _accumulation(config, ranks)
    yield Collective("all_gather", group, "weights", times * gathered[0], times * size * gathered[1], shards)
    calls, whole = times * reduced[0], times * 4 * reduced[1]
    yield Collective("reduce_scatter", group, "gradients", calls, whole, shards)
    yield Collective("all_reduce", "copies", "gradients", calls, whole / shards, copies)


def _norms(config: Config, ranks: int) -> Iterator[Collective]:
    """Those of each parameter group's norm, over who shares the gradient and the tensor-parallel ranks."""
    groups, parallel = 1 + (config.objective.name == "lomdm"), config.parallel
    bf16, stage = config.train.precision == "bf16", parallel.zero_stage
    ours = 1, 8 * groups
    shards = parallel.shard_group or ranks
    if parallel.engine == "fsdp2":
        of_data, of_tensor = (1, 16 * groups), ours
    elif stage == 0 or (stage == 1 and bf16):  # whole gradients; in bf16 DeepSpeed asks for a norm too
        of_data, of_tensor = (0, 0), (1 + stage, 8 * groups + 4 * stage)
    elif stage == 3:
        of_data = of_tensor = groups, 8 * groups
    else:  # ZeRO 2 in bf16 also asks whether a number overflowed
        check = int(stage == 2 and bf16)
        of_data = of_tensor = groups + check, 4 * groups + check
    yield Collective("all_reduce", "data" if shards == ranks else "shards", "norm", *of_data, shards)
    yield Collective("all_reduce", "tensor", "norm", *of_tensor, parallel.tensor_parallel)


def _sum(*parts: tuple[int, int]) -> tuple[int, int]:
    """The sum of (calls, elements)."""
    return sum(calls for calls, _ in parts), sum(elements for _, elements in parts)


def _elements(shapes: dict[str, tuple], start: str | tuple[str, ...]) -> int:
    return sum(math.prod(shape) for name, shape in shapes.items() if name.startswith(start))


def _fill(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _accumulation(config: Config, data_parallel: int) -> int:
    return config.train.global_batch // (data_parallel * config.train.micro_batch)


def _of_tensors(config: Config, data_parallel: int, rows: float | None) -> Iterator[Collective]:
    """Tensor-parallel ranks: Megatron's layers; with sequence parallelism a gather and a scatter, or two
    gathers, for each all-reduce."""
    ranks = config.parallel.tensor_parallel
    if ranks == 1:
        return
    objective, times, (n, samples) = config.objective, _accumulation(config, data_parallel), config.passes
    of_phi = config.train.micro_batch * config.model.length
    in_all = n * samples * of_phi  # tokens of the passes
    if rows is None:
        rows = predicted_share(objective) * in_all * times
    moves = _Moves(config)
    head = objective.name == "lomdm" and objective.head == "transformer"
    moves.embedding(in_all, n)
    moves.blocks(in_all, n, config.model.blocks + head)
    moves.leave(in_all, n, 1 + head)
    moves.output(n)
    if objective.name == "lomdm":
        through = not objective.stop_gradient
        moves.embedding(of_phi, 1, backward=through)
        moves.blocks(of_phi, 1, config.model.blocks, backward=through)
        moves.blocks(of_phi, 1, head)
        moves.leave(of_phi, 1, 1 + head)
    width, size = config.model.width, network_bytes(config)
    chunks = times * n * max(1, math.ceil(rows / (times * n) / loss_chunk(config, "cuda")))
    statistics = 2 + (objective.name == "genmd4")
    for kind, (calls, elements) in moves.counts.items():
        yield Collective(kind, "tensor", "activations", times * calls, times * size * elements, ranks)
    yield Collective("all_reduce", "tensor", "activations", times * n, size * width * rows, ranks)
    if objective.name == "genmd4":  # the gradients of its exponents
        whole = 4 * config.model.vocab_size
        yield Collective("all_reduce", "tensor", "activations", times * n, times * n * whole, ranks)
    yield Collective("all_reduce", "tensor", "loss", 2 * chunks, 4 * (1 + statistics) * rows, ranks)


class _Moves:
    """(calls, elements) of each kind of collective, added up."""

    def __init__(self, config: Config):
        self.model, self.recompute = config.model, config.train.recompute
        self.spread = config.parallel.sequence_parallel
        self.counts = {}

    def add(self, kind: str, calls: int, elements: float) -> None:
        before = self.counts.get(kind, (0, 0))
        self.counts[kind] = before[0] + calls, before[1] + calls * elements

    def embedding(self, tokens: int, passes: int, backward: bool = True) -> None:
        each = self.model.width * tokens / passes
        self.add("reduce_scatter" if self.spread else "all_reduce", passes, each)
        if self.spread and backward:
            self.add("all_gather", passes, each)

    def blocks(self, tokens: int, passes: int, count: int, backward: bool = True) -> None:
        count, each = count * passes, self.model.width * tokens / passes
        again = backward * {"none": 0, "attention": 0, "block": 1}[self.recompute]
        gathers = 4 * backward + backward * (self.recompute == "attention")
        if self.spread:
            self.add("all_gather", count * (2 + 2 * again + gathers), each)
            self.add("reduce_scatter", count * (2 + 2 * again + 2 * backward), each)
        else:
            self.add("all_reduce", count * (2 + 2 * again + 2 * backward), each)
        self.add("all_gather", count * (1 + again), 6 * self.model.width)  # shift, scale and gate, twice
        if backward:
            self.add("all_reduce", count, self.model.condition_width)
            if self.spread:
                self.add("all_reduce", 3 * count, self.model.width)  # norms and a bias, which all have
                self.add("all_reduce", count, 6 * self.model.width)

    def leave(self, tokens: int, passes: int, stacks: int) -> None:
        """Where features leave a stack of blocks, whole."""
        if self.spread:
            self.add("all_gather", stacks * passes, self.model.width * tokens / passes)

    def output(self, passes: int) -> None:
        self.add("all_gather", passes, 2 * self.model.width)
        self.add("all_reduce", passes, self.model.condition_width)
