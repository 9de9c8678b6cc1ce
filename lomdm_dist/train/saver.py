"""Writing checkpoints in the background, so that what `latest` names is always whole.

A save copies this rank's pieces to the CPU and returns; a thread writes them, on every rank, into a folder
of another name, adds the checksums, renames it, and only then moves RUN/latest. One save is under way at a
time. The threads talk over a process group of their own.
"""

import os
import shutil
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from lomdm_dist import machine
from lomdm_dist.config import Config
from lomdm_dist.errors import UserError
from lomdm_dist.files import sha256, write_atomically
from lomdm_dist.parallel.grid import Grid
from lomdm_dist.parallel.layout import Piece
from lomdm_dist.train.checkpoint import (
    LATEST,
    STATE,
    DataFacts,
    Progress,
    State,
    checkpoint_files,
    engine_state,
    share_of,
)
from lomdm_dist.train.optim import WeightAverage

warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed.checkpoint")


class Saver:
    """Saves the checkpoints of one run; `say` is told of each that is complete."""

    def __init__(self, config: Config, data: DataFacts, tokenizer: Path | None, grid: Grid, say: Callable):
        self.config, self.data, self.tokenizer, self.grid, self.say = config, data, tokenizer, grid, say
        self.folder = config.train.run / "checkpoints"
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._last: Future | None = None

    def save(self, pieces: list[Piece], average: WeightAverage, progress: Progress) -> None:
        """Begin to save, on all ranks; first waits for the save before this one. Raises what that raised."""
        self.wait()
        state = engine_state(pieces, average, copy=True)
        self._last = self._thread.submit(self._write, state, progress, average.updates)

    def wait(self) -> None:
        """Until the last save is complete. UserError where it could not be written."""
        if self._last is not None:
            last, self._last = self._last, None
            last.result()

    def close(self) -> None:
        self._thread.shutdown()

    def _write(self, state: dict, progress: Progress, updates: int) -> None:
        final = self.folder / f"step-{progress.step}"
        partial = final.with_name(f".{final.name}.partial")
        try:
            self._together(final, lambda: self._prepare(partial))
            self._together(
                final, lambda: dcp.save(state, checkpoint_id=partial, process_group=self.grid.saving)
            )
            self._together(final, lambda: self._add_config(partial))
            names = share_of(checkpoint_files(partial))
            shares = self._together(final, lambda: {name: sha256(partial / name) for name in names})
            files = {name: digest for share in shares for name, digest in share.items()}
            self._together(final, lambda: self._publish(partial, final, progress, updates, files))
        except BaseException:
            if self.grid.first:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        self.say(f"saved {final}")

    def _together(self, final: Path, work: Callable) -> list:
        """Run `work` on every rank; what each returned. An error of one is an error of all, not a hang."""
        result = error = None
        try:
            result = work()
        except (OSError, CheckpointException) as problem:
            error = f"{problem}".strip().splitlines()[-1]
        outcomes = [None] * dist.get_world_size(self.grid.saving)
        dist.all_gather_object(outcomes, (result, error), group=self.grid.saving)
        problems = [error for _, error in outcomes if error]
        if problems:
            raise UserError(f"cannot write checkpoint {final}: {problems[0]}")
        return [result for result, _ in outcomes]

    def _prepare(self, partial: Path) -> None:
        if self.grid.first:
            for left in self.folder.glob(".step-*.partial"):  # of a run that was killed while saving
                shutil.rmtree(left, ignore_errors=True)
            partial.mkdir(parents=True)

    def _add_config(self, partial: Path) -> None:
        if self.grid.first:
            self.config.save(partial / "config.yaml")
            shutil.copytree(self.tokenizer, partial / "tokenizer")

    def _publish(self, partial: Path, final: Path, progress: Progress, updates: int, files: dict) -> None:
        if not self.grid.first:
            return
        state = State(
            format=2,
            **vars(progress),
            ema_updates=updates,
            data=self.data,
            versions=machine.versions(),
            files=files,
        )
        write_atomically(partial / STATE, state.model_dump_json(indent=1) + "\n")
        _move(partial, final)
        write_atomically(self.config.train.run / LATEST, final.name + "\n")
        drop_old(final, self.config.train.keep_last, self.config.train.keep_every)


def _move(partial: Path, final: Path) -> None:
    """Rename; a checkpoint of the same step from before a resume makes room."""
    old = final.with_name(f".{final.name}.old.partial")
    if final.exists():
        final.rename(old)
    partial.rename(final)
    descriptor = os.open(final.parent, os.O_RDONLY)
    os.fsync(descriptor)  # so that `latest`, written next, never names a folder that a crash took back
    os.close(descriptor)
    shutil.rmtree(old, ignore_errors=True)


def drop_old(newest: Path, keep_last: int, keep_every: int) -> None:
    """Keep the last `keep_last` up to the newest, and every multiple of `keep_every`, 0 for none.

    Later ones, of a run resumed from before them, stay.
    """
    step_of = {p: int(p.name[5:]) for p in newest.parent.glob("step-*") if p.name[5:].isdecimal()}
    past = sorted((p for p in step_of if step_of[p] <= step_of[newest]), key=step_of.get)
    for path in past[:-keep_last]:
        if not (keep_every and step_of[path] % keep_every == 0):
            shutil.rmtree(path)
