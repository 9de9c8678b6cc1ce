"""What a result was made with: versions, machine, command. And the `--json` files that hold it."""

import json
import math
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from lomdm_dist import __version__
from lomdm_dist.files import write_atomically

# dense bf16 peak, FLOP/s, of NVIDIA's data sheets, by a part of the device's name
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "B200": 2250e12, "A100": 312e12}


def peak_flops() -> float | None:
    """Peak of one device of this machine in bf16, None where it is not known (CPUs among them)."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


def versions() -> dict[str, str]:
    found = {"lomdm_dist": __version__, "python": platform.python_version()}
    for package in ("torch", "deepspeed", "megatron-core", "transformers", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def machine() -> dict:
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"host": platform.node(), "cpus": os.cpu_count(), "gpus": gpus, "platform": platform.platform()}


def write_result(path: str | Path | None, result: dict, config: dict) -> None:
    """Write a command's result where `--json` asked for it, with all that it depends on beside it."""
    if path is not None:
        about = {"command": sys.argv, "versions": versions(), "machine": machine(), "config": config}
        write_atomically(Path(path), to_json(result | about, indent=1) + "\n")


def to_json(value, **options) -> str:
    """JSON that every reader takes: a number that is not finite becomes null."""
    return json.dumps(_finite(value), allow_nan=False, default=str, **options)


def _finite(value):
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
