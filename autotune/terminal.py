"""Standard error as a person sees it: whether somebody watches it, how wide it is, text that fits it."""

from __future__ import annotations

import os
import sys
import textwrap
from typing import TextIO

WIDTH = 80  # of a terminal that does not tell, and the most that a line of text takes


def watched(stream: TextIO) -> bool:
    """Whether a stream is a terminal on which a line can be written over; TERM=dumb says that it cannot."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def columns(stream: TextIO) -> int:
    """Columns of a stream's terminal as it is now, at most WIDTH; WIDTH for anything else.

    Not of COLUMNS, which a shell may have exported before its window was resized.
    """
    try:
        return min(WIDTH, os.get_terminal_size(stream.fileno()).columns or WIDTH)
    except (OSError, ValueError):  # no terminal, or no file at all
        return WIDTH


def say(text: str) -> None:
    """Write lines to standard error: folded in a terminal; whole anywhere else, where they are searched."""
    if sys.stderr.isatty():
        text = "\n".join(folded(line, columns(sys.stderr)) for line in text.split("\n"))
    print(text, file=sys.stderr, flush=True)


def folded(line: str, width: int = WIDTH) -> str:
    """One line of text as several of at most this width, broken at spaces alone."""
    return textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)


def printable(text: str) -> str:
    """Text of others without what could steer a terminal; a tab is a space."""
    return "".join(c if c.isprintable() else " " if c == "\t" else "?" for c in text)
