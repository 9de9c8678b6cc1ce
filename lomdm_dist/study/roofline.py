"""Seconds of a training step on GPUs, from its operations, bytes and collectives: a roofline.

A matrix product is computed at a share of the peak and moves its three matrices once; pointwise operations
run at the memory's bandwidth; a block takes no less time than its kernels take to start; a collective is a
ring over the slower of a node's links and its network, and each of its calls a wait. docs/planner.md says
what the constants rest on.
"""

import math
from dataclasses import dataclass

from lomdm_dist.config import Config, ParallelConfig
from lomdm_dist.machine import Device
from lomdm_dist.model.backbone import MLP_RATIO
from lomdm_dist.model.flops import predicted_share
from lomdm_dist.model.kernels import loss_chunk
from lomdm_dist.study.memory import Parameters, network_bytes
from lomdm_dist.study.traffic import Collective, traffic

# of the device's peak, that large bf16 matrix products reach, and flash attention, forward and backward
MATMUL, ATTENTION = 0.78, 0.16
FP32 = 16  # times slower than bf16 are products in float32, without TF32
BANDWIDTH = 0.55  # of the memory's
LINK, NETWORK = 0.65, 0.85  # of the links inside a node and of its network, that collectives reach
LAUNCH = 8e-6  # seconds to start a kernel
KERNELS = 14  # of a block's forward pass; twice as many of its backward
HOOKS = {"deepspeed": 5e-4, "fsdp2": 1e-4}  # seconds of Python around a block whose parameters are gathered
AROUND = 1e-3  # seconds a pass: noise, schedules, waiting for the number of masked positions
LATENCY, HOP = 20e-6, 3e-6  # seconds of a collective's call, and of each step of its ring or tree
# Of transfers, computation hides so much with ZeRO 3 and FSDP2, and nothing elsewhere. Those inside a node
# take from it what those over the network leave alone: memory bandwidth, processors. Waits are never hidden.
HIDDEN = {"NVLink": 0.65, "network": 0.9}

RESOURCES = ("compute", "memory bandwidth", "kernel starts", "NVLink", "network", "latency", "data")
LEFT_OUT = (
    "validation, saving and restarts",
    "slow nodes, and jobs that share the network",
    "padding and documents: sequences count as full",
    "positions masked beyond their expected number",
)


@dataclass(frozen=True)
class Shape:
    """What the model of time asks of a model. Ours by default; published ones differ.

    kv     width of the keys, and of the values
    mlp    inner width of the MLP; gated: it has two matrices in
    seen   positions that a token attends to, on average
    """

    width: int
    blocks: int
    length: int
    vocab: int
    kv: int
    mlp: int
    gated: bool
    seen: float

    @classmethod
    def of(cls, config: Config) -> "Shape":
        model = config.model
        seen = model.length / 2 if config.objective.name == "ar" else model.length
        mlp = MLP_RATIO * model.width
        return cls(model.width, model.blocks, model.length, model.vocab_size, model.width, mlp, False, seen)

    def products(self, ranks: int) -> list[tuple[float, float]]:
        """[width in, width out] of a block's matrices on one of so many tensor-parallel ranks."""
        inner = (2 if self.gated else 1) * self.mlp
        return [
            (self.width, (self.width + 2 * self.kv) / ranks),
            (self.width / ranks, self.width),
            (self.width, inner / ranks),
            (self.mlp / ranks, self.width),
        ]


@dataclass(frozen=True)
class Seconds:
    """The seconds of a step; `by` has the same by what takes them (RESOURCES)."""

    compute: float  # forward and backward of all micro-batches
    update: float  # clipping, AdamW, EMA
    communication: float  # what computation does not hide
    data: float  # waiting for sequences
    by: dict[str, float]

    @property
    def step(self) -> float:
        return self.compute + self.update + self.communication + self.data

    @property
    def limit(self) -> str:
        """What keeps it from being faster: computing, if that is half of it, or the largest of the rest."""
        rest = {name: seconds for name, seconds in self.by.items() if name != "compute"}
        return "compute" if 2 * self.by["compute"] >= self.step else max(rest, key=rest.get)


class Work:
    """Seconds on the device so far, by what takes them."""

    def __init__(self, config: Config, gpu: Device):
        self.peak = gpu.peak_flops / (FP32 if config.train.precision == "fp32" else 1)
        self.bandwidth, self.size = gpu.bandwidth * BANDWIDTH, network_bytes(config)
        self.by = dict.fromkeys(RESOURCES, 0.0)

    def product(self, rows: float, width_in: float, width_out: float, times: float = 1.0) -> None:
        self.by["compute"] += times * 2 * rows * width_in * width_out / (self.peak * MATMUL)
        moved = rows * width_in + width_in * width_out + rows * width_out
        self.move(times * self.size * moved)

    def attend(self, flops: float) -> None:
        self.by["compute"] += flops / (self.peak * ATTENTION)

    def move(self, size: float) -> None:
        self.by["memory bandwidth"] += size / self.bandwidth

    def start(self, seconds: float) -> None:
        self.by["kernel starts"] += seconds

    def add(self, other: "Work", times: float = 1.0) -> None:
        for name, seconds in other.by.items():
            self.by[name] += times * seconds

    @property
    def seconds(self) -> float:
        return sum(self.by.values())


def step_seconds(
    config: Config,
    parameters: Parameters,
    gpu: Device,
    data_parallel: int,
    compute_scale: float = 1.0,
    data: float = 0.0,
    shape: Shape | None = None,
    collectives: list[Collective] | None = None,
) -> Seconds:
    """One optimiser step. shape and collectives are the config's own, unless given.

    compute_scale  what a probe of the device said of `compute`
    data           seconds a sequence of a rank, that it said reading takes
    """
    if collectives is None:
        collectives = traffic(config, parameters, data_parallel)
    sequences = config.train.global_batch // data_parallel
    mine = parameters.of_rank(config.parallel.tensor_parallel)
    shard = config.parallel.shard_group or data_parallel
    work, update = Work(config, gpu), Work(config, gpu)
    micro_batches = sequences // config.train.micro_batch
    work.add(_micro_batch(config, gpu, shape or Shape.of(config)), micro_batches)
    work.move(micro_batches * 10 * mine * config.passes[0])  # gradients read, and added in float32
    # AdamW 28, EMA 12, the copy for the network and the norm 6 bytes; gradients set to zero
    update.move(46 * (mine if config.parallel.zero_stage == 0 else mine / shard) + 4 * mine)
    compute = compute_scale * work.seconds
    waits = _communication(config, gpu, collectives, compute)
    by = {name: compute_scale * work.by[name] + update.by[name] + waits[name] for name in RESOURCES}
    by["data"] += sequences * data
    return Seconds(compute, update.seconds, sum(waits.values()), sequences * data, by)


def _micro_batch(config: Config, gpu: Device, shape: Shape) -> Work:
    """Forward and backward of one micro-batch."""
    objective, work = config.objective, Work(config, gpu)
    learned = objective.name == "lomdm"
    head = learned and objective.head == "transformer"
    of_phi = config.train.micro_batch * config.model.length
    passes, samples = config.passes
    tokens = samples * of_phi
    for _ in range(passes):
        work.add(_block(config, gpu, shape, tokens), shape.blocks + head)
        work.add(_loss(config, gpu, shape, tokens))
        work.start(AROUND)
    if learned:  # the features of the clean text, and phi on them
        whole = _block(config, gpu, shape, of_phi)
        features = _pass(config, gpu, shape, of_phi) if objective.stop_gradient else whole
        work.add(features, shape.blocks)
        work.add(whole, head)
        work.start(AROUND)
    return work


def _block(config: Config, gpu: Device, shape: Shape, tokens: int) -> Work:
    """Forward, backward, and what is computed again."""
    work = _pass(config, gpu, shape, tokens)
    work.add(_pass(config, gpu, shape, tokens, 2, 2.5))
    again = {"none": None, "attention": 1 / 3, "block": 1.0}[config.train.recompute]
    if again:
        work.add(_pass(config, gpu, shape, tokens, again, 1))
    return work


def _pass(config: Config, gpu: Device, shape: Shape, tokens: int, times=1.0, attention_times=1.0) -> Work:
    """One block on `tokens`: its products and pointwise operations `times`, attention `attention_times`."""
    ranks, parallel, work = config.parallel.tensor_parallel, config.parallel, Work(config, gpu)
    for width_in, width_out in shape.products(ranks):
        work.product(tokens, width_in, width_out, times)
    work.attend(attention_times * 4 * shape.width * shape.seen * tokens / ranks)
    # each read or write of [N, D]: two norms and two residuals 10; rotary 4 and the MLP's activation 8, split
    between = 10 * shape.width / (ranks if parallel.sequence_parallel else 1)
    inner = 2 * (shape.width + shape.kv) + (3 if shape.gated else 2) * shape.mlp
    work.move(times * (between + inner / ranks) * tokens * network_bytes(config))
    hooks = HOOKS[parallel.engine] if parallel.zero_stage == 3 or parallel.engine == "fsdp2" else 0.0
    work.start(max(0.0, times * KERNELS * LAUNCH + hooks - work.seconds))  # the device waits for the host
    return work


def _loss(config: Config, gpu: Device, shape: Shape, tokens: int) -> Work:
    """Three products a chunk; logits are read and written a few times, the weights' gradient is added up."""
    rows, part = predicted_share(config.objective) * tokens, shape.vocab / config.parallel.tensor_parallel
    chunk = min(rows, loss_chunk(config, gpu.type))
    work = Work(config, gpu)
    work.product(chunk, shape.width, part, 3 * rows / chunk)
    work.move(16 * part * rows + 12 * part * shape.width * max(1.0, rows / chunk))
    return work


def _communication(config: Config, gpu: Device, collectives: list[Collective], compute: float) -> dict:
    """Seconds that computation does not hide, by what takes them.

    It waits for all of the tensor-parallel ranks'; of the data-parallel ones' a share shows, or what is
    longer than it.
    """
    parallel, tensor, data = config.parallel, dict.fromkeys(RESOURCES, 0.0), dict.fromkeys(RESOURCES, 0.0)
    for collective in collectives:
        group = tensor if collective.group == "tensor" else data
        for name, seconds in _taken(collective, parallel, gpu).items():
            group[name] += seconds
    if parallel.zero_stage == 3 or parallel.engine == "fsdp2":
        total = sum(data.values())
        data = {name: (1 - HIDDEN.get(name, 0.0)) * seconds for name, seconds in data.items()}
        longer = max(1.0, (total - compute) / (sum(data.values()) or 1.0))
        data = {name: longer * seconds for name, seconds in data.items()}
    return {name: tensor[name] + data[name] for name in RESOURCES}


def _taken(collective: Collective, parallel: ParallelConfig, gpu: Device) -> dict[str, float]:
    """Seconds of all its calls: bytes over the slowest part of the way, and the calls themselves."""
    ranks, reduced = collective.ranks, collective.kind == "all_reduce"
    if ranks == 1:
        return {}
    moved = (2 if reduced else 1) * (ranks - 1) / ranks * collective.bytes
    hops = 2 * math.log2(ranks) if reduced else ranks - 1  # a tree, a ring
    waits = {"latency": collective.calls * (LATENCY + hops * HOP)}
    apart = (
        1 if collective.group in ("tensor", "world") else parallel.tensor_parallel
    )  # from rank to next rank
    if collective.group == "copies":
        apart *= parallel.shard_group
    beside = max(1, gpu.a_node // apart)  # of the group, in one node
    link = moved / (gpu.link * LINK)
    # the ring enters a node once, by the network adapters of all its ranks there
    network = moved / (beside * gpu.network * NETWORK) if ranks > beside else 0.0
    return waits | ({"network": network} if network > link else {"NVLink": link})
