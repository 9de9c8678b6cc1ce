"""What a result was made with: versions, machine, command. And the `--json` files that hold it."""

import functools
import json
import math
import os
import platform
import resource
import subprocess
import sys
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import yaml

from lomdm_dist import __version__
from lomdm_dist.errors import UserError
from lomdm_dist.files import write_atomically
from lomdm_dist.secrets import hide


def peak_memory() -> int:
    """Bytes: of a GPU what torch has had at most, on a CPU what was resident of this process at most."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def wait_for(device: torch.device) -> None:
    """Until it has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Device:
    """What one process computes on.

    memory_gib    of it, as its driver reports it
    peak_flops    dense bf16 FLOP/s; None where nothing is known of its speed
    bandwidth     of its memory, bytes/s
    link, network bytes/s of one GPU in one direction to others of its node, and to other nodes
    a_node        GPUs that the links join
    """

    name: str
    memory_gib: float
    peak_flops: float | None = None
    bandwidth: float = 0.0
    link: float = 0.0
    network: float = 0.0
    a_node: int = 8

    @property
    def type(self) -> str:
        return "cpu" if self.name == "cpu" else "cuda"


def read_hardware(path: str | Path) -> dict[str, Device]:
    """Devices by name from a file like lomdm_dist/hardware.yaml. Raises UserError where it is none."""
    wanted = {f.name for f in fields(Device)} - {"name", "a_node"}
    try:
        table = yaml.safe_load(Path(path).read_text())
        devices = {
            str(name): {key: float(value) for key, value in row.items()} for name, row in table.items()
        }
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError, AttributeError, TypeError, ValueError):
        raise UserError(
            f"{path} is no table of devices: it says NAME: {{memory_gib: 79.1, peak_flops: 989e12, ...}}, "
            "all numbers, as lomdm_dist/hardware.yaml does"
        ) from None
    for name, row in devices.items():
        if row.keys() - {"a_node"} != wanted or not all(0 < value < float("inf") for value in row.values()):
            raise UserError(
                f"{path}: {name} needs {', '.join(sorted(wanted))}, each above 0; a_node may be said"
            )
        row["a_node"] = int(row.get("a_node", 8))
    return {name: Device(name, **row) for name, row in devices.items()}


GPUS = read_hardware(Path(__file__).with_name("hardware.yaml"))


def known_gpu(name: str) -> Device | None:
    """What is known of a GPU that calls itself so: "NVIDIA H100 80GB HBM3"."""
    return next((gpu for gpu in GPUS.values() if gpu.name.split("-")[0].upper() in name), None)


def peak_flops() -> float | None:
    """Peak of one device of this machine in bf16, None where it is not known (CPUs among them)."""
    if not torch.cuda.is_available():
        return None
    gpu = known_gpu(torch.cuda.get_device_name())
    return gpu and gpu.peak_flops


def versions() -> dict[str, str]:
    found = {"lomdm_dist": __version__, "python": platform.python_version()}
    for package in ("torch", "deepspeed", "megatron-core", "transformers", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found | {"commit": commit()}


@functools.cache
def commit() -> str:
    """The commit of the checkout that this code runs from, with a + where files were changed; else ""."""
    folder = Path(__file__).resolve().parent.parent

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "--no-optional-locks", "-C", folder, *words], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != folder:  # an environment inside another project
            return ""
        return git("rev-parse", "HEAD") + "+" * bool(git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.CalledProcessError):
        return ""


def cpu() -> str:
    """The name of the processor, as far as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def machine() -> dict:
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "host": platform.node(),
        "cpus": os.cpu_count(),
        "cpu": cpu(),
        "gpus": gpus,
        "platform": platform.platform(),
    }


def machine_in_sight() -> str:
    """Equal for processes that can see each other: on one machine, in one container. Empty if unknown."""
    boot = Path("/proc/sys/kernel/random/boot_id")  # hosts may share a name
    return f"{boot.read_text().strip()} {os.readlink('/proc/self/ns/pid')}" if boot.exists() else ""


def write_result(path: str | Path | None, result: dict, config: dict) -> None:
    """Write a command's result where `--json` asked for it, with all that it depends on beside it."""
    if path is not None:
        about = {"command": sys.argv, "versions": versions(), "machine": machine(), "config": config}
        write_atomically(Path(path), to_json(result | about, indent=1) + "\n")


def to_json(value, **options) -> str:
    """JSON that every reader takes, and may: a number that is not finite becomes null, secrets are hidden."""
    return json.dumps(_open(value), allow_nan=False, default=lambda other: hide(str(other)), **options)


def _open(value):
    if isinstance(value, dict):
        return {key: _open(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_open(item) for item in value]
    if isinstance(value, str):
        return hide(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value
