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
    """Training was asked to stop and has saved its state. Status 75: start it again.

    for_good: by its user, not by a signal to a process, which may be one host's that leaves.
    """

    def __init__(self, text: str = "", for_good: bool = False):
        super().__init__(text)
        self.for_good = for_good

    @property
    def status(self) -> int:
        """For good it is 0 under torchrun, which starts again what ends with another status."""
        return 0 if self.for_good and "TORCHELASTIC_RUN_ID" in os.environ else REQUEUE


def first_line(error: BaseException) -> str:
    """What an error says, in one line; one that ends in a colon takes the next with it."""
    first, *more = str(error).strip().splitlines() or [type(error).__name__]
    return f"{first} {more[0].strip()}" if more and first.rstrip().endswith(":") else first


def in_words(problem: dict) -> str:
    """What pydantic found in a file, and where."""
    place = ".".join(map(str, problem["loc"]))
    return f"{place} {problem['msg'].removeprefix('Value error, ')}".strip()
