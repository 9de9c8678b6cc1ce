"""What differs between two checkpoints or exports, parameter by parameter: `lomdm convert diff`.

One parameter of each side is in memory at a time.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from lomdm_dist.config import load_config
from lomdm_dist.convert.checkpoint import as_used, read_tensor
from lomdm_dist.convert.from_hf import tokenizer_of
from lomdm_dist.convert.weights import Weights, open_weights
from lomdm_dist.data.tokenizer import describe
from lomdm_dist.errors import UserError
from lomdm_dist.train.checkpoint import LATEST, STATE, Checkpoint

PLACES = ("data.train", "data.valid", "data.cache", "train.run", "train.start_from")  # say nothing of a model
CHUNK = 2**22  # elements compared at a time, in float64


@dataclass(frozen=True)
class Side:
    """A checkpoint or an export: its config, flat, the facts of its tokenizer, its weights."""

    name: str
    config: dict
    tokenizer: dict
    weights: Weights


def open_side(path: Path, kind: str) -> Side:
    """A run or checkpoint, of it the weights of `kind`; or a folder or file of weights. Raises UserError."""
    if (path / LATEST).is_file() or (path / STATE).is_file():
        return _open_checkpoint(path, kind)
    if not path.exists():
        raise UserError(f"there is no {path}: give a run, a checkpoint, an export or a file of weights")
    return Side(str(path), _config(path), _tokenizer(path), open_weights(path))


def _open_checkpoint(path: Path, kind: str) -> Side:
    checkpoint = Checkpoint(path)
    shapes = {name: as_used(shape) for name, shape in checkpoint.shapes().items()}
    checkpoint.check_fits({f"{kind}/{name}": math.prod(shape) for name, shape in shapes.items()}, kind)

    def read(name: str) -> Tensor:
        return read_tensor(checkpoint, f"{kind}/{name}").view(shapes[name])

    facts = checkpoint.state.data.tokenizer.model_dump()
    name = f"{checkpoint.folder} ({kind})"
    return Side(name, _flat(checkpoint.config.as_dict()), facts, Weights(shapes, read))


def _config(path: Path) -> dict:
    """config.yaml of an export, or else config.json; empty where there is neither."""
    if (path / "config.yaml").is_file():
        return _flat(load_config(path / "config.yaml").as_dict())
    try:
        return _flat(json.loads((path / "config.json").read_text()))
    except (OSError, ValueError, AttributeError):
        return {}


def _flat(section: dict, before: str = "") -> dict:
    flat = {}
    for key, value in section.items():
        flat |= _flat(value, f"{before}{key}.") if isinstance(value, dict) else {before + key: value}
    return flat


def _tokenizer(path: Path) -> dict:
    return describe(tokenizer_of(path)).model_dump() if (path / "tokenizer.json").is_file() else {}


def diff(a: Side, b: Side) -> dict:
    """Keys of the configs and facts of the tokenizers as [a's, b's]; of each parameter how much it differs.

    relative_difference is the norm of a - b over that of a. Where data and run were is not compared, nor
    what only one side has of config and tokenizer.
    """
    both = [name for name in a.weights.shapes if name in b.weights.shapes]
    parameters = []
    for name in tqdm(both, desc="compare", unit=" parameters", disable=None):
        shapes = [list(side.weights.shapes[name]) for side in (a, b)]
        row = {"name": name, "shape": shapes[0], "max_difference": None, "relative_difference": None}
        if shapes[0] == shapes[1]:
            row["max_difference"], row["relative_difference"] = _difference(
                a.weights.read(name), b.weights.read(name)
            )
        else:
            row["other_shape"] = shapes[1]
        parameters.append(row)
    changed = [row for row in parameters if row["max_difference"] != 0]
    result = {
        "a": a.name,
        "b": b.name,
        "config_differs": _without_places(_different(a.config, b.config)),
        "tokenizer_differs": _different(a.tokenizer, b.tokenizer),
        "only_in_a": [name for name in a.weights.shapes if name not in b.weights.shapes],
        "only_in_b": [name for name in b.weights.shapes if name not in a.weights.shapes],
        "parameters": parameters,
        "changed": len(changed),
        "max_difference": _largest(row["max_difference"] for row in changed),
    }
    parts = ("config_differs", "tokenizer_differs", "only_in_a", "only_in_b", "changed")
    return result | {"equal": not any(result[part] for part in parts)}


def _largest(differences) -> float:
    """nan where one is; 0 where there is none."""
    known = [difference for difference in differences if difference is not None]
    return math.nan if any(map(math.isnan, known)) else max(known, default=0.0)


def _without_places(config: dict) -> dict:
    return {key: value for key, value in config.items() if key not in PLACES}


def _different(a: dict, b: dict) -> dict:
    keys = dict.fromkeys([*a, *b])
    return {key: [a.get(key), b.get(key)] for key in keys if a.get(key) != b.get(key)} if a and b else {}


def _difference(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Largest |a - b|, and norm of a - b over that of a; 0 and 0 where they are alike, bit for bit."""
    largest, squares, of_a = 0.0, 0.0, 0.0
    for part, other in zip(a.flatten().split(CHUNK), b.flatten().split(CHUNK), strict=True):
        if torch.equal(part, other):
            continue
        difference = part.double() - other.double()
        largest = max(largest, difference.abs().max().item(), key=lambda x: math.inf if math.isnan(x) else x)
        squares += difference.square().sum().item()
    if not largest:
        return 0.0, 0.0
    of_a = sum(part.double().square().sum().item() for part in a.flatten().split(CHUNK))
    return largest, math.sqrt(squares / of_a) if of_a else math.inf


def lines(result: dict) -> list[str]:
    """For a reader: one line where nothing differs, else what does."""
    if result["equal"]:
        return [f"equal: {result['a']} and {result['b']} in all of {len(result['parameters'])} parameters"]
    said = [f"a: {result['a']}", f"b: {result['b']}"]
    for part in ("config", "tokenizer"):
        for key, (ours, theirs) in result[f"{part}_differs"].items():
            said.append(f"  {part} {key}: {ours} | {theirs}")
    for side in ("a", "b"):
        said += [f"  only in {side}: {name}" for name in result[f"only_in_{side}"]]
    wide = max((len(row["name"]) for row in result["parameters"]), default=0)
    said += [_row(row, wide) for row in result["parameters"] if row["max_difference"] != 0]
    return [
        *said,
        f"{result['changed']} of {len(result['parameters'])} common parameters differ, by up to "
        f"{result['max_difference']:.3g}; {len(result['only_in_a'])} are only in a, "
        f"{len(result['only_in_b'])} only in b; {len(result['config_differs'])} keys of the config differ",
    ]


def _row(row: dict, wide: int) -> str:
    shape = " x ".join(map(str, row["shape"]))
    if "other_shape" in row:
        return f"  {row['name']:{wide}}  {shape} | {' x '.join(map(str, row['other_shape']))}"
    largest, relative = row["max_difference"], row["relative_difference"]
    return f"  {row['name']:{wide}}  {shape:>14}  largest {largest:.3g}  relative {relative:.3g}"
