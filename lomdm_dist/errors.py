"""The one exception that means: the user can mend this."""


class UserError(Exception):
    """What was wrong, where, and what to do, in one line. The command line prints it and exits 2."""


class StoppedOnRequest(Exception):
    """Training was asked to stop and has saved its state. The command line exits 75 (requeue)."""
