"""Checkpoints that any grid and either engine loads: every parameter by name, whole, saved in pieces.

A checkpoint is a folder RUN/checkpoints/step-N in the form of torch's distributed checkpoint (DCP):

    raw/NAME, ema/NAME           master weights and their average, float32
    exp_avg/NAME, exp_avg_sq/NAME   AdamW's moments
    state.json                   step, counters, data, versions, checksums
    config.yaml, tokenizer/

Each rank writes what it holds (saver.py) and reads what it needs, so the number of ranks, tensor
parallelism, ZeRO stage and engine may change between the two. Padding of a split vocabulary is not saved.
"""

import hashlib
import json
import math
import re
import warnings
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal, NoReturn

import torch
import torch.distributed.checkpoint as dcp
from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    ValidationError,
    ValidationInfo,
    computed_field,
    model_validator,
)
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from lomdm_dist.config import Config, load_config
from lomdm_dist.data.shards import TokenizerFacts
from lomdm_dist.data.tokenizer import open_tokenizer
from lomdm_dist.errors import UserError, in_words
from lomdm_dist.files import first_link, sha256
from lomdm_dist.model import LoMDM
from lomdm_dist.parallel.grid import rank, world_size
from lomdm_dist.parallel.layout import Box, Layout, Piece, boxes, whole_layouts, whole_pieces
from lomdm_dist.parallel.optimizer import MOMENTS, set_update_count
from lomdm_dist.train.optim import WeightAverage
from lomdm_dist.train.safe_reader import METADATA, SafeReader, read_metadata

LATEST, STATE = "latest", "state.json"
NAME = re.compile(r"step-\d+|\.step-\d+\.before")  # of a checkpoint; the latter while it is saved again
WEIGHTS = ("raw", "ema")  # and MOMENTS: the kinds of saved tensors
WEIGHT_FILE = ".distcp"


@dataclass(frozen=True)
class Progress:
    """Where a run is: optimiser steps done, and what was consumed on the way."""

    step: int = 0
    sequences: int = 0
    tokens: int = 0


class DataFacts(BaseModel):
    """What a run was trained on; `identity` is the hash of the sequences themselves."""

    tokenizer: TokenizerFacts
    packing: str
    identity: str


def _plain(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{name!r} lies outside of it")
    return name


class State(BaseModel):
    """state.json. `files` holds the checksum of every other file of the checkpoint.

    checksum is that of all the rest here: an edited state is refused.
    Format 1 has every parameter as a vector; it is still read, but not by tensor-parallel ranks.
    """

    format: Literal[1, 2]
    step: int = Field(ge=0)
    sequences: int = Field(ge=0)
    tokens: int = Field(ge=0)
    ema_updates: int = Field(ge=0)
    data: DataFacts
    versions: dict[str, str]
    files: dict[Annotated[str, AfterValidator(_plain)], str]

    @computed_field
    @property
    def checksum(self) -> str:
        return _checksum(self.model_dump(mode="json", exclude={"checksum"}))

    @model_validator(mode="before")
    @classmethod
    def _not_edited(cls, values, info: ValidationInfo):
        """By what stands in the file, so that a field that a later version adds changes nothing."""
        read = info.mode == "json" and isinstance(values, dict)
        unsigned = read and "checksum" not in values and values.get("format") == 1  # as older ones are
        if read and not unsigned and values.get("checksum") != _checksum(values):
            raise ValueError("it was edited")
        return values


def _checksum(state: dict) -> str:
    content = json.dumps({key: state[key] for key in state.keys() - {"checksum"}}, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


class _InBoxes(Tensor):
    """A piece of a parameter, in the words of DCP's protocol for sharded tensors."""

    boxes: list[Box]
    whole: torch.Size

    @classmethod
    def of(cls, tensor: Tensor, layout: Layout, start: int) -> "_InBoxes":
        here = tensor.detach().as_subclass(cls)
        here.boxes, here.whole = boxes(layout, start, len(tensor)), torch.Size(layout.shape)
        return here

    def size(self, *_):
        """That of the whole parameter: DCP compares it with what was saved."""
        return self.whole

    def __create_chunk_list__(self):
        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in self.boxes]

    def __create_write_items__(self, name, _):
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.whole),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index):
        box = next(box for box in self.boxes if torch.Size(box.offsets) == index.offset)
        flat = self.as_subclass(Tensor)
        return flat[box.start : box.start + box.numel].view(box.sizes)


def engine_state(
    pieces: list[Piece], average: WeightAverage, copy: bool = False, flat: bool = False
) -> dict[str, Tensor]:
    """What a checkpoint holds of a run, as DCP saves and loads it: of this rank, under its names.

    copy: on the CPU, for a save in the background. flat: as format 1 has it, every parameter a vector.
    """
    state = {}
    for piece in pieces:
        here = {"raw": piece.master, "ema": average.averages[piece.name], **piece.moments}
        for kind, tensor in here.items():
            tensor = tensor.detach().to("cpu", copy=True) if copy else tensor
            state[f"{kind}/{piece.name}"] = _in_boxes(piece, tensor, flat)
    return state


def _in_boxes(piece: Piece, tensor: Tensor, flat: bool) -> Tensor:
    layout = Layout((math.prod(piece.layout.shape),)) if flat else piece.layout
    return _InBoxes.of(tensor, layout, piece.start)


def parameter_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """The shapes of a config's parameters, by name, as format 2 has them."""
    return {name: layout.shape for name, layout in whole_layouts(_model_without_memory(config)).items()}


def _model_without_memory(config: Config) -> LoMDM:
    with torch.device("meta"):
        return LoMDM(config.model, config.objective, config.data.attend)


def checkpoint_files(folder: Path) -> list[str]:
    """Names of all files of a checkpoint but state.json, below its folder, sorted."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return sorted(str(path.relative_to(folder)) for path in paths if path != folder / STATE)


def share_of(names: list[str]) -> list[str]:
    """This rank's share of the files: together the ranks read each once."""
    return names[rank() :: world_size()]


def steps_in(checkpoints: Path) -> dict[Path, int]:
    """Each step-N of a run's folder of checkpoints, and N, in their order."""
    found = {path: int(path.name[5:]) for path in checkpoints.glob("step-*") if path.name[5:].isdecimal()}
    return dict(sorted(found.items(), key=lambda item: item[1]))


def find_checkpoint(path: str | Path) -> Path:
    """A checkpoint folder, from itself or from its run's folder (then the latest). UserError."""
    path = Path(path)
    latest, checkpoints = path / LATEST, path / "checkpoints"
    if latest.is_file():
        name = latest.read_text(errors="replace").strip()
        path = checkpoints / name
        if not NAME.fullmatch(name):
            raise UserError(
                f"{latest} names {name[:40]!r}, which is no step-N of that run: {_there(checkpoints)}"
            )
        if not path.is_dir():
            raise UserError(f"{latest} names {name}, but there is no {path}: {_there(checkpoints)}")
    elif steps_in(checkpoints):
        raise UserError(f"{path} has checkpoints, but no file {LATEST} that names one: {_there(checkpoints)}")
    if path.parent.name == "checkpoints" and path.is_dir() and not (path / STATE).is_file():
        _damaged(path, f"{STATE} is missing")
    if not (path / STATE).is_file():
        raise UserError(f"no checkpoint in {path}: give a run folder or one of its checkpoints/step-N")
    return path


def _there(checkpoints: Path) -> str:
    """What else may be named."""
    names = [path.name for path in steps_in(checkpoints)]
    return f"there are {', '.join(names)}; name one" if names else "there is no checkpoint of this run"


def _damaged(folder: Path, reason: str) -> NoReturn:
    """UserError, with what to use instead."""
    step_of = steps_in(folder.parent)
    older = [path for path in step_of if step_of[path] < step_of.get(folder, 0)]
    another = f"the one before it is {older[-1]}" if older else "there is none before it"
    raise UserError(f"checkpoint {folder} is damaged ({reason}); {another}") from None


class Checkpoint:
    """A checkpoint on disk: its config (with `overrides`), state, and the weights. Raises UserError.

    Opening reads every file once and compares its checksum, the ranks of a job sharing the work;
    with read_weights=False the files of weights must be there, but are not read.
    """

    def __init__(
        self, path: str | Path, overrides: list[str] | tuple[str, ...] = (), read_weights: bool = True
    ):
        self.folder = find_checkpoint(path)
        try:
            self.state = State.model_validate_json((self.folder / STATE).read_bytes())
        except ValidationError as error:
            if any(problem["loc"] == ("format",) for problem in error.errors()):
                raise UserError(
                    f"checkpoint {self.folder} was written by another version of lomdm_dist: use that version"
                ) from None
            self.damaged(f"{STATE}: {in_words(error.errors()[0])}")
        if link := first_link(self.folder):
            self.damaged(f"{link.relative_to(self.folder)} is a link: put the file itself there")
        for name in share_of(sorted(self.state.files)):
            if not (self.folder / name).is_file():
                self.damaged(f"{name} is missing")
            is_read = read_weights or not name.endswith(WEIGHT_FILE)
            if is_read and sha256(self.folder / name) != self.state.files[name]:
                self.damaged(f"{name} is cut short or altered")
        self.config = load_config(self.folder / "config.yaml", overrides)
        self.progress = Progress(self.state.step, self.state.sequences, self.state.tokens)
        self.metadata = self._read_metadata()
        saved = self.metadata.state_dict_metadata
        self._sizes = {name: tensor.size.numel() for name, tensor in saved.items()}

    def _read_metadata(self) -> Metadata:
        """DCP's: shape, dtype and pieces of each saved tensor. Raises UserError."""
        try:
            return read_metadata(self.folder, self.state.files)
        except Exception as error:  # whatever a foreign or damaged file makes the reader raise
            self.damaged(f"{METADATA}: {' '.join(str(error).split()) or type(error).__name__}")

    @property
    def has_moments(self) -> bool:
        """Whether a run can be resumed from it; `lomdm checkpoint convert --weights-only` leaves them out."""
        return any(name.startswith(tuple(f"{kind}/" for kind in MOMENTS)) for name in self._sizes)

    def damaged(self, reason: str) -> NoReturn:
        """Raises UserError."""
        _damaged(self.folder, reason)

    def tokenizer(self):
        """The tokenizer that is saved with the checkpoint. Raises UserError."""
        return open_tokenizer(self.folder / "tokenizer", self.state.data.tokenizer)

    def load_weights(self, pieces: list[Piece], kind: str) -> None:
        """Fill the masters of pieces with the `raw` weights or their average, `ema`. UserError."""
        for piece in pieces:
            if piece.layout.dim is not None:
                piece.master.zero_()  # padding
        flat = self.state.format == 1
        self.read({f"{kind}/{piece.name}": _in_boxes(piece, piece.master, flat) for piece in pieces})

    def load_engine(self, engine, average: WeightAverage) -> None:
        """Fill this rank's moments, average and counters; its weights are filled already."""
        state = engine_state(engine.pieces, average, flat=self.state.format == 1)
        self.read({name: tensor for name, tensor in state.items() if not name.startswith("raw/")})
        average.updates = self.state.ema_updates
        set_update_count(engine.optimizer, self.state.ema_updates)  # steps left out are none

    def build_model(self, kind: str = "ema") -> LoMDM:
        """The model in float32 on the CPU, in evaluation mode."""
        model = _model_without_memory(self.config).to_empty(device="cpu")
        pieces = whole_pieces(model)
        self.check_fits({f"{kind}/{piece.name}": len(piece.master) for piece in pieces}, kind)
        self.load_weights(pieces, kind)
        return model.eval()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the config's parameters, by name, as format 2 has them."""
        return parameter_shapes(self.config)

    def check_fits(self, wanted: dict[str, int], kind: str) -> None:
        saved = {name: size for name, size in self._sizes.items() if name.startswith(f"{kind}/")}
        differences = [f"{name} missing" for name in wanted.keys() - saved.keys()]
        differences += [f"{name} not in the model" for name in saved.keys() - wanted.keys()]
        differences += [
            f"{name} has {saved[name]} elements, the model {size}"
            for name, size in wanted.items()
            if saved.get(name, size) != size
        ]
        if differences:
            some = "; ".join(sorted(differences)[:4]) + ("; ..." if len(differences) > 4 else "")
            raise UserError(
                f"checkpoint {self.folder} is of another model ({len(differences)} differences: {some})"
            )

    def read(self, state: dict[str, Tensor]) -> None:
        """Fill the tensors of `state`, of these names. Raises UserError."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # DCP warns that it reads in one process: meant so
                reader = SafeReader(self.folder, self.metadata)
                dcp.load(state, storage_reader=reader, no_dist=True)
        except (Exception, CheckpointException) as error:  # the latter is no Exception
            failed = [found for found, _ in getattr(error, "failures", {}).values()]
            if any(isinstance(found, KeyboardInterrupt) for found in failed):  # it wraps that as well
                raise KeyboardInterrupt from None
            lines = str(error).strip().splitlines()
            self.damaged(lines[-1] if lines else type(error).__name__)
