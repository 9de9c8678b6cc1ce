"""Records the steps that `train.profile` names, and says where their time went.

A profile is no part of the result: what cannot be recorded or written is said, and training goes on. In
RUN/profile stand, of each rank that records: the trace, for ui.perfetto.dev or chrome://tracing; on GPUs
with `memory` the allocator's snapshot, for pytorch.org/memory_viz; what DeepSpeed's two tools print.
"""

import contextlib
import gzip
import io
import json
import os
import pickle
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from lomdm_dist.config import Config
from lomdm_dist.errors import UserError, first_line
from lomdm_dist.files import write_atomically
from lomdm_dist.machine import wait_for
from lomdm_dist.model.flops import step_flops_a_sequence
from lomdm_dist.ops.phase import listening, mark
from lomdm_dist.parallel.grid import Grid, rank
from lomdm_dist.parallel.watch import SAVING, Watch
from lomdm_dist.secrets import hide, say
from lomdm_dist.study.trace import STEP, as_text, where_time_went

TROUBLES = (OSError, RuntimeError, ValueError, MemoryError)  # of the disk, of torch's profiler
# DeepSpeed 0.19.8 ends the process, with status 0, on an operation that it has no formula for
LOGGED = [
    *("all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor", "broadcast"),
    *("all_gather", "all_gather_into_tensor", "all_to_all", "all_to_all_single", "barrier"),
]
COMMUNICATION_NOTE = """\
DeepSpeed's communication log. It waits for the device at each call, so these steps are slower than others
and overlap nothing. It sees DeepSpeed's own calls: not Megatron's (tensor parallelism), not this trainer's
(statistics, agreements); a call that goes on in the background has the time of its start.

"""
FLOPS_NOTE = """\
DeepSpeed's flops profiler: the forward passes of one step of this rank, all together. It knows no backward
pass; the fused loss computes its gradients in the forward pass, so they are in. model/flops.py says for
forward and backward of the same sequences {flops:.4g}.
"""


def check_ranks(config: Config, processes: int) -> None:
    """UserError where a rank is to record that is none of the processes."""
    profile = config.train.profile
    if profile.steps and max(profile.ranks) >= processes:
        raise UserError(
            f"train.profile.ranks {profile.ranks}: {processes} processes have the ranks 0 to {processes - 1}"
        )


class Profile:
    """Records its steps on its ranks. Other steps and ranks it leaves alone."""

    def __init__(self, config: Config, engine, grid: Grid, watch: Watch, share: int):
        """share: sequences of this rank in a step."""
        self.settings = config.train.profile
        self.first, self.last = self.settings.steps or (0, 0)  # steps count from 1
        self.active = self.first > 0 and rank() in self.settings.ranks
        self.folder = config.train.run / "profile"
        self.engine, self.device, self.watch = engine, grid.device, watch
        self.flops = share * step_flops_a_sequence(config)
        self.recording: contextlib.ExitStack | None = None
        self.aside = 0.0  # seconds that are no training, since they were last asked for

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around a step."""
        chosen = self.active and self.first <= number <= self.last
        begins = chosen and self.recording is None and self._start()
        if not chosen or self.recording is None:
            self.close()  # it has gone back to a checkpoint before the first
            yield
            return
        try:
            with self._flops(begins), listening(mark), torch.profiler.record_function(f"{STEP}{number}"):
                yield
                wait_for(self.device)
        except BaseException as error:
            self.active = False
            self.recording.__exit__(type(error), error, None)  # writes nothing
            raise
        if number == self.last:
            self.close()

    def seconds_aside(self) -> float:
        seconds, self.aside = self.aside, 0.0
        return seconds

    def _start(self) -> bool:
        begun, recording = time.perf_counter(), contextlib.ExitStack()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if self.settings.comms_logger:
                recording.enter_context(self._communication())
            if self.settings.memory and self.device.type == "cuda":
                recording.enter_context(self._memory())
            recording.enter_context(self._trace())
            self.recording = recording
        except TROUBLES as error:
            self.active = False
            recording.__exit__(type(error), error, None)
            self._say(f"nothing is recorded: {first_line(error)}; training goes on")
        self.aside += time.perf_counter() - begun
        return self.recording is not None

    def close(self) -> None:
        """Write what was recorded, once."""
        if self.recording is None:
            return
        begun, recording = time.perf_counter(), self.recording
        self.recording, self.active = None, False
        self.watch.at(self.last, SAVING)
        try:
            recording.close()
        except TROUBLES as error:
            self._say(f"not all is written: {first_line(error)}; training goes on")
        self.aside += time.perf_counter() - begun

    def _say(self, text: str) -> None:
        say(f"profile of rank {rank()}: {text}")

    def _path(self, name: str, ending: str) -> Path:
        return self.folder / f"{name}-steps-{self.first}-{self.last}-rank-{rank()}.{ending}"

    def _write(self, path: Path, content: bytes | str) -> None:
        try:
            write_atomically(path, content)
            self._say(f"written: {path}")
        except OSError as error:
            self._say(f"cannot write {path}: {error.strerror}; training goes on")

    @contextlib.contextmanager
    def _trace(self) -> Iterator[None]:
        # 6: nothing. It would say on the terminal that it starts and stops
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        profiler = torch.profiler.profile(activities=activities, profile_memory=self.settings.memory)
        wait_for(self.device)
        profiler.start()
        try:
            yield
        finally:
            profiler.stop()
        try:
            with tempfile.TemporaryDirectory(dir=self.folder) as folder:
                file = Path(folder) / "trace.json"
                profiler.export_chrome_trace(str(file))
                text = hide(file.read_text())
            trace = json.loads(text)  # a full disk cuts it short without a word
        except TROUBLES as error:
            self._say(f"cannot write its trace in {self.folder}: {first_line(error)}; training goes on")
            return
        self._write(self._path("trace", "json.gz"), gzip.compress(text.encode()))
        if rank() == min(self.settings.ranks):
            result = where_time_went(trace)
            if self.device.type != result["device"]:
                self._say("no kernel of the GPU is in the trace: another profiler may have its counters")
            say(as_text(result))

    @contextlib.contextmanager
    def _memory(self) -> Iterator[None]:
        torch.cuda.memory._record_memory_history()
        try:
            yield
            snapshot = torch.cuda.memory._snapshot()
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
        self._write(self._path("memory", "pickle"), pickle.dumps(snapshot))

    @contextlib.contextmanager
    def _flops(self, now: bool) -> Iterator[None]:
        """DeepSpeed's flops profiler, over a whole step: by its settings it would count one pass of many."""
        if not (now and self.settings.flops_profiler):
            yield
            return
        from deepspeed.profiling.flops_profiler import FlopsProfiler

        profiler = FlopsProfiler(self.engine.module, self.engine.engine)
        profiler.start_profile()
        try:
            yield
            profiler.stop_profile()
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                profiler.print_model_profile(profile_step=self.first)
        finally:
            profiler.end_profile()
        self._write(self._path("flops", "txt"), FLOPS_NOTE.format(flops=self.flops) + printed.getvalue())

    @contextlib.contextmanager
    def _communication(self) -> Iterator[None]:
        """DeepSpeed's communication logger, for these steps only."""
        from deepspeed.comm import comm

        usual, comm.timers = comm.timers, _timers_that_begin_anew()
        comm.configure(enabled=True, prof_all=False, prof_ops=LOGGED)
        try:
            yield
        finally:
            comm.configure(enabled=False)
            comm.timers = usual
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            comm.comms_logger.log_all()
        comm.reset_log()
        self._write(self._path("communication", "txt"), COMMUNICATION_NOTE + printed.getvalue())
        self._say("with comms_logger each call waits for the device, and Megatron's are not seen")


def _timers_that_begin_anew():
    """DeepSpeed 0.19.8 logs for each call the time of all calls of its name so far."""
    from deepspeed.utils.timer import SynchronizedWallClockTimer

    class Timers(SynchronizedWallClockTimer):
        class Timer(SynchronizedWallClockTimer.Timer):
            def elapsed(self, reset: bool = True) -> float:
                return super().elapsed(reset=True)

        def __call__(self, name: str):
            return self.timers.setdefault(name, self.Timer(name))

    return Timers()
