"""A text that comes about, live in the terminal: drawn again in place while it is sampled."""

import os
import shutil
import sys
import time
import unicodedata
from typing import TextIO

from lomdm_dist.errors import UserError
from lomdm_dist.sample.trajectory import pieces

FRAME = 0.05  # seconds between two at least: sampling is not to wait for the terminal
HIDE_CURSOR, SHOW_CURSOR, CLEAR_BELOW = "\x1b[?25l", "\x1b[?25h", "\x1b[J"
NEW, FAINT, PLAIN = "\x1b[30;43m", "\x1b[2m", "\x1b[0m"
HOLE = "·"


def check_terminal() -> None:
    """Raises UserError where standard output is no terminal that can move its cursor."""
    if not sys.stdout.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        raise UserError("--watch draws in a terminal, and this is none: use --trajectory FILE.html")


class LiveView:
    """`with LiveView(...) as view: sample(..., on_step=view)` shows the first text as it grows.

    What is new since the last frame is marked, unless NO_COLOR is set. The cursor comes back however it ends.
    """

    def __init__(self, tokenizer, mask_id: int, label: str = "", out: TextIO | None = None):
        self.tokenizer, self.mask_id, self.label, self.out = tokenizer, mask_id, label, out or sys.stdout
        self.height, self.before, self.drawn_at = 0, None, -FRAME

    def __enter__(self) -> "LiveView":
        self.out.write(HIDE_CURSOR)
        return self

    def __exit__(self, *error) -> None:
        self.out.write(SHOW_CURSOR)
        self.out.flush()

    def __call__(self, indices, z) -> None:
        """After a step: z [B, L] of the sequences at `indices` [B]. Draws the one of index 0."""
        first = z[(indices == 0).to(z.device)]
        if not len(first):
            return
        ids = first[0].tolist()
        done = self.mask_id not in ids
        if ids != self.before and (done or time.monotonic() - self.drawn_at >= FRAME):
            self.draw(ids)
            self.drawn_at = time.monotonic()

    def draw(self, ids: list[int]) -> None:
        """One frame, over the one before."""
        size = shutil.get_terminal_size()
        lines = wrap(self._looks(ids), size.columns - 1, styled="NO_COLOR" not in os.environ)
        if len(lines) > (most := size.lines - 3):  # what has scrolled off cannot be drawn over
            lines = [*lines[: most - 1], f"... and {len(lines) - most + 1} lines more"]
        known = sum(token != self.mask_id for token in ids)
        status = f"{self.label}: {known} of {len(ids)} tokens"
        frame = [*lines, "", status[: size.columns - 1]]
        up = f"\x1b[{self.height}F" if self.height else "\r"
        self.out.write(up + CLEAR_BELOW + "\n".join(frame) + "\n")
        self.out.flush()
        self.height, self.before = len(frame), ids

    def _looks(self, ids: list[int]) -> list[tuple[str, str]]:
        """Words and style of each token."""
        looks = []
        for token, was, piece in zip(ids, self.before or ids, pieces(self.tokenizer, ids), strict=True):
            if token == self.mask_id:
                looks.append((HOLE, FAINT))
            else:
                looks.append((printable(piece), NEW if was == self.mask_id else ""))
        return looks


def printable(text: str) -> str:
    """Without what would move the cursor or speak to the terminal; line breaks stay."""
    return "".join(letter if letter.isprintable() or letter == "\n" else " " for letter in text)


def wrap(looks: list[tuple[str, str]], width: int, styled: bool) -> list[str]:
    """Lines of at most `width` columns from (words, style) of each token; tokens stay whole if they can."""
    lines, column = [""], 0
    for words, style in looks:
        room = sum(map(columns, words.strip("\n")))
        if column + room > width:
            lines, column = [*lines, ""], 0
        for letter in words:
            if letter == "\n" or column + columns(letter) > width:
                lines, column = [*lines, ""], 0
            if letter != "\n":
                lines[-1] += f"{style}{letter}{PLAIN}" if styled and style else letter
                column += columns(letter)
    return lines


def columns(letter: str) -> int:
    """A terminal's, of a letter: East Asian ones take two."""
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1
