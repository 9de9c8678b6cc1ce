"""Named tensors in files of other programs, read one at a time; nothing that stands there is run."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lomdm_dist.errors import UserError, first_line

ONE_FILE = ("model.safetensors", "pytorch_model.bin")  # of a folder in Hugging Face's form
EXACT = (torch.float32, torch.bfloat16, torch.float16)  # float32 holds all their numbers
INDEX = ".index.json"  # beside these names: of weights in several files


@dataclass(frozen=True)
class Weights:
    """Names and shapes, in the order of the file, and how one of the tensors is read: as float32.

    Reading raises UserError where a tensor is of a dtype that float32 does not hold exactly, or not finite.
    """

    shapes: dict[str, tuple[int, ...]]
    read: Callable[[str], Tensor]


def open_weights(path: Path) -> Weights:
    """The weights of a folder in Hugging Face's form, one file or several, or of a single file. UserError."""
    if path.is_file():
        return _open_file(path)
    for name in ONE_FILE:
        if (path / name).is_file():
            return _open_file(path / name)
        if (path / (name + INDEX)).is_file():
            return _joined([_open_file(path / part) for part in _parts(path / (name + INDEX))], path)
    raise UserError(f"no weights in {path}: it has none of {' and '.join(ONE_FILE)}")


def _parts(index: Path) -> list[str]:
    """The names of the files that an index lists."""
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError):
        raise UserError(f"{index} is no index of weights") from None
    for name in names:
        if Path(name).name != name or not (index.parent / name).is_file():
            raise UserError(f"{index} lists {name}, which is no file beside it")
    return names


def _joined(parts: list[Weights], folder: Path) -> Weights:
    owner = {}
    for part in parts:
        for name in part.shapes:
            if name in owner:
                raise UserError(f"{name} stands in two files of {folder}")
            owner[name] = part
    shapes = {name: part.shapes[name] for name, part in owner.items()}
    return Weights(shapes, lambda name: owner[name].read(name))


def _open_file(path: Path) -> Weights:
    if path.suffix == ".safetensors":
        return _open_safetensors(path)
    return of_tensors(state_dict(open_torch(path), path), path)


def _open_safetensors(path: Path) -> Weights:
    try:
        file = safe_open(path, framework="pt")
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UserError(f"cannot read {path}: {first_line(error)}") from None
    return Weights(shapes, lambda name: _exactly(file.get_tensor(name), name, path))


def _exactly(tensor: Tensor, name: str, path: Path) -> Tensor:
    if tensor.dtype not in EXACT:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise UserError(
            f"{path}: {name} is {kind}; weights of {', '.join(str(d).removeprefix('torch.') for d in EXACT)} "
            "are read, others would be changed"
        )
    if not torch.isfinite(tensor).all():
        raise UserError(f"{path}: {name} holds a number that is not finite")
    return tensor.float()


def of_tensors(tensors: dict[str, Tensor], path: Path) -> Weights:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return Weights(shapes, lambda name: _exactly(tensors[name], name, path))


class _Inert:
    """Stands in for the classes and functions that a file names beside tensors; it does nothing."""

    def __init__(self, *_, **__):
        pass

    def __setstate__(self, _):
        pass


STAND_IN = {"collections.defaultdict": lambda *_: {}}  # whose items torch's reader puts into a dict only


def open_torch(path: Path):
    """What torch.save wrote, its tensors mapped and not yet read.

    Lightning's files hold the settings of a run as objects of many packages: none of these is imported, and
    they come to nothing. Raises UserError.
    """
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        with torch.serialization.safe_globals([(STAND_IN.get(name, _Inert), name) for name in names]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # whatever a foreign or damaged file makes the reader raise
        raise UserError(
            f"cannot read {path} without running what stands in it ({_reason(error)}): where it was made, "
            "save both sets of weights alone: torch.save({k: file[k] for k in ('state_dict', 'ema')}, NEW)"
        ) from None


def _reason(error: Exception) -> str:
    """What torch's reader says, without its advice to read the file unsafely."""
    text = str(error)
    if "eights only load failed" in text or "weights_only" in text:
        text = (
            text.partition("WeightsUnpickler error:")[2]
            or "it names code to be run, or is of torch's old form"
        )
    return first_line(ValueError(text))


def state_dict(content, path: Path) -> dict[str, Tensor]:
    """The named tensors of a file of weights alone, or of Lightning's. Raises UserError."""
    if isinstance(content, dict) and "state_dict" in content:
        content = content["state_dict"]
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise UserError(f"{path} holds no named tensors: neither weights alone nor a Lightning checkpoint")
    return content
