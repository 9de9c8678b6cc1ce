"""What a checkpoint holds, whether it is whole, and the same in one file: `lomdm checkpoint`."""

import math
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from pydantic import BaseModel
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from tqdm import tqdm

from lomdm_dist.errors import UserError
from lomdm_dist.files import check_new, new_folder, sha256, write_atomically
from lomdm_dist.parallel.optimizer import MOMENTS
from lomdm_dist.train.checkpoint import (
    STATE,
    WEIGHT_FILE,
    WEIGHTS,
    Checkpoint,
    State,
    checkpoint_files,
    steps_in,
)

FIRST_ERRORS = 4


def read_tensor(checkpoint: Checkpoint, name: str) -> Tensor:
    """One saved tensor, whole. Raises UserError."""
    saved = checkpoint.metadata.state_dict_metadata[name]
    tensor = torch.empty(saved.size, dtype=saved.properties.dtype)
    checkpoint.read({name: tensor})
    return tensor


def as_used(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A checkpoint keeps q, k and v apart, [3, D, D]; networks, and other files, have them as [3 D, D]."""
    return (shape[0] * shape[1], shape[2]) if len(shape) == 3 else shape


# Inspect.


@dataclass
class Contents:
    """What a checkpoint holds, by its state, its config and DCP's metadata."""

    checkpoint: Checkpoint
    saved: dict[str, TensorStorageMetadata]

    @property
    def kinds(self) -> list[str]:
        held = {name.partition("/")[0] for name in self.saved}
        return [kind for kind in (*WEIGHTS, *MOMENTS) if kind in held]

    @property
    def parameters(self) -> int:
        """Elements of the model."""
        return sum(t.size.numel() for name, t in self.saved.items() if name.startswith("raw/"))

    def files(self) -> dict[str, int]:
        """Bytes of each file, on disk."""
        folder = self.checkpoint.folder
        return {name: (folder / name).stat().st_size for name in [*checkpoint_files(folder), STATE]}

    def table(self) -> list[dict]:
        """The name of each parameter, its shape as saved, and how many pieces each kind of it has.

        In the order of the model; what is not of it comes last.
        """
        rows = dict.fromkeys(self.checkpoint.shapes())
        for full_name, tensor in self.saved.items():
            kind, _, name = full_name.partition("/")
            row = rows.get(name) or {"name": name, "shape": list(tensor.size), "pieces": {}}
            row["pieces"][kind] = len(tensor.chunks)
            rows[name] = row
        return [row for row in rows.values() if row]

    def totals(self) -> dict:
        """For a --json file."""
        files = self.files()
        return {
            "folder": str(self.checkpoint.folder),
            "step": self.checkpoint.state.step,
            "parameters": self.parameters,
            "kinds": self.kinds,
            "files": len(files),
            "weight_files": sum(name.endswith(WEIGHT_FILE) for name in files),
            "bytes": sum(files.values()),
        }

    def as_dict(self) -> dict:
        """For a --json file, with all that is known of it."""
        state = self.checkpoint.state.model_dump(exclude={"files", "checksum"})
        return self.totals() | {"state": state, "table": self.table()}

    def line(self) -> str:
        """For a reader."""
        t = self.totals()
        return (
            f"{t['folder']}: step {t['step']}, {t['parameters']:,} parameters, {', '.join(t['kinds'])}; "
            f"{t['files']} files, {t['weight_files']} of them of weights, {t['bytes'] / 2**20:,.1f} MiB"
        )

    def lines(self) -> Iterator[str]:
        """For a reader, with all that is known of it."""
        state, config = self.checkpoint.state, self.checkpoint.config
        data, model, ids = state.data, config.model, state.data.tokenizer
        yield self.line()
        yield (
            f"  format {state.format}; {state.sequences:,} sequences, {state.tokens:,} tokens, "
            f"{state.ema_updates:,} updates of the average (ema)"
        )
        chosen = _settings(config.objective, exclude={"name"}, exclude_defaults=True)
        yield f"  objective {config.objective.name} {chosen}".rstrip()
        yield (
            f"  model of {model.blocks} blocks of width {model.width}, {model.heads} heads, condition of "
            f"width {model.condition_width}, {model.length} tokens of {model.vocab_size:,} ids"
        )
        yield f"  trained in {config.train.precision} with {_settings(config.parallel)}"
        yield f"  data: {data.packing}, identity {data.identity}"
        yield f"  tokenizer: EOS {ids.eos_id}, mask {ids.mask_id}, padding {ids.pad_id}, sha256 {ids.sha256}"
        yield "  versions: " + ", ".join(f"{name} {version}" for name, version in state.versions.items())
        rows = [("parameter", "shape", "pieces")]
        for row in self.table():
            pieces = sorted(set(row["pieces"].values()))  # one number, but where kinds differ
            rows.append((row["name"], " x ".join(map(str, row["shape"])), " or ".join(map(str, pieces))))
        wide = [max(len(row[k]) for row in rows) for k in range(2)]
        for name, shape, pieces in rows:
            yield f"  {name:{wide[0]}}  {shape:{wide[1]}}  {pieces}"


def _settings(section: BaseModel, **which) -> str:
    return " ".join(f"{key}={value}" for key, value in section.model_dump(**which).items())


def inspect(path: Path) -> Contents:
    """What a checkpoint, or a run's latest, holds; the weights are not read. Raises UserError."""
    checkpoint = Checkpoint(path, read_weights=False)
    return Contents(checkpoint, checkpoint.metadata.state_dict_metadata)


# Verify.


def checkpoints_of(run: Path) -> list[Path]:
    """All of a run, by their steps. Raises UserError."""
    found = list(steps_in(run / "checkpoints"))
    if not found:
        raise UserError(f"no checkpoints/step-N in {run}: give a run folder")
    return found


def verify(path: Path) -> Contents:
    """Read all of a checkpoint, or of a run's latest, one tensor at a time. Raises UserError.

    Whole is: every file as its checksum says, and no other; the tensors of the config's model, each put
    together from its pieces without gap or overlap; every number finite.
    """
    checkpoint = Checkpoint(path)
    extra = sorted(set(checkpoint_files(checkpoint.folder)) - checkpoint.state.files.keys())
    if extra:
        raise UserError(
            f"checkpoint {checkpoint.folder} holds {extra[0]}, which its {STATE} does not list: take it out"
        )
    checkpoint.tokenizer()
    saved = checkpoint.metadata.state_dict_metadata
    if wrong := _not_of_the_model(checkpoint, saved):
        more = "; ..." if len(wrong) > FIRST_ERRORS else ""
        checkpoint.damaged("; ".join(wrong[:FIRST_ERRORS]) + more)
    for name, tensor in saved.items():
        if problem := wrong_pieces(tensor.size, tensor.chunks):
            checkpoint.damaged(f"{name} is not covered by its pieces: {problem}")
    for name in tqdm(saved, desc=f"verify {checkpoint.folder}", unit=" tensors", disable=None):
        if not read_tensor(checkpoint, name).isfinite().all():
            checkpoint.damaged(f"{name} holds a number that is not finite")
    return Contents(checkpoint, saved)


def _not_of_the_model(checkpoint: Checkpoint, saved: dict[str, TensorStorageMetadata]) -> list[str]:
    """What is wrong with the tensors' names, shapes and dtypes, in words. Moments are all there, or none."""
    kinds = (*WEIGHTS, *MOMENTS) if checkpoint.has_moments else WEIGHTS
    shapes = checkpoint.shapes()
    if checkpoint.state.format == 1:
        shapes = {name: (math.prod(shape),) for name, shape in shapes.items()}
    wanted = {f"{kind}/{name}": shape for kind in kinds for name, shape in shapes.items()}
    wrong = [f"{name} is missing" for name in wanted.keys() - saved.keys()]
    wrong += [f"{name} is not of the model" for name in saved.keys() - wanted.keys()]
    for name in wanted.keys() & saved.keys():
        shape, dtype = tuple(saved[name].size), saved[name].properties.dtype
        if shape != wanted[name]:
            wrong.append(f"{name} has the shape {list(shape)}, not {list(wanted[name])}")
        if dtype != torch.float32:
            wrong.append(f"{name} is {dtype}, not torch.float32")
    return sorted(wrong)


def wrong_pieces(size: torch.Size, pieces: list[ChunkStorageMetadata]) -> str | None:
    """Why rectangles do not put a whole of this size together; None where they do."""
    form = (len(pieces), len(size))
    begin = np.array([piece.offsets for piece in pieces], dtype=np.int64).reshape(form)
    sizes = np.array([piece.sizes for piece in pieces], dtype=np.int64).reshape(form)
    end = begin + sizes
    if (begin < 0).any() or (sizes <= 0).any() or (end > np.array(size, dtype=np.int64)).any():
        return "one reaches beyond it"
    for k in range(1, len(pieces)):
        if ((begin[k] < end[:k]) & (begin[:k] < end[k])).all(axis=1).any():
            return "two overlap"
    lacking = size.numel() - int(sizes.prod(axis=1).sum())
    return f"{lacking:,} of {size.numel():,} elements are in none" if lacking else None


# Convert.


def convert(path: Path, out: Path, weights_only: bool = False) -> Contents:
    """Write a checkpoint, or a run's latest, of either format, as one of format 2 with one file of weights.

    weights_only leaves out AdamW's moments: the result cannot be resumed. Both are verified, the result
    before it gets its name, so OUT is whole or absent. One tensor is in memory at a time. Raises UserError.
    """
    check_new(out)
    source = verify(path).checkpoint
    shapes = source.shapes()
    kinds = (*WEIGHTS, *MOMENTS) if source.has_moments and not weights_only else WEIGHTS
    wanted = {f"{kind}/{name}": shape for kind in kinds for name, shape in shapes.items()}
    with new_folder(out) as partial:
        save_tensors(partial, wanted, lambda name: read_tensor(source, name).view(wanted[name]))
        shutil.copy(source.folder / "config.yaml", partial)
        shutil.copytree(source.folder / "tokenizer", partial / "tokenizer")
        seal(partial, source.state.model_copy(update={"format": 2}))
        verify(partial)
    return inspect(out)


class _OneAtATime(dcp.DefaultSavePlanner):
    """DCP is told of tensors on the meta device; each is read when it is written."""

    def __init__(self, read: Callable[[str], Tensor]):
        super().__init__()
        self.read = read

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.read(index.fqn)


def save_tensors(folder: Path, shapes: dict[str, tuple[int, ...]], read: Callable[[str], Tensor]) -> None:
    """Write float32 tensors of these names into one file, in DCP's form; `read` gives each. UserError."""
    state = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # DCP warns that it writes in one process: meant so
            dcp.save(state, checkpoint_id=folder, planner=_OneAtATime(read), no_dist=True)
    except CheckpointException as error:  # no Exception; it wraps all, such as a full disk or Ctrl-C
        raise error.failures[0][0] from None


def seal(folder: Path, state: State) -> None:
    """Write state.json, with the checksums of all the other files of a checkpoint's folder."""
    files = {name: sha256(folder / name) for name in checkpoint_files(folder)}
    state = state.model_copy(update={"files": files})
    write_atomically(folder / STATE, state.model_dump_json(indent=1) + "\n")
