"""Keeps secrets out of what leaves a process: saved configs, results, metrics, wandb, and the terminal.

Hidden are the value of each environment variable whose name speaks of a key, a token, a secret, a password
or a credential, where it has 8 characters or more; the user's part of a URL, and the value of its fields of
such a name, or of a signature; and what follows `Authorization: Bearer` or `Basic`, but for a $VARIABLE.

Not hidden: a secret typed in another form, shorter, encoded, or cut in two; the names of folders; what other
libraries and the commands of `pipe:` print themselves; the arguments of a process, which everyone on its
machine may list.
"""

import os
import re

HIDDEN = "***"
SHORTEST = 8  # shorter values are words and numbers that stand everywhere
_WORDS = "KEY|TOKEN(?!IZ)|SECRET|PASSW|CREDENTIAL"
_NAME = re.compile(_WORDS, re.IGNORECASE)
_IN_TEXT = re.compile(
    rf"""(?<=://)[^/\s'"]+(?=@)"""
    r"""|(?<=authorization:\ bearer\ )(?!\$)[^\s'"]+"""
    r"""|(?<=authorization:\ basic\ )(?!\$)[^\s'"]+"""
    rf"""|(?P<field>[?&][^=&\s]*(?:{_WORDS}|SIG)[^=&\s]*=)[^&\s'"]+""",
    re.IGNORECASE,
)


def hide(text: str) -> str:
    """The text with *** in the place of secrets."""
    values = {value for name, value in os.environ.items() if _NAME.search(name) and len(value) >= SHORTEST}
    for value in sorted(values, key=len, reverse=True):  # one may hold another
        text = text.replace(value, HIDDEN)
    return _IN_TEXT.sub(lambda found: (found["field"] or "") + HIDDEN, text)
