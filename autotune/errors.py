"""Errors that a user can act on, each with the exit code of the command that meets it."""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable

EXIT_DIFFERENT = 1  # differences found, or checks failed
EXIT_USAGE = 2  # wrong usage
EXIT_MACHINE = 3  # this machine cannot do it: no TPU, no libtpu
EXIT_INTERRUPTED = 130


MAX_ERROR_CHARS = 500


class AutotuneError(Exception):
    """One line for the user: what is wrong, with which value, and what to type instead."""

    exit_code = EXIT_DIFFERENT


class UsageError(AutotuneError):
    """What was typed, or a file that was named, cannot be used."""

    exit_code = EXIT_USAGE


class MachineError(AutotuneError):
    """This machine cannot do what was asked."""

    exit_code = EXIT_MACHINE


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message that says which known words are like one that is not known; '' if none is."""
    close = difflib.get_close_matches(word, known)
    return f" Did you mean {' or '.join(close)}?" if close else ""


def first_line(error: BaseException) -> str:
    """The first line of an error's message that says something, cut to MAX_ERROR_CHARS.

    Of an error without a message: the line of source that raised it. Its type's name tells a user nothing.
    """
    for line in str(error).splitlines():
        if line.strip():
            return line.strip()[:MAX_ERROR_CHARS]
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "it failed without a message"
    last = frames[-1]
    where = f"line {last.lineno} of {last.filename.rpartition('/')[2]}"
    return f"it failed without a message, in {where}: {last.line}"[:MAX_ERROR_CHARS]
