"""Run a training command, and start it again when it fails."""

import contextlib
import ctypes
import signal
import subprocess
import sys
import time
from collections import deque
from functools import partial
from itertools import pairwise
from pathlib import Path

import psutil

from lomdm_dist.errors import MISTAKE, REQUEUE, UserError

DONE = 0
STOPS = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP}
FIRST_PAUSE, LONGEST = 5.0, 60  # seconds before a restart; it doubles, up to so many times the first
MINUTE, DAY = 60, 24 * 3600
QUICK_FAILURES = 3  # in a row, each within a minute of its start: a mistake, not a fault
PATIENCE = 300  # seconds that processes left behind have: to notice, to save, to end
PR_SET_CHILD_SUBREAPER = 36  # of prctl(2)


def supervise(command: list[str], restarts: int, first_pause: float = FIRST_PAUSE) -> int:
    """Run the command until it has ended for good; returns its exit status, 75 where it was stopped.

    After any status but 0, 2 and 75 it is started again, `restarts` times in any 24 hours. For a
    process that does nothing else: it takes the signals. Raises UserError where the command cannot
    be started, or would not resume.
    """
    _check_resumes(command)
    # workers outlive a launcher that dies; as our children they can be waited for
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    stops = {s for s in STOPS if signal.getsignal(s) is not signal.SIG_IGN}  # nohup ignores SIGHUP
    # held back for good, and waited for: none comes in between, and a late one changes no exit status
    inherited = signal.pthread_sigmask(signal.SIG_BLOCK, stops | {signal.SIGCHLD})
    recent, quick = deque(), 0  # when it was started again
    while True:
        begun = time.monotonic()
        status, stopped = _run(command, stops, inherited)
        now = time.monotonic()
        if status not in (DONE, MISTAKE):
            stopped = _wait_for_the_rest(stops) or stopped
        quick = quick + 1 if now - begun < MINUTE else 0
        while recent and now - recent[0] > DAY:
            recent.popleft()
        end = f"{_in_words(status)} after {now - begun:.0f} s"
        if stopped or status in (DONE, MISTAKE, REQUEUE):
            if stopped and status not in (DONE, MISTAKE):
                end, status = f"{end}; status {REQUEUE}", REQUEUE
            _say(f"{end}{', stopped on request' if stopped or status == REQUEUE else ''}")
            return status
        if len(recent) >= restarts or quick == QUICK_FAILURES:
            why = f"{restarts} restarts in 24 hours are used up" if restarts else "no restarts are asked for"
            if quick == QUICK_FAILURES:
                why = f"{quick} failures in a row, each within a minute of its start, are no chance"
            _say(f"{end}; given up: {why}")
            return status
        recent.append(now)
        pause = first_pause * min(2 ** (len(recent) - 1), LONGEST)
        _say(f"{end}; restart {len(recent)} of {restarts} in 24 hours, in {pause:g} s")
        if signal.sigtimedwait(stops, pause):
            _say("stopped on request before the restart")
            return REQUEUE


def _run(command: list[str], stops: set, inherited: set) -> tuple[int, bool]:
    """Exit status of one run, and whether it was asked to stop. Raises UserError."""
    # srun kills its tasks at once when it is terminated, and passes SIGUSR1 on
    stop = signal.SIGUSR1 if Path(command[0]).name == "srun" else signal.SIGTERM
    unblock = partial(signal.pthread_sigmask, signal.SIG_SETMASK, inherited)
    try:
        # a group of its own: Ctrl-C would end launchers that a SIGTERM lets finish
        process = subprocess.Popen(command, process_group=0, preexec_fn=unblock)
    except OSError as error:
        raise UserError(f"cannot start {command[0]}: {error.strerror}") from None
    stopped = False
    while process.poll() is None:
        if signal.sigwait(stops | {signal.SIGCHLD}) in stops:
            stopped = True
            process.send_signal(stop)
    status = process.returncode
    return (status if status >= 0 else 128 - status), stopped


def _wait_for_the_rest(stops: set) -> bool:
    """For what the command has left running: a restart would meet it, the end of a job kill it.

    Whether a stop was asked for meanwhile, which is passed on.
    """
    stopped, deadline = False, time.monotonic() + PATIENCE
    left = psutil.Process().children(recursive=True)
    while left and time.monotonic() < deadline:
        _, left = psutil.wait_procs(left, timeout=1)
        if left and signal.sigtimedwait(stops, 0):
            stopped = True
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.terminate()
    for process in left:
        _say(f"kills process {process.pid}, left behind for {PATIENCE} s")
        process.kill()
    psutil.wait_procs(left)
    return stopped


def _check_resumes(command: list[str]) -> None:
    """Raises UserError where a second start would refuse the first one's checkpoints."""
    words = " ".join(command).split()
    names = [Path(word).name for word in words]
    trains = "train.py" in names or ("lomdm", "train") in pairwise(names)
    if trains and not any(word.partition("=")[0] == "--resume" for word in words):
        raise UserError("started again, training refuses to begin anew: add --resume auto to the command")


def _in_words(status: int) -> str:
    for number in (status - 128, 256 - status):  # a shell's way, and that of DeepSpeed, whose -9 is 247
        with contextlib.suppress(ValueError):
            return f"ended with status {status} ({signal.Signals(number).name})"
    return f"ended with status {status}"


def _say(line: str) -> None:
    print(f"lomdm launch, {time.strftime('%Y-%m-%d %H:%M:%S')}: {line}", file=sys.stderr, flush=True)
