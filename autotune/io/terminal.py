"""Standard streams as a person sees them: who watches, how wide it is, text that fits and does no harm."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import shlex
import signal
import stat
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import PurePath
from typing import TYPE_CHECKING, NoReturn, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

WIDTH = 80  # of a terminal that does not tell, and the most that a line of text takes
# A reader of standard error that takes nothing for so long is not waited for any more.
PATIENCE_SECONDS = 5.0

# What asks a command to leave; those of a terminal go to all processes that it started. Batch systems send
# the last two before a job's time is up.
FROM_TERMINAL = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
INTERRUPTS = (*FROM_TERMINAL, signal.SIGTERM, signal.SIGUSR1, signal.SIGXCPU)


def unfailing(stream: TextIO) -> TextIO:
    """Standard error that no text can stop: what its disk has no room for, or its reader no wish, is dropped.

    Work of hours must not end, or stand still, because its progress cannot be told.
    """
    raw = _Unfailing(stream.fileno(), "wb", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding=stream.encoding, errors="backslashreplace", line_buffering=True
    )


class _Unfailing(io.FileIO):
    _patience = PATIENCE_SECONDS

    def write(self, data: ReadableBuffer, /) -> int:
        view = memoryview(data).cast("B")
        try:
            mode = os.fstat(self.fileno()).st_mode
            if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
                # So much does not block where there is room at all.
                part = view[: select.PIPE_BUF]
                return (super().write(part) or 0) if self._has_room() else len(view)
            written: int | None = super().write(view)
            return len(view) if written is None else written
        except OSError:
            return len(view)

    def _has_room(self) -> bool:
        poll = select.poll()
        poll.register(self.fileno(), select.POLLOUT)
        found = bool(poll.poll(self._patience * 1000))
        self._patience = PATIENCE_SECONDS if found else 0.0
        return found


def closed(number: int) -> TextIO:
    """A stream in place of a closed standard output: to write to it is an error, as to a full disk."""
    raw = _Closed(number, "wb", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace")


class _Closed(io.FileIO):
    def write(self, data: ReadableBuffer, /) -> NoReturn:
        raise OSError(errno.EBADF, "standard output is closed, and what was to be written there is lost")


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


def counted(number: int, noun: str) -> str:
    """A number of things: 1 key, 2 keys."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def printable(text: str) -> str:
    """Text of others without what could steer a terminal; a tab is a space."""
    return "".join(c if c.isprintable() else " " if c == "\t" else "?" for c in text)


def shown(name: object) -> str:
    """A path, folder or table as a message names it, whatever is in its name."""
    return printable(str(name))


def cell(value: object) -> object:
    """A value for a CSV file: text that a spreadsheet would take for a formula gets a ' before it, which
    spreadsheets do not show. Numbers, also those that are text, stay what they are. A carriage return, which
    would begin a record, is a space."""
    if not isinstance(value, str):
        return value
    value = value.replace("\r", " ")
    if not value.lstrip().startswith(("=", "+", "-", "@")) and not value.startswith(("\t", "\n")):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def typed(*words: object) -> str:
    """Words as one types them to a shell; what is not printable as bash and zsh take it, $'...'.

    A path that begins with a dash gets a ./ before it, as it would be an option.
    """
    return " ".join(_word(named(word) if isinstance(word, PurePath) else str(word)) for word in words)


def named(name: object) -> str:
    """A file's or folder's name as a word that is no option."""
    text = str(name)
    return f"./{text}" if text.startswith("-") else text


def _word(word: str) -> str:
    if word.isprintable():
        return shlex.quote(word)
    return "$'" + "".join(map(_escape, word)) + "'"


def _escape(c: str) -> str:
    if c.isprintable():
        return f"\\{c}" if c in "\\'" else c
    return "".join(f"\\x{byte:02x}" for byte in c.encode("utf-8", "surrogateescape"))


@contextlib.contextmanager
def said_if_slow(text: str, seconds: float = 2.0) -> Iterator[None]:
    """Say a line, from another thread, if what is done meanwhile takes so long."""
    timer = threading.Timer(seconds, say, [text])
    timer.daemon = True  # no exit waits for it
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
