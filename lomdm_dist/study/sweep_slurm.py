"""Points of a sweep as SLURM jobs, by submitit: a job a point, a task a rank.

Before its time is up, or when it is preempted, a job is sent SIGUSR2: it saves, and is queued again. So it is
when the training ends with status 75 for another reason. The sweep only follows: when it is stopped the jobs
go on, and the next call follows them again.
"""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import submitit

from lomdm_dist.errors import FAILED, REQUEUE, StoppedOnRequest, UserError, first_line
from lomdm_dist.study.sweep import Sweep
from lomdm_dist.study.sweep_run import RUNNING, WAITING, Record, last_lines, train_command

GENERAL = ("timeout_min", "mem_gb", "nodes", "cpus_per_task", "gpus_per_node", "tasks_per_node")
TIMES = 10_000  # that a job may be queued again


class Slurm:
    """Jobs of the same demands, `jobs` of them at a time, or all."""

    def __init__(self, sweep: Sweep, jobs: int | None, processes: int, demands: list[str]):
        """`demands`: KEY=VALUE of sbatch or submitit, partition=h100 nodes=2 say. UserError."""
        self.sweep, self.jobs = sweep, jobs or len(sweep.points)
        try:
            how = {"cluster": "slurm", "slurm_max_num_timeout": TIMES}
            self.executor = submitit.AutoExecutor(sweep.folder / "slurm", **how)
            self.executor.update_parameters(**{"tasks_per_node": processes} | _parameters(demands))
        except (RuntimeError, NameError, ValueError, AssertionError) as error:
            raise UserError(f"--slurm: {first_line(error)}") from None

    def reattach(self, records: list[Record]) -> dict[str, "Job"]:
        """The jobs that an earlier call submitted, over or not."""
        known = [record for record in records if record.status == WAITING and record.job]
        for record in known:
            record.status = RUNNING
        folder = self.executor.folder
        return {
            record.point.name: Job(submitit.SlurmJob(folder, record.job), record.point.log)
            for record in known
        }

    def start(self, record: Record) -> "Job":
        point = record.point
        point.log.parent.mkdir(parents=True, exist_ok=True)
        self.executor.update_parameters(name=f"{self.sweep.name}-{point.name}")
        task = Task(train_command(self.sweep, point, processes=1), point.log)
        begin = point.log.stat().st_size if point.log.exists() else 0
        job = self.executor.submit(task)
        record.job = job.job_id
        return Job(job, point.log, begin)

    def stop(self, running: dict) -> None:
        raise StoppedOnRequest  # the jobs go on


class Job:
    def __init__(self, job: submitit.Job, log: Path, begin: int = 0):
        self.job, self.log, self.begin = job, log, begin

    def status(self) -> int | None:
        """Exit status of the first rank, None while the job waits or runs."""
        if not self.job.done():
            return None
        try:
            return self.job.results()[0]
        except Exception:  # submitit's, of a job that was cancelled or has lost a node
            return FAILED

    def last_lines(self) -> list[str]:
        return last_lines(self.log, self.begin)


class Task:
    """What a task of a job does: one rank of a training, in a process of its own."""

    def __init__(self, command: list[str], log: Path):
        self.command, self.log, self.process = command, log, None

    def __call__(self) -> int:
        place = submitit.JobEnvironment()
        with open(self.log, "ab") if place.global_rank == 0 else contextlib.nullcontext() as log:
            self.process = subprocess.Popen(
                self.command,
                stdout=log,
                stderr=log,
                env=os.environ | _ranks(place),
                preexec_fn=_ignore_sigusr2,
            )
        while (status := self.process.poll()) is None:  # no wait(): a signal's handler waits, too
            time.sleep(0.5)
        if status == REQUEUE and place.global_rank == 0:
            signal.raise_signal(
                getattr(signal, "SIG" + place.USR_SIG)
            )  # as if SLURM had asked: see checkpoint
        return status

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """Called by submitit on SIGUSR2, in the first rank only: where one rank is asked all save and end."""
        with contextlib.suppress(psutil.Error):
            training = psutil.Process(self.process.pid)
            training.terminate()
            training.wait()
        return submitit.helpers.DelayedSubmission(Task(self.command, self.log))


def _ignore_sigusr2() -> None:
    """SLURM sends it to all processes of a job: it would end the training before it has saved."""
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def _ranks(place: submitit.JobEnvironment) -> dict[str, str]:
    """What a launcher would set."""
    if place.num_tasks == 1:
        return {}
    return {
        "RANK": str(place.global_rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.num_tasks),
        "LOCAL_WORLD_SIZE": str(place.num_tasks // place.num_nodes),
        "MASTER_ADDR": place.hostnames[0],
        "MASTER_PORT": str(10_000 + int(place.job_id) % 20_000),  # below those that systems give out
    }


def _parameters(demands: list[str]) -> dict:
    """As submitit's AutoExecutor wants them. Raises ValueError."""
    parameters = {}
    for demand in demands:
        key, equals, text = demand.partition("=")
        if not (key and equals and text):
            raise ValueError(f"{demand!r} is not of the form KEY=VALUE, as partition=h100")
        value = int(text) if text.isdecimal() else text
        parameters[key if key in GENERAL else f"slurm_{key}"] = value
    if "timeout_min" not in parameters:
        raise ValueError("say after how many minutes a job is stopped and queued again, as timeout_min=1440")
    return parameters
