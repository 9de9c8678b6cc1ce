"""Seconds of a training step on GPUs, from its operations and bytes: a simple roofline.

Matrix products run at a share of the peak, pointwise operations at the memory's bandwidth, and a block
takes no less time than its kernels take to start. docs/planner.md says what the constants rest on.
"""

from dataclasses import dataclass

from lomdm_dist.config import Config
from lomdm_dist.machine import Device
from lomdm_dist.model.flops import predicted_share
from lomdm_dist.model.kernels import loss_chunk
from lomdm_dist.parallel.zero import REDUCE_BUCKET
from lomdm_dist.study.memory import Parameters, network_bytes

MATMUL = 0.66  # of the peak, that large bf16 matrix products reach
HALF_WIDTH, HALF_ROWS = 384, 512  # where small matrices reach half of that
ATTENTION = 0.35  # of the peak, that flash attention reaches, forward and backward
FP32 = 16  # times slower than bf16 are products in float32, without TF32
BANDWIDTH = 0.8  # of the memory's, that pointwise operations reach
LINK, NETWORK = 0.6, 0.85  # of the links inside a node and between nodes, that collectives reach
LAUNCH = 8e-6  # seconds to start a kernel
KERNELS = 14  # of a block's forward pass; twice as many of its backward
HOOKS = {"deepspeed": 5e-4, "fsdp2": 1e-4}  # seconds of Python around a block whose parameters are gathered
AROUND = 1e-3  # seconds a pass: noise, schedules, waiting for the number of masked positions
LATENCY = 20e-6  # seconds of a collective
HIDDEN = 0.75  # of communication under computation, at most, with ZeRO 3 and FSDP2; none elsewhere


@dataclass(frozen=True)
class Seconds:
    compute: float  # forward and backward of all micro-batches
    update: float  # clipping, AdamW, EMA
    communication: float  # what computation does not hide

    @property
    def step(self) -> float:
        return self.compute + self.update + self.communication


def step_seconds(
    config: Config, parameters: Parameters, gpu: Device, data_parallel: int, compute_scale: float = 1.0
) -> Seconds:
    """One optimiser step; compute_scale is what a probe of the device said of `compute`."""
    accumulation = config.train.global_batch // (data_parallel * config.train.micro_batch)
    mine = parameters.of_rank(config.parallel.tensor_parallel)
    shard = config.parallel.shard_group or data_parallel
    gradients = 10 * mine * len(_passes(config))  # read in the network's dtype, added in float32
    compute = accumulation * (_micro_batch(config, gpu) + gradients / (gpu.bandwidth * BANDWIDTH))
    compute *= compute_scale
    # AdamW 28, EMA 12, the copy for the network and the norm 6 bytes; gradients set to zero
    update_bytes = 46 * (mine if config.parallel.zero_stage == 0 else mine / shard) + 4 * mine
    data = _data_traffic(config, parameters, gpu, data_parallel, accumulation)
    if config.parallel.zero_stage == 3 or config.parallel.engine == "fsdp2":
        data = max((1 - HIDDEN) * data, data - compute)
    communication = data + accumulation * _tensor_traffic(config, gpu)
    return Seconds(compute, update_bytes / (gpu.bandwidth * BANDWIDTH), communication)


def _passes(config: Config) -> list[int]:
    """Tokens of each pass that gradients flow through."""
    samples, tokens = max(1, config.objective.samples), config.train.micro_batch * config.model.length
    return [samples * tokens] if config.train.two_samples == "joint" else samples * [tokens]


def _micro_batch(config: Config, gpu: Device) -> float:
    """Forward and backward of one micro-batch."""
    blocks, objective, seconds = config.model.blocks, config.objective, 0.0
    learned = objective.name == "lomdm"
    head = learned and objective.head == "transformer"
    for tokens in _passes(config):
        seconds += (blocks + head) * _block(config, gpu, tokens) + _loss(config, gpu, tokens) + AROUND
    if learned:  # the features of the clean text, and phi on them
        tokens = config.train.micro_batch * config.model.length
        features = _forward(config, gpu, tokens) if objective.stop_gradient else _block(config, gpu, tokens)
        seconds += blocks * features + head * _block(config, gpu, tokens) + AROUND
    return seconds


def _block(config: Config, gpu: Device, tokens: int) -> float:
    """Forward, backward, and what is computed again."""
    again = {"none": 0.0, "attention": 1 / 3, "block": 1.0}[config.train.recompute]
    attention_again = config.train.recompute != "none"
    forward, backward = _forward(config, gpu, tokens), _forward(config, gpu, tokens, 2, 2.5)
    return forward + backward + (_forward(config, gpu, tokens, again, 1) if attention_again else 0.0)


def _forward(config: Config, gpu: Device, tokens: int, times: float = 1, attention_times: float = 1) -> float:
    """One block on `tokens`: its products and pointwise operations `times`, attention `attention_times`."""
    model, ranks = config.model, config.parallel.tensor_parallel
    products = 24 * model.width**2 * tokens / ranks * _cost(config, gpu, model.width // ranks, tokens)
    seen = model.length / 2 if config.objective.name == "ar" else model.length
    attention = 4 * model.width * seen * tokens / ranks * _cost(config, gpu) * MATMUL / ATTENTION
    # each read or write of [N, D]: two norms and two residuals 10; rotary 4 and the MLP's activation 8, split
    between = 10 / (ranks if config.parallel.sequence_parallel else 1)
    moved = (
        (between + 12 / ranks) * model.width * tokens * network_bytes(config) / (gpu.bandwidth * BANDWIDTH)
    )
    parallel = config.parallel
    hooks = HOOKS[parallel.engine] if parallel.zero_stage == 3 or parallel.engine == "fsdp2" else 0.0
    return max(times * KERNELS * LAUNCH + hooks, times * (products + moved) + attention_times * attention)


def _cost(config: Config, gpu: Device, width: float | None = None, rows: float | None = None) -> float:
    """Seconds of one floating-point operation in products of such matrices."""
    share = MATMUL
    if width is not None:
        share *= width / (width + HALF_WIDTH) * rows / (rows + HALF_ROWS)
    return (FP32 if config.train.precision == "fp32" else 1) / (gpu.peak_flops * share)


def _loss(config: Config, gpu: Device, tokens: int) -> float:
    """Three products a chunk; logits are read and written a few times, the weights' gradient is added up."""
    model, ranks = config.model, config.parallel.tensor_parallel
    rows, part = predicted_share(config.objective) * tokens, model.vocab_size / ranks
    chunk = min(rows, loss_chunk(config, gpu.type))
    products = 6 * model.width * part * rows * _cost(config, gpu, model.width, chunk)
    moved = 16 * part * rows + 12 * part * model.width * max(1.0, rows / chunk)
    return products + moved / (gpu.bandwidth * BANDWIDTH)


def _data_traffic(
    config: Config, parameters: Parameters, gpu: Device, data_parallel: int, accumulation: int
) -> float:
    """Seconds of communication between data-parallel ranks in one step."""
    parallel, passes = config.parallel, len(_passes(config))
    ranks, stage = parallel.tensor_parallel, parallel.zero_stage
    mine, blocks = parameters.of_rank(ranks), config.model.blocks
    shard = parallel.shard_group or data_parallel
    weights, gradients = network_bytes(config) * mine, 4 * mine

    def ring(size: float, of: int, messages: int) -> float:
        """Seconds to gather or to reduce and scatter `size` bytes; an all-reduce is both."""
        if of == 1:
            return 0.0
        speed = gpu.link * LINK if of * ranks <= gpu.a_node else gpu.network * NETWORK
        return (of - 1) / of * size / speed + messages * LATENCY

    buckets = max(1, mine // REDUCE_BUCKET)
    if parallel.engine == "deepspeed" and stage < 3:
        # ZeRO 2 holds no whole gradients: it reduces those of each backward pass at once
        reductions = 1 if stage < 2 else accumulation * passes
        update = ring(weights, shard, buckets) if stage else 0.0
        return 2 * reductions * ring(gradients, shard, buckets) + update
    learned = config.objective.name == "lomdm"
    gathers = 2 * passes + learned if stage == 3 else passes + learned
    reductions = passes if parallel.engine == "deepspeed" else 1  # FSDP2's wait for one another
    a_micro_batch = gathers * ring(weights, shard, blocks) + reductions * ring(gradients, shard, blocks)
    copies = data_parallel // shard
    return accumulation * (a_micro_batch + 2 * ring(gradients / shard, copies, blocks) * (copies > 1))


def _tensor_traffic(config: Config, gpu: Device) -> float:
    """Seconds a micro-batch: two all-reduces of [N, D] a block and direction, or what equals them."""
    ranks, model = config.parallel.tensor_parallel, config.model
    if ranks == 1:
        return 0.0
    learned = config.objective.name == "lomdm"
    head = learned and config.objective.head == "transformer"
    of_phi = config.train.micro_batch * model.length
    again = config.train.recompute != "none"

    def of(tokens: int, reductions: int) -> float:
        size = model.width * tokens * network_bytes(config)
        return reductions * (2 * (ranks - 1) / ranks * size / (gpu.link * LINK) + LATENCY)

    directions = 4 + 2 * again
    seconds = sum((model.blocks + head) * of(tokens, directions) for tokens in _passes(config))
    if learned:
        seconds += model.blocks * of(of_phi, 2) + head * of(of_phi, directions)
    return seconds
