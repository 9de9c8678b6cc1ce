"""Writing checkpoints in the background, so that what `latest` names is always whole.

A save copies this rank's pieces to the CPU and returns; a thread writes them, on every rank, into a folder
of another name, adds the checksums, renames it, and only then moves RUN/latest. One save is under way at a
time. The threads talk over a process group of their own. A save that fails is said, and training goes on:
the next may find room again.
"""

import errno
import os
import shutil
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from lomdm_dist import machine
from lomdm_dist.config import Config, load_config
from lomdm_dist.errors import UserError
from lomdm_dist.files import is_full, sha256, write_atomically
from lomdm_dist.parallel.grid import Grid, rank
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
    steps_in,
)
from lomdm_dist.train.optim import WeightAverage

PATIENCE = 30.0  # seconds between words about a disk that is slow

warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed.checkpoint")


class Saver:
    """Saves the checkpoints of one run; `say` is told of each, whether it is complete or has failed."""

    def __init__(self, config: Config, data: DataFacts, tokenizer: Path | None, grid: Grid, say: Callable):
        self.config, self.data, self.tokenizer, self.grid, self.say = config, data, tokenizer, grid, say
        self.folder = config.train.run / "checkpoints"
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._last: Future | None = None
        self._raised = False  # whether an error of the last save is what training ends with

    @property
    def failed(self) -> bool:
        """Whether the last save that has ended on this rank could not be written."""
        return self._last is not None and self._last.done() and self._last.exception() is not None

    def save(self, pieces: list[Piece], average: WeightAverage, progress: Progress, goes_on=False) -> None:
        """Begin to save, on all ranks; first waits for the save before this one.

        UserError where that one failed, training would go on after this one, and the config says stop.
        """
        began = time.monotonic()
        while self._last is not None and wait([self._last], PATIENCE).not_done:
            waited = time.monotonic() - began
            self.say(f"the save before this one is not yet written: training has waited for {waited:.0f} s")
        if goes_on and self.config.faults.on_failed_save == "stop":
            self.wait()
        state = engine_state(pieces, average, copy=True)
        self._raised = not goes_on
        self._last = self._thread.submit(self._write, state, progress, average.updates)

    def wait(self) -> None:
        """Until the last save is complete. UserError where it could not be written."""
        if self._last is not None:
            self._last.result()

    def close(self) -> None:
        self._thread.shutdown()

    def _write(self, state: dict, progress: Progress, updates: int) -> None:
        final = self.folder / f"step-{progress.step}"
        partial = final.with_name(f".{final.name}.partial")
        try:
            self._together(final, lambda: _check_finite(state))
            self._together(final, lambda: self._prepare(partial))
            self._together(final, lambda: self._write_pieces(state, partial))
            self._together(final, lambda: self._add_config(partial))
            names = set().union(*self._together(final, lambda: checkpoint_files(partial)))
            shares = self._together(final, lambda: _checksums(partial, sorted(names)))
            files = {name: digest for share in shares for name, digest in share.items()}
            self._together(final, lambda: self._publish(partial, final, progress, updates, files))
        except BaseException as error:
            if self.grid.first:
                shutil.rmtree(partial, ignore_errors=True)
            if not self._raised:
                self.say(f"error: {error}")
            raise
        self.say(f"saved {final}")
        if self.grid.first:
            for problem in drop_old(final, self.config.train.keep_last):
                self.say(f"an old checkpoint stays: {problem}")

    def _together(self, final: Path, work: Callable) -> list:
        """Run `work` on every rank; what each returned. An error of one is an error of all, not a hang."""
        result = error = None
        try:
            result = work()
        except (Exception, CheckpointException) as problem:  # the latter is no Exception
            error = f"{type(problem).__name__}: {problem}".strip().splitlines()[-1]
            if is_full(self.config.train.run):  # torch's writer says something else
                error = os.strerror(errno.ENOSPC)
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

    def _write_pieces(self, state: dict, partial: Path) -> None:
        dcp.save(state, checkpoint_id=partial, process_group=self.grid.saving)

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
        publish(partial, final, self.config.train.run / LATEST)


def _check_finite(state: dict) -> None:
    """A checkpoint that no run can go on from must not take the place of one that it can."""
    for name, tensor in state.items():
        if name.startswith("raw/") and not torch.Tensor.isfinite(tensor.as_subclass(torch.Tensor)).all():
            raise ValueError(f"the weights {name.removeprefix('raw/')} are no numbers")


def _checksums(partial: Path, names: list[str]) -> dict[str, str]:
    """The checksums of this rank's share of `names`, the files that any rank has; the first sees them all."""
    mine = share_of(names)
    for name in names if rank() == 0 else mine:
        if not (partial / name).exists():
            raise FileNotFoundError(f"{name}, which another rank wrote, is not there: is it a shared disk?")
    return {name: sha256(partial / name) for name in mine}


def publish(partial: Path, final: Path, latest: Path) -> None:
    """Give a whole checkpoint its name, and `latest` that; at every moment it names a whole one.

    A checkpoint of the same step may be there, from before a resume of an earlier one, and `latest` may
    name it: it gets a second name, which `latest` names until the new one stands.
    """
    before, gone = (final.with_name(f".{final.name}.{word}") for word in ("before", "gone.partial"))
    if final.exists():
        shutil.rmtree(before, ignore_errors=True)
        shutil.copytree(final, before, copy_function=_link)
        write_atomically(latest, before.name + "\n")
        final.rename(gone)
    partial.rename(final)
    descriptor = os.open(final.parent, os.O_RDONLY)
    os.fsync(descriptor)  # so that `latest`, written next, never names a folder that a crash took back
    os.close(descriptor)
    write_atomically(latest, final.name + "\n")
    for old in (gone, *final.parent.glob(".step-*.before")):
        shutil.rmtree(old, ignore_errors=True)


def _link(source: str, target: str) -> None:
    """A second name for a file; a copy where the file system has no such thing."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def drop_old(newest: Path, keep_last: int) -> list[Exception]:
    """Keep the last `keep_last` up to the newest, and what was saved to be kept for good; why others stayed.

    Later ones, of a run resumed from before them, stay; so do links, to other disks say, and what does not
    tell whether it is to be kept.
    """
    problems = []
    step_of = steps_in(newest.parent)
    past = [path for path in step_of if step_of[path] <= step_of[newest]]
    for path in [path for path in past if path.is_dir() and not path.is_symlink()][:-keep_last]:
        try:
            # of the run that saved it: one that goes on with another value does not drop what that one keeps
            keep_every = load_config(path / "config.yaml").train.keep_every
            if not (keep_every and step_of[path] % keep_every == 0):
                gone = path.with_name(
                    f".{path.name}.gone.partial"
                )  # cut short, the next save removes the rest
                shutil.rmtree(path.rename(gone))
        except (OSError, UserError) as problem:
            problems.append(problem)
    return problems
