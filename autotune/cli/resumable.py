"""What a sweep says that is interrupted."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import click

from autotune.cli.options import command_name
from autotune.errors import EXIT_INTERRUPTED
from autotune.io.folders import Folder, entries
from autotune.io.terminal import shown, typed


def resumable(command: Callable[..., None]) -> Callable[..., None]:
    """Have a command with the option --out say how it goes on, wherever it is interrupted."""

    @functools.wraps(command)
    def call(*, out: Folder | None, **values: Any) -> None:
        try:
            command(out=out, **values)
        except KeyboardInterrupt:
            if out is None:  # it records nothing
                raise
            again = f"{command_name()} {typed(*sys.argv[1:])}"
            # The folder may be there for the note of this sweep alone.
            recorded = any(entry.name.endswith(".parquet") for entry in entries(out))
            so_far = (
                f"everything so far is recorded in {shown(out)}" if recorded else "nothing was recorded yet"
            )
            click.echo(f"interrupted; {so_far}. To go on:\n  {again}", err=True)
            raise click.exceptions.Exit(EXIT_INTERRUPTED) from None

    return call
