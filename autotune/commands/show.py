"""`autotune show`."""

from __future__ import annotations

import click

from autotune.commands.options import NamedFolder
from autotune.folders import Folder


@click.command(epilog="Example: autotune show results/first")
@click.argument("folder", type=NamedFolder())
@click.option("--target", help="Only this TPU generation.")
def command(folder: Folder, target: str | None) -> None:
    """Print the winners of a results folder, beside what JAX's look-up answers today."""
    from autotune import show
    from autotune.tpu import chips

    if target is not None:
        chips.by_name(target)
    show.display(show.overview(folder, target))
