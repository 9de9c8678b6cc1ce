"""What a run reads, opened and checked before any process group starts, and its folder's lock."""

import contextlib
import errno
import hashlib
import os
import platform
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lomdm_dist.config import Config
from lomdm_dist.data.reader import Reader, access_of, check_alike, open_reader
from lomdm_dist.data.shards import ShardSet, check_model_fits
from lomdm_dist.data.tokenizer import open_tokenizer
from lomdm_dist.errors import UserError
from lomdm_dist.files import hold
from lomdm_dist.parallel.grid import Grid, place_on_machine, rank, world_size
from lomdm_dist.train.checkpoint import LATEST, Checkpoint, parameter_shapes
from lomdm_dist.train.metrics import METRICS

STOP = "stop"  # RUN/stop, made by anyone: reaches all machines, and has no launcher that waits 30 s and kills
FIRST = 4  # differences, or ranks, that an error names
APPEARS = 15.0  # seconds until a new file is seen on all hosts
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # Lustre without the mount option flock, say
LOCK = "lock"  # held by the first process of a run; its presence marks a run folder


@dataclass(frozen=True)
class Inputs:
    """What a run reads, opened and checked before any process group starts."""

    train: Reader
    valid: ShardSet
    resumed: Checkpoint | None
    start: Checkpoint | None = None  # whose weights a new run starts with


def open_inputs(config: Config, resume: str | None) -> Inputs:
    """Check everything that can be known in one process. `resume`: None, "auto" or a path. UserError."""
    first = rank() == 0
    config.accumulation(config.data_parallel(world_size()))
    train = open_reader(config.data, config.train.seed)
    valid = ShardSet(config.data.valid, access_of(config.data))
    for shards in (*train.sources, valid):
        check_model_fits(shards, config.model)
    check_alike([*train.sources, valid])
    place = place_on_machine()  # the processes of a machine share the reading
    train.check(*place)
    valid.check_extra()
    for error in valid.check(*place):
        raise error
    if first:
        open_tokenizer(train.first.tokenizer_folder(), train.first.tokenizer)
    resumed = _open_resumed(config, resume, train)
    return Inputs(train, valid, resumed, None if resumed else _open_start(config, train))


def _open_resumed(config: Config, resume: str | None, train: Reader) -> Checkpoint | None:
    """The checkpoint to continue from, if any; never one that would overwrite another run."""
    run = config.train.run
    started = (run / LATEST).exists()
    if run.exists() and not run.is_dir():
        raise UserError(f"train.run {run} is a file; give a folder")
    if resume is None and started:
        raise UserError(
            f"{run} holds checkpoints of an earlier run: continue it with --resume auto, "
            "or give another train.run"
        )
    if not started and any(run.glob("checkpoints/step-*/state.json")) and resume in (None, "auto"):
        raise UserError(
            f"{run} has checkpoints, but no file {LATEST} that names one: write step-N into it, or give "
            "another train.run"
        )
    if (
        run.exists()
        and {path.name for path in run.iterdir()} - {STOP}
        and not started
        and not (run / LOCK).exists()
        and not (run / METRICS).exists()  # all that a run writes anew whose folder was deleted under it
    ):
        raise UserError(f"train.run {run} holds files that are not of a run; give another folder")
    if resume is None or (resume == "auto" and not started):
        return None
    resumed = Checkpoint(run if resume == "auto" else resume)
    if started and resumed.folder.resolve().parent != (run / "checkpoints").resolve():
        raise UserError(
            f"{run} holds checkpoints of its own: to start from {resumed.folder}, give another train.run"
        )
    _check_resumable(resumed, config, train)
    return resumed


def _check_resumable(checkpoint: Checkpoint, config: Config, train: Reader) -> None:
    if not checkpoint.has_moments:
        raise UserError(
            f"checkpoint {checkpoint.folder} holds weights only, without AdamW's moments: resume from the "
            "checkpoint that it was made from, or begin a run with these weights by train.start_from"
        )
    _check_form(checkpoint, config)
    ours, theirs = config.as_dict(), checkpoint.config.as_dict()
    fixed = {
        "model": ours["model"].keys() - {"dropout", "dropout_rng"},
        "objective": (ours["objective"].keys() & theirs["objective"].keys()) - {"time", "time_eps"},
        "data": {"attend"},
        "train": {"global_batch", "seed"},
    }
    different = [
        f"{section}.{key} was {theirs[section][key]}, is {ours[section][key]}"
        for section, keys in fixed.items()
        for key in sorted(keys)
        if ours[section][key] != theirs[section][key]
    ]
    if checkpoint.state.data.tokenizer != train.first.tokenizer:
        different.append("the tokenizer of the shards is another")
    elif checkpoint.state.data.identity != train.identity():
        sources = ", ".join(map(str, train.sources))
        different.append(
            f"the sequences in {sources} are others, or mixed in another way (weights, data.window)"
        )
    if different:
        raise UserError(f"checkpoint {checkpoint.folder} cannot continue as this run: {'; '.join(different)}")


def _check_form(checkpoint: Checkpoint, config: Config) -> None:
    if checkpoint.state.format == 1 and config.parallel.tensor_parallel > 1:
        raise UserError(
            f"checkpoint {checkpoint.folder} is of an older form, which tensor-parallel ranks cannot load: "
            f"`lomdm checkpoint convert {checkpoint.folder} NEW` first"
        )


def _open_start(config: Config, train: Reader) -> Checkpoint | None:
    """`train.start_from`. UserError where a part that both have, the backbone or a head, differs."""
    if config.train.start_from is None:
        return None
    start = Checkpoint(config.train.start_from)
    _check_form(start, config)
    theirs, ours = start.shapes(), parameter_shapes(config)
    shared = parts_of(theirs) & parts_of(ours)
    different = [
        f"{name} is {_shape(theirs.get(name))} there, {_shape(ours.get(name))} here"
        for name in dict.fromkeys([*theirs, *ours])
        if theirs.get(name) != ours.get(name) and parts_of([name]) <= shared
    ]
    for key in ("heads", "mask_id"):  # which no shape shows
        there, here = getattr(start.config.model, key), getattr(config.model, key)
        different += [] if there == here else [f"model.{key} is {there} there, {here} here"]
    if start.state.data.tokenizer != train.first.tokenizer:
        different.append("the tokenizer of the shards is another")
    if different:
        some = "; ".join(different[:FIRST]) + ("; ..." if len(different) > FIRST else "")
        raise UserError(
            f"train.start_from: checkpoint {start.folder} is of another model ({len(different)} differences: "
            f"{some})"
        )
    return start


def parts_of(names: Iterable[str]) -> set[str]:
    """`backbone`, and the heads `phi`, `psi` or `token_exponents`, of parameters of these names."""
    return {name.partition(".")[0] for name in names}


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else str(list(shape))


def check_together(inputs: Inputs, run: Path, grid: Grid) -> None:
    """UserError, on all ranks, where they have opened different things, or do not see one folder."""
    opened = {
        "checkpoint to resume from": inputs.resumed and (inputs.resumed.folder.name, inputs.resumed.state),
        "checkpoint to start from": inputs.start and inputs.start.state,
        "training data": inputs.train.identity(),
        "validation data": inputs.valid.manifest.identity,
    }
    digests = {what: hashlib.sha256(repr(found).encode()).hexdigest() for what, found in opened.items()}
    of_ranks = grid.gather(digests)
    for what in opened:
        if others := [rank for rank, theirs in enumerate(of_ranks) if theirs[what] != of_ranks[0][what]]:
            raise UserError(
                f"{_ranks(others)} found another {what} than rank 0; all hosts must have the same"
            )
    seen = run / f".seen-{grid.gather(uuid.uuid4().hex)[0]}"
    if grid.first:
        seen.touch()
    grid.all_agree(True)
    blind = [rank for rank, sees in enumerate(grid.gather(_appears(seen))) if not sees]
    if grid.first:
        seen.unlink()
    if blind:
        raise UserError(
            f"{_ranks(blind)} cannot see what rank 0 writes to train.run {run}: give a folder on a disk that "
            "all hosts share"
        )


def _appears(path: Path) -> bool:
    """Whether a file is there, or comes within the time for which a file server may not tell."""
    until = time.monotonic() + APPEARS
    while not (there := path.exists()) and time.monotonic() < until:
        time.sleep(0.1)
    return there


def _ranks(ranks: list[int]) -> str:
    some = ", ".join(map(str, ranks[:FIRST])) + (", ..." if len(ranks) > FIRST else "")
    return f"rank {some}" if len(ranks) == 1 else f"ranks {some}"


@contextlib.contextmanager
def run_lock(run: Path):
    """Hold a run's folder against a second job; the system lets go of it when this process ends."""
    if rank() != 0:
        yield
        return
    with contextlib.ExitStack() as held:
        try:
            run.mkdir(parents=True, exist_ok=True)
            lock = held.enter_context(hold(run / LOCK, wait=False))
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {platform.node()}\n".encode())
        except BlockingIOError:
            holder = (run / LOCK).read_text().strip()
            raise UserError(f"{run} is in use by {holder}; stop it or wait") from None
        except OSError as error:
            locks = "; train.run needs a file system with locks (flock)" if error.errno in NO_LOCKS else ""
            raise UserError(f"cannot write to train.run {run}: {error.strerror}{locks}") from None
        yield
