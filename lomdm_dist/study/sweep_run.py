"""The trainings of a sweep: some at a time on this machine, or each as a SLURM job.

Each point is `lomdm train --resume auto` in processes of its own. What is known of a point stands on disk:
its run's checkpoints, and RUNS/points.json, written anew whenever a point starts or ends. So a sweep that
was killed, however, goes on where it was.
"""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from lomdm_dist.children import end_with_parent
from lomdm_dist.errors import REQUEUE, StoppedOnRequest, UserError
from lomdm_dist.files import is_held, write_atomically
from lomdm_dist.machine import to_json
from lomdm_dist.secrets import hide
from lomdm_dist.study.sweep import CONVENTION, Diverged, Point, Sweep, is_done, objects, result_of
from lomdm_dist.train.inputs import LOCK

POINTS = "points.json"
LOOK_SECONDS = 0.5
IN_USE_SECONDS = 120  # that a run which another process holds is waited for: a killed sweep's may still save
LAST_LINES = 5  # of a failed point's output that are kept
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
STOP_SAID = "stopped on request after step"  # by a training that has saved
WAITING, RUNNING, DONE, FAILED, STOPPED = "waiting", "running", "done", "failed", "stopped"


@dataclass
class Record:
    """What is known of a point; `error` holds the last lines of one that failed, `job` is SLURM's number."""

    point: Point
    status: str = WAITING
    result: dict | None = None
    error: list[str] = field(default_factory=list)
    job: str | None = None

    def as_dict(self) -> dict:
        point = self.point
        return {
            "name": point.name,
            "group": point.group,
            "overrides": list(point.overrides),
            "status": self.status,
            "result": self.result
            and self.result | {"overrides": list(point.overrides), "status": self.status},
            "error": self.error,
            "job": self.job,
            "identity": point.identity,
        }


def look_up(sweep: Sweep, retry: bool = False) -> list[Record]:
    """Each point as it is on disk. UserError where a run is of another config.

    A point that has failed is to be run again where its config has changed since, or with `retry`.
    """
    before, records = _read_points(sweep.folder / POINTS), []
    for point in sweep.points:
        record, old = Record(point), before.get(point.name, {})
        if is_done(point):
            _finish(record)
        elif old.get("identity") == point.identity:
            record.job = old["job"]
            if old["status"] == FAILED and not retry:
                record.status, record.error = FAILED, old["error"]
        records.append(record)
    return records


def _read_points(path: Path) -> dict[str, dict]:
    """What an earlier call wrote, by name. UserError where it is damaged: jobs would be started twice."""
    try:
        points = {point["name"]: point for point in json.loads(path.read_text())["points"]}
        keys = {"identity", "status", "error", "job"}
        if all(keys <= point.keys() and isinstance(point["error"], list) for point in points.values()):
            return points
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise UserError(
        f"{path} is damaged: remove it, and the sweep goes on from its runs (which points have failed, and "
        "jobs of SLURM that still run, it then does not know)"
    )


def _finish(record: Record) -> None:
    """Note the result of a training that has done its steps."""
    try:
        record.status, record.result = DONE, result_of(record.point)
    except Diverged as error:
        record.status, record.error = FAILED, [f"error: {error}"]


def train_command(sweep: Sweep, point: Point, processes: int) -> list[str]:
    launcher = []
    if processes > 1:
        launcher = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(processes), "-m", "--"]
    return [sys.executable, "-m", *launcher, "lomdm_dist.cli", *_arguments(sweep, point)]


def _arguments(sweep: Sweep, point: Point) -> list[str]:
    return ["train", "--config", str(sweep.base), *point.overrides, "--resume", "auto"]


def command_to_print(sweep: Sweep, point: Point, processes: int, hostfile: Path | None) -> list[str]:
    """As a user would type it."""
    launcher = ["python"]
    if hostfile:
        launcher = ["deepspeed", "--hostfile", str(hostfile)]
    elif processes > 1:
        launcher = ["torchrun", "--nproc_per_node", str(processes)]
    return [*launcher, "train.py", *_arguments(sweep, point)[1:]]


class Local:
    """This machine, `jobs` points at a time, each with its share of the cores' threads or GPUs of its own.

    Points are not pinned to cores: Linux then hardly lets other sessions run beside them.
    """

    def __init__(self, sweep: Sweep, jobs: int | None, processes: int):
        """UserError where the machine has not as many GPUs."""
        self.sweep, self.processes = sweep, processes
        count = torch.cuda.device_count()
        seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
        self.gpus = seen.split(",")[:count]
        self.jobs = jobs or max(1, count // processes)
        if count and self.jobs * processes > count:
            raise UserError(
                f"--jobs {self.jobs} x --processes {processes} need {self.jobs * processes} GPUs, this "
                f"machine has {count}"
            )
        self.free = list(range(self.jobs))

    def reattach(self, records: list[Record]) -> dict:
        """Nothing: a training here ends with its sweep. UserError where one may still be a SLURM job."""
        for record in _waiting(records):
            if record.job:
                raise UserError(
                    f"point {record.point.name} is SLURM job {record.job}, or was: --slurm shows how it is"
                )
        return {}

    def start(self, record: Record) -> "LocalTraining":
        return LocalTraining(self, record.point, self.free.pop(0))

    def stop(self, running: dict) -> None:
        for training in running.values():
            training.stop()

    def environment(self, slot: int) -> dict[str, str]:
        mine = self.gpus[slot * self.processes : (slot + 1) * self.processes]
        threads = max(1, len(os.sched_getaffinity(0)) // (self.jobs * self.processes))
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(mine)} if mine else {}
        # torchrun would kill after 30 s what has not saved yet
        more = {"OMP_NUM_THREADS": str(threads), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "240"}
        return os.environ | visible | more


class LocalTraining:
    """A running point. It dies with the sweep's process, after saving."""

    def __init__(self, place: Local, point: Point, slot: int):
        self.place, self.slot, self.log, self.asked = place, slot, point.log, False
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.begin = self.log.stat().st_size if self.log.exists() else 0
        command = train_command(place.sweep, point, place.processes)
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=place.environment(slot),
                process_group=0,  # Ctrl-C reaches the sweep alone, which then asks all to stop
                preexec_fn=end_with_parent(),
            )

    def status(self) -> int | None:
        """Exit status, None while it runs."""
        status = self.process.poll()
        if status is not None:
            self.place.free.append(self.slot)
        return status

    def stop(self) -> None:
        if not self.asked:  # torchrun must not be asked twice
            self.asked = True
            self.process.send_signal(signal.SIGTERM)

    def last_lines(self) -> list[str]:
        return last_lines(self.log, self.begin)


def last_lines(log: Path, begin: int = 0) -> list[str]:
    """What a training said last, from byte `begin` of its log on; its error too, if that came before."""
    try:
        with open(log, "rb") as file:
            file.seek(max(begin, log.stat().st_size - 2**16))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    lines = [hide(line.rstrip()) for line in text.splitlines() if line.strip()]
    errors = [line for line in lines[:-LAST_LINES] if line.startswith("error: ")]
    return errors[-1:] + lines[-LAST_LINES:]


def run_sweep(
    sweep: Sweep, records: list[Record], chosen: list[Record], place, watch: Callable[[], None]
) -> None:
    """Run what waits among the chosen records, and keep RUNS/points.json. `watch` is called again and again.

    After a signal nothing more is started, and StoppedOnRequest comes when all that ran have saved; so it
    does where a point was stopped by other hands.
    """
    running, changed = place.reattach(chosen), time.monotonic()
    write_points(sweep, records)
    with _signals() as asked:
        while True:
            if asked:
                place.stop(running)
            started = [] if asked else _start(chosen, running, place)
            ended = [record for record in chosen if _has_ended(record, running, bool(asked))]
            if started or ended or running:
                changed = time.monotonic()
            elif time.monotonic() - changed > IN_USE_SECONDS:
                _give_up(chosen)
            if started or ended or not running:
                write_points(sweep, records)
            watch()
            if not running and (asked or not _waiting(chosen)):
                break
            time.sleep(LOOK_SECONDS)
    if _waiting(chosen) or any(record.status == STOPPED for record in chosen):
        raise StoppedOnRequest


def _waiting(records: list[Record]) -> list[Record]:
    return [record for record in records if record.status == WAITING]


def _start(records: list[Record], running: dict, place) -> list[Record]:
    """As many as may run at a time, in their order; a run that another process holds has to wait."""
    ready = (record for record in _waiting(records) if not in_use(record.point.run))
    started = list(itertools.islice(ready, max(0, place.jobs - len(running))))
    for record in started:
        running[record.point.name] = place.start(record)
        record.status = RUNNING
    return started


def _has_ended(record: Record, running: dict, asked: bool) -> bool:
    training = running.get(record.point.name)
    status = training and training.status()
    if status is None:
        return False
    del running[record.point.name]
    record.job = None
    try:
        if is_done(record.point):
            _finish(record)
        elif asked or status in (0, REQUEUE) or any(STOP_SAID in line for line in training.last_lines()):
            record.status = STOPPED  # under torchrun with 0, or with 1 after a signal to its workers
        else:
            record.status, record.error = FAILED, [*training.last_lines(), f"(status {status})"]
    except UserError as error:  # the base has changed meanwhile, or files are damaged
        record.status, record.error = FAILED, [f"error: {error}"]
    return True


def in_use(run: Path) -> bool:
    """Whether a training holds the run's folder, as that of a killed sweep does until it has saved."""
    return (run / LOCK).exists() and is_held(run / LOCK)


def _give_up(records: list[Record]) -> None:
    for record in _waiting(records):
        holder = (record.point.run / LOCK).read_text().strip()
        record.status, record.error = FAILED, [f"error: {record.point.run} is in use by {holder}"]


def progress_of(point: Point) -> dict:
    """Step, loss, tokens_per_second and seconds that are left, by the last lines of its metrics; or {}."""
    with contextlib.suppress(OSError), open(point.run / "metrics.jsonl", "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 2**13))
        logs = [line for line in objects(file.read().decode(errors="replace")) if "seconds" in line]
        if logs:
            last, steps = logs[-1], logs[-1]["step"] - (logs[-2]["step"] if len(logs) > 1 else 0)
            left = (point.config.train.steps - last["step"]) * last["seconds"] / max(1, steps)
            return {key: last[key] for key in ("step", "loss", "tokens_per_second")} | {"left": left}
    return {}


def write_points(sweep: Sweep, records: list[Record]) -> None:
    """Where something has changed."""
    path, points = sweep.folder / POINTS, [record.as_dict() for record in records]
    text = to_json({"sweep": sweep.name, "points": points, "convention": CONVENTION}, indent=1) + "\n"
    if not path.exists() or path.read_text() != text:
        write_atomically(path, text)


@contextlib.contextmanager
def _signals():
    """A list that is no longer empty once the sweep was asked to stop."""
    asked = []
    before = {s: signal.signal(s, lambda number, _: asked.append(number)) for s in STOPS}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
