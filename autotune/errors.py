"""Errors that a user can act on, each with the exit code of the command that meets it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

EXIT_DIFFERENT = 1  # differences found, or checks failed
EXIT_USAGE = 2  # wrong usage
EXIT_MACHINE = 3  # this machine cannot do it: no TPU, no libtpu
EXIT_INTERRUPTED = 130


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
