"""`autotune doctor`."""

from __future__ import annotations

import os

import click

from autotune.cli.options import NamedFolder, command_name, cores
from autotune.errors import EXIT_MACHINE
from autotune.io.folders import Folder
from autotune.io.terminal import typed

COLOURS = {"ok": "green", "warning": "yellow", "failure": "red"}


@click.command(epilog="Example: autotune doctor --deep")
@click.option("--deep", is_flag=True, help="Compile a small program for each generation: about 20 s.")
@click.option(
    "--out",
    type=NamedFolder(),
    metavar="FOLDER",
    help="Results folder to look at: a path, s3://BUCKET/DIR or gs://BUCKET/DIR. [default: the "
    "current folder]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, for programs.")
def command(deep: bool, out: Folder | None, as_json: bool) -> None:
    """Say what works here, what does not, and what to type about it.

    Looks at Python, jax, jaxlib and libtpu and whether they fit together; the kernel; libtpu's lockfile and
    who holds it; folders and their room; the TPU; and the generations that can be compiled for. Each line is
    ok, warning or failure. Exit code 3 if no sweep can run, on a TPU or for one.

    docs/troubleshooting.md goes by the errors that one meets, JAX's own among them:

    \b
    NotImplementedError: TPU version must be 4 or higher.
    ValueError: num_combined_kv_heads=12 can not be XLA fully tiled.
    """
    from autotune.cli.render import doctor as doctor_formats
    from autotune.doctor import examine

    report = examine.Report()
    colour = "NO_COLOR" not in os.environ
    for check in examine.examine(report, out=out, deep=deep, cores=cores()):
        if as_json:
            continue
        text = doctor_formats.line(check)
        if colour:
            state = click.style(check.state, fg=COLOURS[check.state], bold=check.state != "ok")
            text = state + text.removeprefix(check.state)
        click.echo(text)
    where = typed(out) if out else "results/first"
    if as_json:
        click.echo(doctor_formats.as_json(report, command_name(), where))
    else:
        click.echo("\n" + doctor_formats.end(report, command_name(), where))
    if not report.ready:
        raise click.exceptions.Exit(EXIT_MACHINE)
