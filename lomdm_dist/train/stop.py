"""The request to stop: finish the step, save, end with status 75 (errors.StoppedOnRequest)."""

import contextlib
import os
import signal
import time
from pathlib import Path

import psutil

from lomdm_dist.parallel.grid import rank
from lomdm_dist.parallel.watch import alive
from lomdm_dist.train.inputs import STOP

LOOK_SECONDS = 1.0


class StopRequest:
    """Asked by SIGTERM, SIGINT or SIGUSR1, by the end of the launcher, or by a file RUN/stop.

    Launchers differ in what they pass on. The one of deepspeed dies of a signal and leaves its
    workers running, unseen and unstopped; so does torchrun of SIGUSR1, and any of SIGKILL.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    LAUNCHERS = ("deepspeed", "torchrun", "torch.distributed")

    def __init__(self, run: Path):
        self.file = run / STOP if rank() == 0 else None

    def __enter__(self):
        self._signalled, self._found, self._looked = False, False, 0.0
        self._before = {s: signal.signal(s, self._note) for s in self.SIGNALS}
        parents = psutil.Process().parents() if "LOCAL_RANK" in os.environ else []
        self._launchers = [p for p in parents if _is_launcher(p, self.LAUNCHERS)]
        return self

    def _note(self, *_):
        self._signalled = True

    @property
    def asked(self) -> bool:
        return self.for_good or self._signalled or not all(map(alive, self._launchers))

    @property
    def for_good(self) -> bool:
        """By the file, which the first rank sees."""
        if self.file and not self._found and time.monotonic() - self._looked >= LOOK_SECONDS:
            self._looked, self._found = time.monotonic(), self.file.exists()
        return self._found

    def __exit__(self, *_):
        if self.file is not None:
            with contextlib.suppress(OSError):
                self.file.unlink(missing_ok=True)
        for number, handler in self._before.items():  # a second signal must not change how the process ends
            signal.signal(number, signal.SIG_IGN if self._signalled else handler)


def _is_launcher(process: psutil.Process, names: tuple[str, ...]) -> bool:
    """A Python process with one of these names in its command; not the shell script that called it."""
    with contextlib.suppress(psutil.Error):
        command = " ".join(process.cmdline())
        return Path(process.exe()).name.startswith("python") and any(name in command for name in names)
    return False
