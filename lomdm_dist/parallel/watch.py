"""Signs of life: a rank that is lost, stands still or has failed is named, on every rank, and the run ends.

A collective waits for a process that is gone up to its timeout, and then names an address, or nothing. So
each rank has two threads. One puts a sign of life into the job's store every second and reads the others':
the first rank those of all, all of them the first's. The other thread looks at the clock and at the
processes of its own machine; it talks to nobody, so nothing that hangs holds it up. Who finds something
tells the others through the store, and each process ends, if it must without waiting for its collective.
No clock of another machine is trusted: a sign is fresh when it has changed.
"""

import contextlib
import faulthandler
import json
import os
import platform
import signal
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
import torch.distributed as dist

from lomdm_dist.config import FaultsConfig
from lomdm_dist.errors import FAILED, MISTAKE, RunFailed, StoppedOnRequest, UserError, first_line
from lomdm_dist.files import write_atomically
from lomdm_dist.machine import machine_in_sight
from lomdm_dist.parallel.grid import rank, world_size
from lomdm_dist.secrets import hide, say

BEAT = 1.0  # seconds between signs
TO_END = 5.0  # seconds that a process has for ending by itself
KNOWN_STEPS = 50  # over which the median is taken
NEEDED_STEPS = 5  # before it is one
END = "end"
WORST = 5  # ranks in a table
DATA, PASSES, UPDATE, VALIDATION, SAVING = PHASES = (
    "data",
    "the forward and backward passes",
    "the update",
    "validation",
    "saving",  # takes as long as the disk does
)
FOREVER = float("inf")
QUIET = 60.0  # seconds between words about slow steps


class Verdict(NamedTuple):
    """Why all end, and with which exit status; stacks: each rank writes down where it stands."""

    text: str
    status: int = 1
    stacks: bool = False


class Sign(NamedTuple):
    """What a rank says of itself; seconds are of its own clock.

    count grows; phase, and the seconds in it, of `step`; last: what the last step took for data and for its
    own computation; mean: these over the steps since the last log; probe: of a fixed computation.
    """

    count: int
    step: int
    phase: str
    seconds: float
    last: tuple[float, float] = (0.0, 0.0)
    mean: tuple[float, float] = (0.0, 0.0)
    probe: float = 0.0

    @property
    def place(self) -> tuple[int, int]:
        """How far it has come; who is behind, others wait for."""
        return self.step, PHASES.index(self.phase)


class Watch:
    """Watches over one run, from when its processes have met; a context. `at` says where this rank stands."""

    def __init__(self, store: dist.Store, faults: FaultsConfig, run: Path):
        self.faults, self.run, self.rank = faults, run, rank()
        self._store = dist.PrefixStore("watch", store.clone())  # a connection of its own
        self.last = self.mean = (0.0, 0.0)
        self.probe = 0.0
        self.at(0, SAVING)  # nothing is known yet of how long things take
        place = (f"{platform.node()} {machine_in_sight()}", os.getpid(), platform.node())
        self.places = self._meet(place)
        try:
            self.neighbours = {
                r: psutil.Process(pid)
                for r, (machine, pid, _) in enumerate(self.places)
                if machine == place[0]
            }
        except psutil.Error as error:
            raise RunFailed(f"a process of this job was lost while it started: {error}") from None
        self.durations: deque[float] = deque(maxlen=KNOWN_STEPS)
        self.signs: dict[int, Sign] = {}
        self.verdict: Verdict | None = None
        self._seen = dict.fromkeys(range(len(self.places)), time.monotonic())
        self._contact, self._closing, self._found = time.monotonic(), threading.Event(), threading.Event()
        self._one, self._finishing = threading.Lock(), False
        self._silent: list[int] = []  # when the verdict came
        self.stacks, self._asked = run / "stacks" / f"rank-{self.rank}.txt", None
        self._slow: tuple[int, float] | None = None
        self._said_slow = -FOREVER
        self._table_due = FOREVER

    def _meet(self, place: tuple) -> list[tuple]:
        """Where all are, when all have come, with a first sign of each. RunFailed where one does not."""
        keys = [f"place/{number}" for number in range(world_size())]
        try:
            self._store.set(f"sign/{self.rank}", json.dumps(self._sign(0)))
            self._store.set(keys[self.rank], json.dumps(place))
            self._store.wait(keys, timedelta(seconds=self.faults.lost_seconds))
            return [tuple(json.loads(text)) for text in self._store.multi_get(keys)]
        except dist.DistError as error:
            raise RunFailed(f"a process of this job was lost while it started: {first_line(error)}") from None

    def __enter__(self):
        if len(self.places) > 1:
            for work in (self._talk, self._look):
                threading.Thread(target=work, daemon=True, name="watch").start()
        with contextlib.suppress(OSError):  # `kill -USR2` writes down where a process stands
            self.stacks.parent.mkdir(parents=True, exist_ok=True)
            self._asked = open(self.stacks, "a")
            faulthandler.register(signal.SIGUSR2, self._asked)
        return self

    def at(self, step: int, phase: str) -> None:
        """This rank begins something; `step` counts from 1."""
        self._where = (step, phase, time.monotonic())

    def step_took(self, step: int, seconds: float, data: float, work: float) -> None:
        """A step is done. Of one that took long, the first rank says what each rank did."""
        self.last = (data, work)
        usual = self.median()
        self.durations.append(seconds)
        if self.rank == 0 and usual and seconds > max(self.faults.slow_factor * usual, BEAT):
            now = time.monotonic()
            if now - self._said_slow > QUIET:
                say(f"step {step} took {seconds:.3g} s, {seconds / usual:.3g} times the median")
                self._slow, self._said_slow = (step, now), now

    def median(self) -> float | None:
        """Seconds a step, of the last ones; None while they are too few."""
        enough = len(self.durations) >= NEEDED_STEPS
        return statistics.median(self.durations) if enough else None

    def finish(self) -> None:
        """All ranks are done, or end for the same reason: wait until all say so; none is missed any more."""
        self._finishing = True
        threading.Thread(target=self._meet_at_the_end, daemon=True).start()
        self._closing.wait()

    def _meet_at_the_end(self) -> None:
        keys = [f"done/{number}" for number in range(len(self.places))]
        with contextlib.suppress(RuntimeError):  # of the store, when its rank has left
            self._store.set(keys[self.rank], "")
            while not self._closing.is_set() and not self._store.check(keys):
                time.sleep(BEAT / 4)
        self._closing.set()

    def __exit__(self, kind, error, _):
        """Tell the others of an error of this rank; explain one that a lost peer left in a collective."""
        if self._asked is not None:
            faulthandler.unregister(signal.SIGUSR2)
            self._asked.close()
            with contextlib.suppress(OSError):  # the folder stays where another rank has something in it
                if not self.stacks.stat().st_size:
                    self.stacks.unlink()
                self.stacks.parent.rmdir()
        if error is None or self._closing.is_set() or len(self.places) == 1:
            self._closing.set()
            return
        if self.verdict or _is_of_a_peer(error):
            self._found.wait(self.faults.lost_seconds + TO_END)
        if self.verdict:  # is said already; should the process groups not end, the other thread does
            self._kill_silent()
            raise RunFailed("", self.verdict.status) from None
        self._closing.set()
        self._tell(Verdict(f"{self.name(self.rank)} ended: {first_line(error)}", _status(error)))
        time.sleep(2.5 * BEAT)  # the store may be of this process: the others read it

    def name(self, number: int) -> str:
        _, pid, host = self.places[number]
        return f"rank {number} (process {pid} on {host})"

    # --- the thread that talks

    def _talk(self) -> None:
        count = 0
        while self._goes_on(BEAT):
            count += 1
            try:
                self._store.set(f"sign/{self.rank}", json.dumps(self._sign(count)))
                if self._store.check([END]):
                    self._declare(Verdict(*json.loads(self._store.get(END))))
                    return
                ranks = range(len(self.places)) if self.rank == 0 else [0]
                texts = self._store.multi_get([f"sign/{r}" for r in ranks])
            except (RuntimeError, ValueError):  # of the store; `_look` counts the seconds
                continue
            self._contact = time.monotonic()
            for number, text in zip(ranks, texts, strict=True):
                self._read(number, Sign(*json.loads(text)))
            if self.rank == 0:
                self._judge()

    def _sign(self, count: int) -> Sign:
        step, phase, since = self._where
        return Sign(count, step, phase, time.monotonic() - since, self.last, self.mean, self.probe)

    def _read(self, number: int, sign: Sign) -> None:
        if number not in self.signs or sign.count != self.signs[number].count:
            self._seen[number] = self._contact
        self.signs[number] = sign

    def _judge(self) -> None:
        """The first rank, of all signs: does one stand still? Was the last step slow?"""
        usual = self.median()
        limit = max(self.faults.hang_seconds, self.faults.hang_factor * usual) if usual else FOREVER
        least = min(sign.place for sign in self.signs.values())
        behind = {r: sign for r, sign in self.signs.items() if sign.place == least}
        saving = any(sign.phase == SAVING for sign in self.signs.values())
        if not saving and (seconds := min(sign.seconds for sign in behind.values())) > limit:
            who = ", ".join(self.name(r) for r in behind) if len(behind) < 4 else _ranks(list(behind))
            _, step, phase, *_ = next(iter(behind.values()))
            others = "; ".join(self._phases(behind)) or "as all others"
            self._declare(
                Verdict(
                    f"{who}: no progress in {phase} of step {step} for {seconds:.0f} s, where a step takes "
                    f"{usual:.3g} s ({others}); where each rank stands is written in {self.run / 'stacks'}",
                    stacks=True,
                )
            )
        if time.monotonic() > self._table_due:
            say("\n".join(self.table("mean")))
            self._table_due = FOREVER
        if self._slow and (self._all_past(self._slow[0]) or time.monotonic() - self._slow[1] > 5 * BEAT):
            say("\n".join(self.table("last")))
            self._slow = None

    def show_table(self) -> None:
        """The first rank prints, a moment later when all have said it, what the ranks took on the average."""
        self._table_due = time.monotonic() + 3 * BEAT

    def _phases(self, but) -> list[str]:
        ranks_at: dict[tuple, list[int]] = {}
        for number, sign in sorted(self.signs.items()):
            if number not in but:
                ranks_at.setdefault((sign.step, sign.phase), []).append(number)
        return [f"{_ranks(ranks)} in {phase} of step {step}" for (step, phase), ranks in ranks_at.items()]

    def _all_past(self, step: int) -> bool:
        return all(sign.step > step for sign in self.signs.values())

    def table(self, which: str) -> list[str]:
        """The ranks that took longest, for data and for their own computation: `last` step or `mean`."""
        rows = {r: (sum(getattr(sign, which)), *getattr(sign, which)) for r, sign in self.signs.items()}
        if not rows:
            return []
        worst = sorted(rows, key=lambda r: -rows[r][0])[:WORST]
        middle = [statistics.median(column) for column in zip(*rows.values(), strict=True)]
        probe = statistics.median(sign.probe for sign in self.signs.values())

        def milliseconds(seconds: float) -> str:
            return f"{1e3 * seconds:>19.2f} ms" if seconds else f"{'-':>22}"  # not yet measured

        head = "seconds a step    data   computing   a fixed computation"
        lines = [head, f"{'median':<16}{middle[1]:>6.3f}{middle[2]:>12.3f}{milliseconds(probe)}"]
        for number in worst:
            _, data, work = rows[number]
            slow = "  <- slow" if rows[number][0] > 1.5 * middle[0] and rows[number][0] > 1e-3 else ""
            name = f"rank {number} {self.places[number][2]}"
            lines.append(
                f"{name[:16]:<16}{data:>6.3f}{work:>12.3f}{milliseconds(self.signs[number].probe)}{slow}"
            )
        return lines

    # --- the thread that looks at the clock

    def _look(self) -> None:
        while self._goes_on(BEAT / 4):
            now, limit = time.monotonic(), self.faults.lost_seconds
            for number, process in self.neighbours.items():
                if not alive(process):
                    self._declare(Verdict(f"{self.name(number)} has died"))
            for number in (quiet := self._quiet(limit)):  # it lives, perhaps, and does not come to say so
                self._signal(number, signal.SIGUSR2)
            if now - self._contact > limit:
                here = platform.node()
                between = f"between it and {here} is" if self.places[0][2] != here else f"of {here} is down"
                lost = f"no contact with {self.name(0)} for {limit:g} s: it is lost, or the network {between}"
                self._declare(Verdict(lost), quiet)
            elif quiet:
                silent = self._quiet(limit - 2 * BEAT) or quiet  # signs may come again in this moment
                names = ", ".join(map(self.name, silent))
                self._declare(Verdict(f"no sign of life for {limit:g} s from {names}"), silent)
        if self.verdict:  # the main thread may wait in a collective that nothing ends
            self._found.wait()
            time.sleep(TO_END)
            self._kill_silent()
            os._exit(self.verdict.status)

    def _goes_on(self, seconds: float) -> bool:
        """Wait; whether there is more to watch. If that took long, this process was suspended or starved, and
        so perhaps were all: then silence and standing still are counted anew.
        """
        before = time.monotonic()
        closing = self._closing.wait(seconds)
        now = time.monotonic()
        if now - before > 5 * BEAT:
            self._seen, self._contact = dict.fromkeys(self._seen, now), now
            self._where = (*self._where[:2], now)
        return not closing and self.verdict is None

    def _quiet(self, limit: float) -> list[int]:
        """Ranks without a sign of life for so long; the first, where the store cannot be read."""
        if time.monotonic() - self._contact > limit:
            return [0] if self.rank != 0 else []
        watched = self._seen if self.rank == 0 else {0: self._seen[0]}
        return [number for number, seen in watched.items() if self._contact - seen > limit]

    def _kill_silent(self) -> None:
        """On this machine: a rank that is lost must not hold its GPU and the port when all start again."""
        for number in self._silent:
            self._signal(number, signal.SIGKILL)

    def _signal(self, number: int, what: signal.Signals) -> None:
        """To a rank of this machine."""
        with contextlib.suppress(psutil.Error, KeyError):
            self.neighbours[number].send_signal(what)

    def _declare(self, verdict: Verdict, silent: list[int] | None = None) -> None:
        """The first verdict counts; the others are told, if they can be reached. silent: who cannot."""
        with self._one:
            if self._finishing:
                self._closing.set()
            if self._finishing or self.verdict is not None:
                return
            self.verdict = verdict
        self._tell(verdict)
        self._silent = silent or self._quiet(self.faults.lost_seconds)
        able = {r for r, process in self.neighbours.items() if alive(process)}.difference(self._silent)
        if self.rank == min(able):
            _try_for(BEAT, self._say, verdict)
        if verdict.stacks:
            _try_for(TO_END, self._write_stacks)
        self._found.set()

    def _was_said(self, verdict: Verdict) -> bool:
        """By a rank of this machine that has ended before this one looked."""
        lower = [self.name(number) for number in self.neighbours if number < self.rank]
        with contextlib.suppress(OSError):
            lines = (self.run / "ended.log").read_text(errors="replace").splitlines()
            return any(f"{name}: {hide(verdict.text)};" in line for name in lower for line in lines)
        return False

    def _say(self, verdict: Verdict) -> None:
        """On the terminal, and in RUN/ended.log: the first may not be reached, by the same fault."""
        if self._was_said(verdict):
            return
        ending = hide(f"{verdict.text}; all end, in step {self._where[0]}")
        ending += "" if verdict.status == MISTAKE else "; continue with --resume auto"
        say(f"error: {ending}", sys.stderr)
        with contextlib.suppress(OSError), open(self.run / "ended.log", "a") as file:
            file.write(f"{time.strftime('%F %T')} {self.name(self.rank)}: {ending}\n")

    def _tell(self, verdict: Verdict) -> None:
        """In a thread of its own: what cannot be reached may not even answer."""

        def tell():
            with contextlib.suppress(RuntimeError):
                self._store.compare_set(END, "", json.dumps(verdict))

        threading.Thread(target=tell, daemon=True).start()

    def _write_stacks(self) -> None:
        with contextlib.suppress(Exception):  # whatever fails here, the end must come
            with open(self.stacks, "a") as file:
                file.write(f"{self.name(self.rank)}, in {self._where[1]} of step {self._where[0]}\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
            # the last collectives, for torch's flight-recorder tools
            recorders = torch._C._distributed_c10d
            dump = recorders._dump_nccl_trace if torch.cuda.is_available() else recorders._dump_fr_trace
            write_atomically(self.stacks.with_suffix(".flight"), dump())


def _try_for(seconds: float, work: Callable, *arguments) -> None:
    """Whatever is printed to, and the run's folder, may be stuck by the very fault."""
    trying = threading.Thread(target=work, args=arguments, daemon=True)
    trying.start()
    trying.join(seconds)


def alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _is_of_a_peer(error: BaseException) -> bool:
    """What a collective says when a peer is gone."""
    signs = ("gloo", "NCCL", "Connection closed", "Connection reset", "Broken pipe")
    return isinstance(error, dist.DistError) or any(sign in str(error) for sign in signs)


def _status(error: BaseException) -> int:
    if isinstance(error, StoppedOnRequest):
        return error.status
    return MISTAKE if isinstance(error, UserError) else FAILED


def _ranks(numbers: list[int]) -> str:
    """`ranks 0-3, 5`."""
    parts, first = [], numbers[0]
    for here, following in zip(numbers, [*numbers[1:], None], strict=True):
        if following != here + 1:
            parts.append(f"{first}-{here}" if here > first else str(here))
            first = following
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(parts)}"
