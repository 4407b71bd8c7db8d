"""`autotune show`."""

from __future__ import annotations

import click

from autotune.cli.options import NamedFolder, command_name
from autotune.errors import UsageError
from autotune.io.folders import Folder
from autotune.io.terminal import typed


@click.command(epilog="Example: autotune show results/first --format csv")
@click.argument("folders", type=NamedFolder(), nargs=-1, required=True, metavar="FOLDER")
@click.option("--target", help="Only this TPU generation.")
@click.option(
    "--format",
    "form",
    type=click.Choice(("text", "csv", "json", "markdown")),
    default="text",
    show_default=True,
    help="csv and json have every column and digit: intervals, sources, versions.",
)
def command(folders: tuple[Folder, ...], target: str | None, form: str) -> None:
    """Print the winners of a results folder, beside what JAX's look-up answers today.

    Also while a sweep into it is running, which the text then says.
    """
    if len(folders) > 1:
        names = typed(*folders)
        raise UsageError(
            f"show takes one results folder, and {len(folders)} are named: `{command_name()} results merge "
            f"{names} -o results/all` makes one of them"
        )
    (folder,) = folders
    from autotune.analysis import overview
    from autotune.cli import next_step
    from autotune.cli.render import overview as show_formats
    from autotune.tpu import generations

    if target is not None:
        generations.by_name(target)
    seen = overview.overview(folder, target, empty=False)
    click.echo(show_formats.render(seen, form), nl=False)
    if form != "text":
        return
    if seen.unfinished:
        again = next_step.going_on([sweep for sweep, _ in seen.unfinished])
        click.echo(f"Next, unless it is running: {again}", err=True)
    elif then := next_step.after_rows(seen, folder, target):
        click.echo(f"Next: {then}", err=True)
