"""Processes that this one starts, and that do not outlive it."""

import ctypes
import os
import signal
from collections.abc import Callable

from lomdm_dist.errors import REQUEUE

PR_SET_PDEATHSIG = 1  # of prctl(2)


def end_with_parent() -> Callable[[], None]:
    """To run in a child before it becomes its command: it gets SIGTERM when this process ends, however."""
    libc, parent = ctypes.CDLL(None), os.getpid()

    def prepare() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it has ended already
            os._exit(REQUEUE)

    return prepare
