"""Bytes that one rank holds, by part, from the shapes and the rules of its engine."""

import math

import torch

from lomdm_dist.config import Config
from lomdm_dist.machine import Device
from lomdm_dist.model import LoMDM
from lomdm_dist.model.backbone import MLP_RATIO
from lomdm_dist.model.kernels import loss_chunk
from lomdm_dist.parallel.zero import REDUCE_BUCKET
from lomdm_dist.study.activations import OF_ORDER, activation_bytes

WHOLE_BUCKET = 500_000_000  # elements that are reduced at a time without ZeRO
GATHERED = 1_000_000_000  # parameters that ZeRO 3 keeps whole between uses; DeepSpeed's default
LEFT_OUT = (  # of `memory`, and of what a dry run counts
    "the CUDA context and the libraries' kernels",
    "workspaces of cuBLAS and cuDNN",
    "buffers of NCCL",
    "fragments of the allocator",
    "batches that wait on the device",
)
SPLIT_OVER_RANKS = {  # the dimension, of parameters whose names end so
    "qkv.weight": 0,
    "attention_out.weight": 1,
    "mlp_in.weight": 0,
    "mlp_in.bias": 0,
    "mlp_out.weight": 1,
    "modulation.weight": 0,
    "modulation.bias": 0,
    "embedding.weight": 0,
    "output.weight": 0,
    "output.bias": 0,
}


class Parameters:
    """How many parameters a model has, and a tensor-parallel rank of it, from its shapes alone."""

    def __init__(self, config: Config):
        with torch.device("meta"):
            model = LoMDM(config.model, config.objective)
        self._shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        self._of_ranks: dict[int, dict] = {}

    def of_rank(self, ranks: int) -> int:
        return sum(math.prod(shape) for shape in self.shapes(ranks).values())

    def of_block(self, ranks: int) -> int:
        named = self.shapes(ranks).items()
        return sum(math.prod(shape) for name, shape in named if name.startswith("backbone.blocks.0."))

    def outside_blocks(self, ranks: int) -> int:
        named = self.shapes(ranks).items()
        return sum(
            math.prod(shape) for name, shape in named if ".blocks." not in name and ".block." not in name
        )

    def shapes(self, ranks: int) -> dict[str, tuple[int, ...]]:
        """The shapes of what one of so many tensor-parallel ranks has, by name, padding included."""
        if ranks not in self._of_ranks:  # a planner asks for each of its candidates
            self._of_ranks[ranks] = {name: _part(name, shape, ranks) for name, shape in self._shapes.items()}
        return self._of_ranks[ranks]


def _part(name: str, shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    for ending, dim in SPLIT_OVER_RANKS.items():
        if name.endswith(ending):
            part = -(-shape[dim] // ranks)  # only the vocabulary need not divide; the last rank's is padded
            return (*shape[:dim], part, *shape[dim + 1 :])
    return shape


def network_bytes(config: Config) -> int:
    """The size of one number that the network computes with."""
    return 2 if config.train.precision == "bf16" else 4


def memory(config: Config, parameters: Parameters, device: Device, data_parallel: int) -> dict[str, int]:
    """Bytes of one rank at the peak of a step, by part. A dry run counts no more than their sum.

    activations    see `activation_bytes`, with every position projected, as a few sequences can be
    loss_chunk     logits of the fused loss, and its sum of weight gradients
    backward       gradients on their way through one block, where they are more than loss_chunk, gone by then
    update         buffers in which gradients are reduced after the passes, and copies for AdamW, where they
                   are more than all of these
    communication  buffers that exist during the passes, and parameters gathered for use
    """
    parts = _states(config, parameters, data_parallel)
    parts["activations"] = sum(activation_bytes(config, share=1.0).values())
    parts["loss_chunk"] = _loss_chunk(config, loss_chunk(config, device.type))
    parts["backward"] = max(0, _flowing(config) - parts["loss_chunk"])
    working = parts["activations"] + parts["loss_chunk"] + parts["backward"]
    parts["update"] = max(0, _update(config, parameters, data_parallel) - working)
    parts["communication"] = _communication(config, parameters)
    return {name: round(size) for name, size in parts.items()}


def _update(config: Config, parameters: Parameters, data_parallel: int) -> float:
    """ZeRO 0 and 1 reduce once, in flat buffers, and hold the activations no longer; 1 and 2 copy this
    rank's gradients."""
    mine, stage = parameters.of_rank(config.parallel.tensor_parallel), config.parallel.zero_stage
    if config.parallel.engine != "deepspeed" or stage == 3:
        return 0
    bucket = {0: WHOLE_BUCKET, 1: REDUCE_BUCKET, 2: 0}[stage]
    # of the last pass a gradient and what schedules and integrands are made of are still held
    last = _tokens(config) * (config.model.width * network_bytes(config) + OF_ORDER)
    return last + 4 * max(min(bucket, mine), mine / data_parallel if stage else 0)


def _states(config: Config, parameters: Parameters, data_parallel: int) -> dict[str, float]:
    """docs/parallelism.md has these counted. The optimiser's are moments, and masters."""
    parallel, stage = config.parallel, config.parallel.zero_stage
    mine = parameters.of_rank(parallel.tensor_parallel)
    shared = mine / (parallel.shard_group or data_parallel)
    if parallel.engine == "fsdp2":
        waiting = 0
        if config.train.two_samples == "split" and config.objective.samples == 2:
            waiting = 4 * mine  # those of the first sample, until the second's join them
        return {
            "parameters": 4 * shared,
            "gradients": 4 * shared + waiting,
            "optimiser": 8 * shared,
            "ema": 4 * shared,
        }
    return {
        "parameters": network_bytes(config) * (mine if stage < 3 else shared),
        "gradients": 4 * (mine if stage < 2 else shared),
        "optimiser": 12 * shared if stage else 8 * mine,
        "ema": 4 * (shared if stage else mine),
    }


def _loss_chunk(config: Config, chunk: int) -> float:
    """Logits in the network's dtype twice (values, gradients) and in float32; of the weights' gradient the
    float32 sum and one product. In float32 all is in place."""
    model, ranks = config.model, config.parallel.tensor_parallel
    part, rows = -(-model.vocab_size // ranks), min(chunk, _tokens(config))
    bf16 = config.train.precision == "bf16"
    return part * (rows * (8 if bf16 else 4) + model.width * (6 if bf16 else 4))


def _tokens(config: Config) -> int:
    """The tokens of one pass."""
    return config.passes[1] * config.train.micro_batch * config.model.length


def _flowing(config: Config) -> float:
    """The gradient of the residual stream, and those before and after the MLP's activation."""
    channels = config.model.width * network_bytes(config)
    return _tokens(config) * channels * (1 + 2 * MLP_RATIO / config.parallel.tensor_parallel)


def _communication(config: Config, parameters: Parameters) -> float:
    parallel, size = config.parallel, network_bytes(config)
    ranks = parallel.tensor_parallel
    mine = parameters.of_rank(ranks)
    if parallel.engine == "deepspeed" and parallel.zero_stage == 3:
        in_order = min(REDUCE_BUCKET, mine)  # what is reduced of the bucket, in the order of the ranks
        return 4 * (REDUCE_BUCKET + in_order) + size * min(GATHERED, mine)
    if parallel.engine == "deepspeed":
        # a bucket, its part in use, and that in float32 to reduce; ZeRO 1 in bf16 reduces its sums in place
        has_bucket = parallel.zero_stage == 2 or (parallel.zero_stage == 1 and size == 4)
        return has_bucket * (size * REDUCE_BUCKET + (size + 4) * min(REDUCE_BUCKET, mine))
    block, outside = parameters.of_block(ranks), parameters.outside_blocks(ranks)
    gathered = mine if parallel.zero_stage == 2 else outside + 2 * block  # the next is fetched meanwhile
    return size * gathered + (size + 4) * max(block, outside)  # gradients whole, and in float32 to reduce
