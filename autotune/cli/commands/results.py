"""`autotune results ls|export|merge|compact`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from autotune.cli import output as output_file
from autotune.cli.options import NamedFolder, command_name
from autotune.errors import UsageError
from autotune.io.terminal import shown, typed

if TYPE_CHECKING:
    from autotune.io.folders import Folder
    from autotune.results.maintenance import Gathered

FORMATS = ("csv", "json", "parquet")


@click.group(epilog="Example: autotune results merge results/host1 results/host2 -o results/all")
def command() -> None:
    """Look at results folders as a whole, and make one of several.

    A folder is a path, s3://BUCKET/DIR or gs://BUCKET/DIR.
    """


@command.command(name="ls", epilog="Example: autotune results ls results/first --format json")
@click.argument("folder", type=NamedFolder())
@click.option(
    "--format",
    "form",
    type=click.Choice(("text", "json")),
    default="text",
    show_default=True,
    help="Of the list.",
)
def list_command(folder: Folder, form: str) -> None:
    """List what a results folder holds: files, rows, targets, versions.

    Of several rows of the same candidate the newest counts, and the others are called superseded. Unfinished
    are sweeps that have begun and not come to their end.
    """
    import json

    from autotune.io.terminal import printable
    from autotune.results import maintenance, unfinished

    held = maintenance.inventory(folder)
    held["unfinished"] = [str(sweep) for sweep in unfinished.read(folder)]
    if not (held["rows"] or held["unfinished"]):
        raise UsageError(maintenance.nothing([folder], None))
    if form == "json":
        click.echo(json.dumps(held, indent=1))
        return
    for name, value in held.items():
        if isinstance(value, list):
            value = "; ".join(value) or None
        elif isinstance(value, dict):
            value = ", ".join(f"{what} {count}" for what, count in value.items()) or "none"
        click.echo(f"{name.replace('_', ' ') + ':':20}{'none' if value is None else printable(str(value))}")


@command.command(epilog="Example: autotune results export results/first -o rows.csv")
@click.argument("folder", type=NamedFolder())
@click.option(
    "-o",
    "--output",
    type=output_file.OutputFile(),
    required=True,
    help="File to write; its ending, .csv, .json or .parquet, says how. - for the screen, as csv.",
)
@output_file.force_option
def export(folder: Folder, output: Path, force: bool) -> None:
    """Write the rows of a results folder as one file for other tools.

    One row a candidate and workload, the newest. Times are ISO 8601; in CSV, lists are JSON, and text
    that a spreadsheet would take for a formula has a ' before it.
    """
    form = "csv" if output == output_file.SCREEN else output.suffix.lower().removeprefix(".")
    if form not in FORMATS:
        raise UsageError(
            f"-o {str(output)!r} ends with none of .csv, .json, .parquet, which say what to write"
        )
    from autotune.results import maintenance
    from autotune.results.schema import arrow as schema

    output_file.require_replaceable(output, output_file.own_rows(form, schema().names), force)
    content = maintenance.exported(folder, form)
    output_file.write(output, content)
    if output == output_file.SCREEN:
        return
    click.echo(
        f"{shown(output)}: {len(content):,} bytes; docs/results.md says what the columns are", err=True
    )


@command.command(epilog="Example: autotune results merge results/host1 gs://bucket/host2 -o results/all")
@click.argument("sources", type=NamedFolder(), nargs=-1, required=True, metavar="FOLDER...")
@click.option(
    "-o", "--output", type=NamedFolder(), required=True, help="Folder to add the rows to, new or old."
)
def merge(sources: tuple[Folder, ...], output: Folder) -> None:
    """Add the rows of results folders to another.

    Every row is kept, the same row once: merging again changes nothing, and the order of the folders plays no
    part. Rows that disagree about a candidate are all kept and counted; the newest decides.
    """
    from autotune.io.terminal import counted
    from autotune.results import maintenance

    done = maintenance.merge(sources, output)
    click.echo(f"{shown(output)}: {counted(done.rows, 'row')}, {done.new} of them new, in {_files(done)}")
    _warn(done)
    click.echo(f"Next: {command_name()} show {typed(output)}", err=True)


@command.command(epilog="Example: autotune results compact results/first")
@click.argument("folder", type=NamedFolder())
def compact(folder: Folder) -> None:
    """Make one file a target of a results folder's many.

    The new file is there before the old ones are deleted. Sweeps into the folder may be running.
    """
    from autotune.io.terminal import counted
    from autotune.results import maintenance

    done = maintenance.compact(folder)
    click.echo(f"{shown(folder)}: {counted(done.rows, 'row')} in {_files(done)}")
    _warn(done)


def _files(done: Gathered) -> str:
    from autotune.io.terminal import counted

    return counted(done.files, "file")


def _warn(done: Gathered) -> None:
    from autotune.io.terminal import counted

    if done.disagreeing:
        click.echo(
            f"{counted(done.disagreeing, 'candidate')} on a workload with rows that disagree: all are kept, "
            "the newest counts",
            err=True,
        )
