"""Checkpoints that any grid loads: every parameter saved by name, as a flat vector, in pieces.

A checkpoint is a folder RUN/checkpoints/step-N in the form of torch's distributed checkpoint (DCP):

    raw/NAME, ema/NAME           master weights and their average, float32
    exp_avg/NAME, exp_avg_sq/NAME   AdamW's moments
    state.json                   step, counters, tokenizer, versions
    config.yaml, tokenizer/

Each rank writes the pieces it holds and reads the ranges it needs, so the number of ranks and the
ZeRO stage may change between the two. A checkpoint is written under another name and renamed when
all ranks are done; only then does RUN/latest move.
"""

import json
import os
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from lomdm_dist.config import Config, load_config
from lomdm_dist.errors import UserError
from lomdm_dist.model import LoMDM
from lomdm_dist.parallel.engine import Piece, pieces, set_update_count
from lomdm_dist.parallel.grid import Grid
from lomdm_dist.train.optim import WeightAverage

LATEST = "latest"


@dataclass(frozen=True)
class Progress:
    """Where a run is: optimiser steps done, and what was consumed on the way."""

    step: int = 0
    sequences: int = 0
    tokens: int = 0


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
    engine, average: WeightAverage, progress: Progress, config: Config, facts: dict, grid: Grid
) -> Path:
    """Write RUN/checkpoints/step-N on all ranks, move `latest`, drop the oldest; returns the folder.

    `facts` (tokenizer, versions) go to state.json; facts["tokenizer_folder"] is copied.
    """
    run = config.train.run
    final = run / "checkpoints" / f"step-{progress.step}"
    partial = final.with_suffix(".partial")
    if grid.first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    grid.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(_engine_state(list(pieces(engine)), average), checkpoint_id=partial)
    if grid.first:
        config.save(partial / "config.yaml")
        shutil.copytree(facts["tokenizer_folder"], partial / "tokenizer")
        state = vars(progress) | {"ema_updates": average.updates}
        state |= {key: facts[key] for key in ("data", "versions")}
        (partial / "state.json").write_text(json.dumps(state, indent=1) + "\n")
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
        _replace(run / LATEST, final.name + "\n")
        _drop_old(final.parent, config.train.keep_last)
    grid.barrier()
    return final


def _replace(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old or the new content, never half of it."""
    temporary = path.with_name(path.name + ".partial")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)


def _drop_old(folder: Path, keep: int) -> None:
    steps = sorted(int(p.name.removeprefix("step-")) for p in folder.glob("step-*[0-9]"))
    for step in steps[:-keep]:
        shutil.rmtree(folder / f"step-{step}")


def find_checkpoint(path: str | Path) -> Path:
    """A checkpoint folder, from itself or from its run's folder (then the latest). UserError."""
    path = Path(path)
    if (path / LATEST).is_file():
        name = (path / LATEST).read_text().strip()
        path = path / "checkpoints" / name
        if not path.is_dir():
            raise UserError(f"{path.parent.parent / LATEST} names {name}, but there is no {path}")
    if not (path / "state.json").is_file():
        hint = "give a run folder or one of its checkpoints/step-N"
        raise UserError(f"no checkpoint in {path}: {hint}")
    return path


class Checkpoint:
    """A checkpoint on disk: its config, state, and the weights. Opening raises UserError."""

    def __init__(self, path: str | Path):
        self.folder = find_checkpoint(path)
        self.config = load_config(self.folder / "config.yaml")
        try:
            self.state = json.loads((self.folder / "state.json").read_text())
            self.progress = Progress(*(self.state[k] for k in ("step", "sequences", "tokens")))
            saved = dcp.FileSystemReader(self.folder).read_metadata().state_dict_metadata
        except Exception as error:  # whatever a damaged file makes the readers raise
            raise UserError(f"checkpoint {self.folder} is damaged ({error!r}); use an older one") from None
        self._sizes = {name: tensor.size.numel() for name, tensor in saved.items()}

    def load_weights(self, model: LoMDM, kind: str) -> None:
        """Fill a model on the CPU with the `raw` weights or their average, `ema`. UserError."""
        wanted = {f"{kind}/{name}": p.data.view(-1) for name, p in model.named_parameters()}
        self._check({name: len(tensor) for name, tensor in wanted.items()}, kind)
        self._read(wanted)

    def load_engine(self, engine, average: WeightAverage) -> None:
        """Fill this rank's master weights, moments, average and counters."""
        state = _engine_state(list(pieces(engine)), average)
        self._read(state)
        average.updates = self.state["ema_updates"]
        set_update_count(engine, self.progress.step)

    def build_model(self, kind: str = "ema") -> LoMDM:
        """The model in float32 on the CPU, in evaluation mode."""
        model = LoMDM(self.config.model, self.config.objective)
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
            reason = str(error).strip().splitlines()[-1] if str(error).strip() else repr(error)
            raise UserError(f"checkpoint {self.folder} is damaged ({reason}); use an older one") from None
