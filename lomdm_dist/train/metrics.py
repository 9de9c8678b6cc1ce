"""What a run reports: a line on the terminal, an object in metrics.jsonl, wandb when asked for."""

import contextlib
import json
import math
import netrc
import os
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from lomdm_dist.config import Config
from lomdm_dist.errors import first_line
from lomdm_dist.files import write_atomically
from lomdm_dist.machine import to_json
from lomdm_dist.secrets import hide, say

METRICS = "metrics.jsonl"
WANDB_SECONDS = 20  # to reach the server; then the run is logged offline


def step_metrics(sums: dict[str, float]) -> dict[str, float]:
    """Nats a predicted token, and the spread of what drives the REINFORCE term."""
    tokens, sequences = sums.get("tokens", math.nan), sums.get("sequences", math.nan)  # no good step: null
    sums = Counter(sums)
    return {
        "loss": sums["bound"] / tokens,
        "main": sums["main"] / tokens,
        "velocity": sums["velocity"] / tokens,
        "rloo": sums["rloo"] / tokens,
        "advantage_std": (sums["advantage"] / sequences) ** 0.5,
        "log_q_ratio_std": (sums["log_q_ratio"] / sequences) ** 0.5,
        "exponent_std": (sums["exponent"] / sequences) ** 0.5,
    }


class Stopwatch:
    """Times what a device computes, without waiting for it; runs from its making."""

    def __init__(self, device: torch.device):
        self.on_gpu = device.type == "cuda"
        self._start = self._now()

    def _now(self):
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def stop(self) -> Callable[[], float]:
        """What gives the seconds, once the device is known to have come so far."""
        start, end = self._start, self._now()
        return lambda: start.elapsed_time(end) / 1e3 if self.on_gpu else end - start


def probe_speed(device: torch.device) -> float:
    """Seconds of a computation that is the same everywhere: a device that is slow by itself shows."""
    matrix = torch.full((512, 512), 1 / 512, device=device)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        (matrix @ matrix).sum().item()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


class Reporter:
    """Writes on the first rank only; on the others every call does nothing."""

    def __init__(self, config: Config, resumed_at: int, active: bool):
        self.active, self.steps = active, config.train.steps
        self._learned = config.objective.samples == 2
        self._wandb = None
        if not active:
            return
        self.path = config.train.run / METRICS
        _keep_until(self.path, resumed_at)
        self._file = self._open()
        self._unwritten, self._in_trouble = b"", False
        if config.wandb.mode != "disabled":
            self._wandb = _start_wandb(config, resumed_at > 0)

    def _open(self):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return open(self.path, "ab", buffering=0)  # so that a killed run loses no line

    def report(self, metrics: dict) -> None:
        """On a full disk, or without the folder, training goes on: what cannot be written now is later."""
        if not self.active:
            return
        self._unwritten += to_json(metrics).encode() + b"\n"
        try:
            self._write()
            self._in_trouble = False
        except OSError as error:
            if not self._in_trouble:
                self.say(
                    f"cannot write {self.path}: {error.strerror}; training goes on, lines wait in memory"
                )
            self._in_trouble = True
        self._to_wandb(lambda run: run.log(metrics))

    def _to_wandb(self, work: Callable) -> None:
        """A logging service must never end a training run: after its first error it is left alone."""
        try:
            if self._wandb:
                work(self._wandb)
        except Exception as error:
            self.say(f"wandb: {first_line(error)}; no more is sent to it, {self.path} has everything")
            self._wandb = None

    def _write(self) -> None:
        if not os.fstat(self._file.fileno()).st_nlink:
            self._file = self._open()
            self.say(f"{self.path} was deleted: it begins anew")
        while self._unwritten:
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def go_back(self, step: int) -> None:
        """Forget what was reported after a step; a full disk has room for less."""
        if self.active:
            self._unwritten = b"".join(_until(step, self._unwritten.splitlines(keepends=True)))
            with contextlib.suppress(OSError):
                kept = _until(step, self.path.read_bytes().splitlines(keepends=True))
                os.truncate(self.path, sum(map(len, kept)))

    def say(self, text: str) -> None:
        if self.active:
            say(text)

    def progress(self, metrics: dict, seconds_a_step: float) -> None:
        """The line that a watching user reads; of a learned order, its price and its spread too."""
        left = (self.steps - metrics["step"]) * seconds_a_step
        spread = metrics["exponent_std"]  # a polynomial schedule has no exponents
        order = ""
        if self._learned:
            order = f"  velocity {metrics['velocity']:.1e}"
            order += f"  exponent_std {spread:.1e}" if math.isfinite(spread) else ""
        mfu = f"  mfu {metrics['mfu']:.1%}" if metrics["mfu"] is not None else ""
        self.say(
            f"step {metrics['step']}/{self.steps}  loss {metrics['loss']:.4f}{order}  "
            f"{metrics['tokens_per_second']:,.0f} tokens/s{mfu}  "
            f"ETA {_duration(left)}"
        )

    def close(self) -> None:
        if self.active:
            try:
                self._write()
            except OSError as error:
                self.say(f"cannot write {self.path}: {error.strerror}; its last lines are lost")
            self._file.close()
            self._to_wandb(lambda run: run.finish())


def _keep_until(path: Path, step: int) -> None:
    """Drop what a killed run logged after the checkpoint that is resumed from."""
    if path.exists():
        lines = path.read_text(errors="replace").splitlines()
        write_atomically(path, "".join(line + "\n" for line in _until(step, lines)))


def _until(step: int, lines: list) -> list:
    """The lines up to a step; without one that is cut, as the last one of a killed process may be."""
    kept = []
    for line in lines:
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            if json.loads(line)["step"] <= step:
                kept.append(line)
    return kept


def _start_wandb(config: Config, resumed: bool):
    """A wandb run, offline where there is no key; without the package the run goes on.

    A resumed run goes on in the same one. Its x-axis is our step, which may go back.
    """
    try:
        import wandb
    except ImportError:
        print("wandb is not installed (pip install wandb); metrics.jsonl has everything", flush=True)
        return None
    sys.argv[:] = map(hide, sys.argv)  # wandb notes the command
    modes = ["online", "offline"] if config.wandb.mode == "online" and _has_wandb_key() else ["offline"]
    for mode in modes:
        try:
            run = wandb.init(
                id=_wandb_id(config.train.run, resumed),
                resume="allow",
                project=config.wandb.project,
                name=config.wandb.name,
                dir=config.train.run,
                mode=mode,
                config=config.as_dict(),
                settings=wandb.Settings(init_timeout=WANDB_SECONDS),
            )
            run.define_metric("*", step_metric="step")
            return run
        except Exception as error:  # a logging service must never end a training run
            print(hide(f"wandb does not start {mode}: {error}"), flush=True)
    return None


def _wandb_id(run: Path, resumed: bool) -> str:
    """That of the run, which begins with it and keeps it."""
    path = run / "wandb_id"
    if not (resumed and path.exists()):
        write_atomically(path, f"{uuid.uuid4().hex[:12]}\n")
    return path.read_text().strip()


def _has_wandb_key() -> bool:
    """Whether wandb would log in without asking: it must never wait for an answer."""
    try:
        known = netrc.netrc().authenticators("api.wandb.ai") is not None
    except (OSError, netrc.NetrcParseError):
        known = False
    if not known and not os.environ.get("WANDB_API_KEY"):
        print("no wandb key: logging offline", flush=True)
        return False
    return True


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s"
