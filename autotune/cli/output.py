"""`-o`: where a command's one file goes, and what of the user's it must not take the place of."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import click

from autotune.cli.options import NamedPath
from autotune.errors import UsageError
from autotune.io.files import whole

SCREEN = Path("-")
_HEAD_BYTES = 64 << 10  # tell what a file is
Own = Callable[[BinaryIO], bool]

force_option = click.option(
    "--force",
    is_flag=True,
    help="Replace the file even if autotune did not write it, it is read-only or in a results folder.",
)


class OutputFile(NamedPath):
    """A file to write; SCREEN for -, which ./- is not."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = super().convert(value, param, ctx)
        # As a Path, ./- is - again.
        return path if value == "-" or path != SCREEN else Path.cwd() / path


def require_replaceable(path: Path, own: Own, force: bool) -> None:
    """Refuse a file that is not this tool's to replace, before anything is worked out.

    own: whether autotune wrote such a file. force: the user says so.

    Raises:
      UsageError: it is in a results folder, is read-only, or is not autotune's; or it is a loop of links.
    """
    if path == SCREEN:
        return
    where = f"-o {str(path)!r}"
    file = Path(os.path.realpath(path))
    if file.is_symlink():
        raise UsageError(f"{where} is a link that leads back to itself: name another file")
    results = any(file.parent.glob("rows-*.parquet")) or any(file.parent.glob(".sweep-*.json"))
    if file.match("rows-*.parquet") and not results:
        raise UsageError(f"{where} begins with rows-, as a sweep's own files do: choose another name")
    if force or not (file.is_file() or not file.exists()):  # a folder is refused when it is written
        return
    if results:
        raise UsageError(
            f"{where} is in a results folder, which holds rows alone: name a file elsewhere, or add --force"
        )
    if not file.exists():
        return
    status = file.stat()
    if not status.st_mode & 0o222 or not os.access(file, os.W_OK):
        raise UsageError(f"{where} is read-only: name another file, or add --force to replace it")
    try:
        with file.open("rb") as opened:
            known = not status.st_size or own(opened)
    except OSError as error:
        raise UsageError(f"{where} cannot be read: {error.strerror}; --force replaces it") from None
    if not known:
        raise UsageError(
            f"{where} is there, and not as this autotune writes it: name another file, or add --force to "
            "replace it"
        )


def write(path: Path, content: bytes) -> None:
    """Write a file, or to the screen.

    Raises:
      UsageError, MachineError: as files.whole.
    """
    if path == SCREEN:
        click.echo(content, nl=False)
        sys.stdout.flush()
        return
    with whole(path) as file:
        file.write(content)


def own_page(file: BinaryIO) -> bool:
    """Whether a file begins as the page of `autotune report` does."""
    return b'<meta name="generator" content="tpu-autotune">' in file.read(_HEAD_BYTES)


def own_table(file: BinaryIO) -> bool:
    """Whether a file is a table of `autotune emit`, to which nothing was added by hand."""
    from autotune.tables.literal import MAX_BYTES
    from autotune.tables.patch import table_alone

    return table_alone(file.read(MAX_BYTES))


def own_rows(form: str, names: list[str]) -> Own:
    """Tells exports of rows in csv and json; names: the columns of a row.

    One in parquet cannot be told from the rows of a sweep, which may be the only ones.
    """

    def own(file: BinaryIO) -> bool:
        text = file.read(_HEAD_BYTES).decode("utf-8", "replace")
        if form == "csv":
            found = text.split("\n", 1)[0].split(",")
        elif form == "json" and text.startswith("[\n {\n"):
            found = re.findall(r'^  "([^"]*)":', text.split("\n }", 1)[0], re.M)
        else:
            return form == "json" and text == "[]\n"
        return set(names) <= set(found)

    return own
