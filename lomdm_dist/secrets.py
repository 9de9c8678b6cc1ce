"""Keeps secrets out of what leaves a process: saved configs, results, metrics, wandb, and the terminal.

Hidden are the value of each environment variable whose name speaks of a key, a token, a secret, a password
or a credential, where it has 8 characters or more; the user's part of a URL, and the value of its fields of
such a name, or of a signature; and what follows `Authorization: Bearer`, `Basic` or `token`, but for a
$VARIABLE.

Not hidden: a secret typed in another form, shorter, encoded, or cut in two; the names of folders; what other
libraries and the commands of `pipe:` print themselves; the arguments of a process, which everyone on its
machine may list.
"""

import contextlib
import os
import re
import sys
from typing import TextIO

HIDDEN = "***"
SHORTEST = 8  # shorter values are words and numbers that stand everywhere
_WORDS = "KEY|TOKEN(?!IZ)|SECRET|PASSW|CREDENTIAL"
_NAME = re.compile(_WORDS, re.IGNORECASE)
# of bounded length, so that no text takes long
_IN_TEXT = re.compile(
    r"""(?P<before>://)[^/\s'"]{1,512}(?=@)"""
    r"""|(?P<header>authorization:\s{0,9}(?:bearer|basic|token)\s{1,9})(?!\$)[^\s'"]+"""
    rf"""|(?P<field>[?&#][^?&#=\s]{{0,64}}(?:{_WORDS}|SIG)[^?&#=\s]{{0,64}}=)[^&#\s'"]+""",
    re.IGNORECASE,
)


def hide(text: str) -> str:
    """The text with *** in the place of secrets."""
    secret = [value for name, value in os.environ.items() if _NAME.search(name)]
    values = {form for value in secret for form in (value, value.strip())}  # a file ends with a newline
    for value in sorted(values, key=len, reverse=True):  # one may hold another
        if len(value) >= SHORTEST:
            text = text.replace(value, HIDDEN)
    return _IN_TEXT.sub(lambda found: found[found.lastgroup] + HIDDEN, text)


def say(text: str, file: TextIO | None = None) -> None:
    """Print, without secrets. A full disk under the log, or a reader that is gone, ends nothing."""
    with contextlib.suppress(OSError):
        print(hide(text), file=file or sys.stdout, flush=True)
