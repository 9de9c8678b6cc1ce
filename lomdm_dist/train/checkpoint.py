"""Checkpoints that any grid loads: every parameter saved by name, as a flat vector, in pieces.

A checkpoint is a folder RUN/checkpoints/step-N in the form of torch's distributed checkpoint (DCP):

    raw/NAME, ema/NAME           master weights and their average, float32
    exp_avg/NAME, exp_avg_sq/NAME   AdamW's moments
    state.json                   step, counters, data, versions, checksums
    config.yaml, tokenizer/

Each rank writes the pieces it holds and reads the ranges it needs, so the number of ranks and the
ZeRO stage may change between the two. A checkpoint is written under another name and renamed when
all ranks are done; only then does RUN/latest move.
"""

import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

import torch
import torch.distributed.checkpoint as dcp
from pydantic import BaseModel, Field, ValidationError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from lomdm_dist import machine
from lomdm_dist.config import Config, load_config
from lomdm_dist.data.shards import TokenizerFacts
from lomdm_dist.data.tokenizer import open_tokenizer
from lomdm_dist.errors import UserError
from lomdm_dist.files import sha256, write_atomically
from lomdm_dist.model import LoMDM
from lomdm_dist.parallel.engine import Piece, pieces, set_update_count
from lomdm_dist.parallel.grid import Grid, rank, world_size
from lomdm_dist.train.optim import WeightAverage

LATEST, STATE = "latest", "state.json"


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


class State(BaseModel):
    """state.json. `files` holds the checksum of every other file of the checkpoint."""

    format: Literal[1]
    step: int = Field(ge=0)
    sequences: int = Field(ge=0)
    tokens: int = Field(ge=0)
    ema_updates: int = Field(ge=0)
    data: DataFacts
    versions: dict[str, str]
    files: dict[str, str]


class _FlatPiece(Tensor):
    """A piece of a flattened parameter, in the words of DCP's protocol for sharded tensors."""

    start: int
    numel_of_whole: int

    @classmethod
    def of(cls, tensor: Tensor, start: int, numel: int) -> "_FlatPiece":
        piece = tensor.detach().as_subclass(cls)
        piece.start, piece.numel_of_whole = start, numel
        return piece

    def size(self, *_):
        """Of the whole parameter: DCP compares it with what was saved."""
        return torch.Size([self.numel_of_whole])

    def __create_chunk_list__(self):
        return [ChunkStorageMetadata(torch.Size([self.start]), torch.Size([len(self)]))]

    def __create_write_items__(self, name, _):
        (chunk,) = self.__create_chunk_list__()
        data = TensorWriteData(chunk, TensorProperties(dtype=self.dtype), torch.Size([self.numel_of_whole]))
        return [WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __get_tensor_shard__(self, _):
        return self.as_subclass(Tensor)


def _engine_state(engine_pieces: list[Piece], average: WeightAverage) -> dict[str, Tensor]:
    state = {}
    for piece in engine_pieces:
        here = {"raw": piece.master, "ema": average.averages[piece.name], **piece.moments}
        for kind, tensor in here.items():
            state[f"{kind}/{piece.name}"] = _FlatPiece.of(tensor, piece.start, piece.numel)
    return state


def save_checkpoint(
    engine,
    average: WeightAverage,
    progress: Progress,
    config: Config,
    data: DataFacts,
    tokenizer: Path | None,
    grid: Grid,
) -> Path:
    """Write RUN/checkpoints/step-N on all ranks, move `latest`, drop the oldest; returns the folder."""
    final = config.train.run / "checkpoints" / f"step-{progress.step}"
    partial = final.with_name(f".{final.name}.partial")
    try:
        if grid.first:
            for left in final.parent.glob(".step-*.partial"):  # of a run that was killed while saving
                shutil.rmtree(left, ignore_errors=True)
            partial.mkdir(parents=True)
        grid.barrier()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(_engine_state(list(pieces(engine)), average), checkpoint_id=partial)
        if grid.first:
            config.save(partial / "config.yaml")
            shutil.copytree(tokenizer, partial / "tokenizer")
        grid.barrier()
        shares = grid.gather({name: sha256(partial / name) for name in _share(checkpoint_files(partial))})
        if grid.first:
            state = State(
                format=1,
                **vars(progress),
                ema_updates=average.updates,
                data=data,
                versions=machine.versions(),
                files={name: digest for share in shares for name, digest in share.items()},
            )
            (partial / STATE).write_text(state.model_dump_json(indent=1) + "\n")
            _publish(partial, final)
            write_atomically(config.train.run / LATEST, final.name + "\n")
            _drop_old(final, config.train.keep_last)
        grid.barrier()
    except BaseException:
        if grid.first:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return final


def checkpoint_files(folder: Path) -> list[str]:
    """Names of all files of a checkpoint but state.json, below its folder, sorted."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return sorted(str(path.relative_to(folder)) for path in paths if path.name != STATE)


def _share(names: list[str]) -> list[str]:
    """This rank's share of the files: together the ranks read each once."""
    return names[rank() :: world_size()]


def _publish(partial: Path, final: Path) -> None:
    """Rename; a checkpoint of the same step from before a resume makes room."""
    if final.exists():
        old = final.with_name(f".{final.name}.old.partial")
        final.rename(old)
        partial.rename(final)
        shutil.rmtree(old)
    else:
        partial.rename(final)


def _drop_old(newest: Path, keep: int) -> None:
    """Keep the last `keep` up to the newest. Later ones, of a run resumed from before them, stay."""
    step_of = {p: int(p.name[5:]) for p in newest.parent.glob("step-*") if p.name[5:].isdecimal()}
    past = sorted((p for p in step_of if step_of[p] <= step_of[newest]), key=step_of.get)
    for path in past[:-keep]:
        shutil.rmtree(path)


def find_checkpoint(path: str | Path) -> Path:
    """A checkpoint folder, from itself or from its run's folder (then the latest). UserError."""
    path = Path(path)
    if (path / LATEST).is_file():
        latest, name = path / LATEST, (path / LATEST).read_text(errors="replace").strip()
        path = path / "checkpoints" / name
        if not path.is_dir():
            raise UserError(f"{latest} names {name}, but there is no {path}; name another with --resume")
    if not (path / STATE).is_file():
        hint = "give a run folder or one of its checkpoints/step-N"
        raise UserError(f"no checkpoint in {path}: {hint}")
    return path


class Checkpoint:
    """A checkpoint on disk: its config (with `overrides`), state, and the weights. Raises UserError.

    Opening reads every file once and compares its checksum, the ranks of a job sharing the work.
    """

    def __init__(self, path: str | Path, overrides: list[str] | tuple[str, ...] = ()):
        self.folder = find_checkpoint(path)
        try:
            self.state = State.model_validate_json((self.folder / STATE).read_bytes())
        except ValidationError as error:
            if any(problem["loc"] == ("format",) for problem in error.errors()):
                raise UserError(
                    f"checkpoint {self.folder} was written by another version of lomdm_dist: use that version"
                ) from None
            self._damaged(f"{STATE}: {error.errors()[0]['msg']}")
        for name in _share(sorted(self.state.files)):
            if not (self.folder / name).is_file():
                self._damaged(f"{name} is missing")
            if sha256(self.folder / name) != self.state.files[name]:
                self._damaged(f"{name} is cut short or altered")
        self.config = load_config(self.folder / "config.yaml", overrides)
        self.progress = Progress(self.state.step, self.state.sequences, self.state.tokens)
        try:
            saved = dcp.FileSystemReader(self.folder).read_metadata().state_dict_metadata
        except Exception as error:  # whatever a foreign or damaged file makes the reader raise
            self._damaged(f".metadata: {type(error).__name__}")
        self._sizes = {name: tensor.size.numel() for name, tensor in saved.items()}

    def _damaged(self, reason: str) -> NoReturn:
        raise UserError(f"checkpoint {self.folder} is damaged ({reason}); use an older one") from None

    def tokenizer(self):
        """The tokenizer that is saved with the checkpoint. Raises UserError."""
        return open_tokenizer(self.folder / "tokenizer", self.state.data.tokenizer)

    def load_weights(self, model: LoMDM, kind: str) -> None:
        """Fill a model on the CPU with the `raw` weights or their average, `ema`. UserError."""
        wanted = {f"{kind}/{name}": p.data.view(-1) for name, p in model.named_parameters()}
        self._check({name: len(tensor) for name, tensor in wanted.items()}, kind)
        self._read(wanted)

    def load_engine(self, engine, average: WeightAverage) -> None:
        """Fill this rank's master weights, moments, average and counters."""
        state = _engine_state(list(pieces(engine)), average)
        self._read(state)
        average.updates = self.state.ema_updates
        set_update_count(engine, self.progress.step)

    def build_model(self, kind: str = "ema") -> LoMDM:
        """The model in float32 on the CPU, in evaluation mode."""
        model = LoMDM(self.config.model, self.config.objective, self.config.data.attend)
        self.load_weights(model, kind)
        return model.eval()

    def _check(self, wanted: dict[str, int], kind: str) -> None:
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

    def _read(self, state: dict[str, Tensor]) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # DCP warns that it reads in one process: meant so
                dcp.load(state, checkpoint_id=self.folder, no_dist=True)
        except (Exception, CheckpointException) as error:  # the latter is no Exception
            lines = str(error).strip().splitlines()
            self._damaged(lines[-1] if lines else type(error).__name__)
