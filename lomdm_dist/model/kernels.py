"""Which kernels a model runs on: chosen for the device, or forced by the config; said once at the start."""

import torch

from lomdm_dist.config import Config
from lomdm_dist.errors import UserError
from lomdm_dist.model.backbone import Block
from lomdm_dist.model.lomdm import LoMDM
from lomdm_dist.ops.attention import choose_attention
from lomdm_dist.ops.compiled import COMPILED_ON
from lomdm_dist.ops.masked_linear_ce import default_chunk


def choose_kernels(model: LoMDM, config: Config, device: torch.device) -> str:
    """Set a model up for a device; returns the choices in words. Raises UserError where one cannot be had."""
    wanted, backbone = config.kernels, model.backbone
    dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
    try:
        backbone.kernel = choose_attention(wanted.attention, device, dtype)
    except ValueError as error:
        raise UserError(f"kernels.attention {wanted.attention}: {error}") from None
    compile_it = device.type == "cuda" if wanted.compile == "auto" else wanted.compile == "on"
    (COMPILED_ON.add if compile_it else COMPILED_ON.discard)(device.type)
    output = backbone.output
    output.plain, output.chunk = wanted.loss == "plain", loss_chunk(config, device.type)
    for block in model.modules():
        if isinstance(block, Block):
            block.recompute, block.offload = config.train.recompute, config.train.offload_activations
    loss = "plain" if output.plain else f"fused, {output.chunk:,} rows at a time"
    pointwise = "compiled" if device.type in COMPILED_ON else "eager"
    return f"attention {backbone.kernel}; loss {loss}; pointwise {pointwise}"


def loss_chunk(config: Config, device_type: str) -> int:
    """Rows of logits that the fused loss has in memory at a time."""
    part = -(-config.model.vocab_size // config.parallel.tensor_parallel)
    return config.kernels.loss_chunk or default_chunk(part, device_type)
