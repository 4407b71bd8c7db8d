"""`autotune emit`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from autotune.commands.completing import TABLES, names_or_files
from autotune.commands.options import TARGET, NamedFolder, NamedPath, command_name
from autotune.errors import EXIT_DIFFERENT, UsageError
from autotune.folders import Folder
from autotune.terminal import shown, typed

if TYPE_CHECKING:
    from autotune.unfinished import Begun


@click.command(epilog="Example: autotune emit results/first --allow-modelled -o tuned_block_sizes.py")
@click.argument("folder", type=NamedFolder())
@click.option("-o", "--output", type=NamedPath(), help="File to write. [default: the screen]")
@click.option(
    "--allow-modelled",
    is_flag=True,
    help="Emit values that were modelled from the compiler's schedule; the table says so.",
)
@click.option("--target", type=TARGET, help="Only the winners of this generation.")
@click.option(
    "--names",
    type=click.Choice(("autotune", "jax")),
    default="autotune",
    show_default=True,
    help="Write the stand-in module with its own device names, or only rows to paste into JAX's own table, "
    "under the names that its look-up asks for.",
)
@click.option(
    "--base",
    metavar="TABLE",
    shell_complete=names_or_files(*TABLES),
    help="Merge into this table: a file, jax, a generation or a results folder.",
)
@click.option(
    "--min-gain",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    metavar="PERCENT",
    help="Replace a value of --base only if it is this much slower, beyond noise.",
)
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if the file would change.")
def command(
    folder: Folder,
    output: Path | None,
    allow_modelled: bool,
    target: str | None,
    names: str,
    base: str | None,
    min_gain: float,
    check: bool,
) -> None:
    """Write the Python table of tuned block sizes.

    The module stands in for JAX's own tuned_block_sizes: the same names, signatures and errors. It is the
    same, byte for byte, for the same rows; its header says if a sweep has not come to its end.

    With --base, what was not re-tuned stays, and a value is replaced only where another is faster beyond
    noise; a summary says how many of each.
    """
    if check and output is None:
        raise UsageError("--check compares with a file: name it with -o")
    from autotune import emit
    from autotune.files import whole
    from autotune.incumbents import uncompared_text
    from autotune.tables import load
    from autotune.terminal import counted

    merged_into = load(base) if base else None
    won = emit.read(folder, target=target, base=merged_into, min_gain=min_gain / 100)
    emitted = emit.emit(won, allow_modelled=allow_modelled, names=names)
    if won.merged is not None:
        click.echo(f"{won.merged}", err=True)
    for sweep in won.unfinished:
        click.echo(f"unfinished: {sweep}: winners may change till it does", err=True)
    if won.uncompared and not check:
        click.echo(uncompared_text(won.uncompared, len(won.lines)), err=True)
    if names == "jax" and "v4" in set(won.lines["target"]):
        click.echo(
            "JAX's own look-up never consults its table on v4: the v4 rows change nothing there", err=True
        )
    if output is None:
        click.echo(emitted.text, nl=False)
        return
    if check:
        _compare(output, emitted.text)
        return
    with whole(output) as file:
        file.write(emitted.text.encode())
    sources = ", ".join(f"{count} {source}" for source, count in sorted(emitted.sources.items()))
    click.echo(f"{shown(output)}: {counted(emitted.rows, 'key')} ({sources})", err=True)
    if output.is_file():
        click.echo(f"Next: {_next(output, names, won.unfinished)}", err=True)


def _next(output: Path, names: str, begun: Sequence[Begun]) -> str:
    """What to do with a table: finish its sweep, keep it or look at it, and put it to use."""
    from autotune.commands import next_step

    if begun:
        return next_step.going_on(begun)
    name = typed(output)
    first = f"{command_name()} check {name}"
    if next_step.committable(output):
        first = f"git add {name} && git commit -m 'Tuned block sizes'"
    if names == "jax":
        return (
            f"{first}; it is no module: paste its rows into the TUNED_BLOCK_SIZES of "
            "jax/experimental/pallas/ops/tpu/ragged_paged_attention/tuned_block_sizes.py, in place of those "
            "under the same device name"
        )
    return f"{first}; in a program: with autotune.tables.use({str(output)!r}): ..."


def _compare(path: Path, text: str) -> None:
    """Says whether a file is what would be written, and leaves with 1 if it is not."""
    try:
        same = path.read_bytes() == text.encode()
    except FileNotFoundError:
        same = False
    except OSError as error:
        raise UsageError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    click.echo(f"{shown(path)} {'is up to date' if same else 'would change'}", err=True)
    if not same:
        raise click.exceptions.Exit(EXIT_DIFFERENT)
