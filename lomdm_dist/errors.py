"""What a command can end with, besides an error of our own, and the exit statuses."""

import os

FAILED, MISTAKE, REQUEUE, INTERRUPTED = 1, 2, 75, 130


class UserError(Exception):
    """The user can mend this: what was wrong, where, and what to do, in one line. Status 2."""


class RunFailed(Exception):
    """The run cannot go on, and nobody made a mistake: said in one line, or already (empty). Status 1."""

    def __init__(self, text: str, status: int = FAILED):
        super().__init__(text)
        self.status = status


class StoppedOnRequest(Exception):
    """Training was asked to stop and has saved its state. Status 75: start it again."""

    @property
    def status(self) -> int:
        """0 under torchrun, which knows no statuses and would start again what ends with another."""
        return 0 if "TORCHELASTIC_RUN_ID" in os.environ else REQUEUE


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
