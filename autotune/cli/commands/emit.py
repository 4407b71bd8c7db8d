"""`autotune emit`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from autotune.cli import output as output_file
from autotune.cli.completing import TABLES, names_or_files
from autotune.cli.options import TARGET, NamedFolder, NumberRange, command_name
from autotune.errors import EXIT_DIFFERENT, UsageError
from autotune.io.folders import Folder
from autotune.io.terminal import shown, typed

if TYPE_CHECKING:
    from autotune.emit import Winners
    from autotune.results.unfinished import Begun


@click.command(epilog="Example: autotune emit results/first --allow-modelled -o tuned_block_sizes.py")
@click.argument("folder", type=NamedFolder())
@click.option(
    "-o",
    "--output",
    type=output_file.OutputFile(),
    default="-",
    help="File to write; - for the screen. Of a file that is --base too, and has lines of its own, the table "
    "alone is written. [default: -]",
)
@output_file.force_option
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
    type=NumberRange(min=0),
    default=0.0,
    show_default=True,
    metavar="PERCENT",
    help="Replace a value of --base only if it is this much slower, beyond noise.",
)
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if the file would change.")
def command(
    folder: Folder,
    output: Path,
    force: bool,
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
    if check and output == output_file.SCREEN:
        raise UsageError("--check compares with a file: name it with -o")
    from autotune import emit
    from autotune.io.terminal import counted
    from autotune.tables import load

    in_place = base is not None and _holds_more(output, base)
    if not check:
        output_file.require_replaceable(
            output, (lambda file: True) if in_place else output_file.own_table, force
        )
    merged_into = load(base) if base else None
    won = emit.read(folder, target=target, base=merged_into, min_gain=min_gain / 100)
    emitted = emit.emit(won, allow_modelled=allow_modelled, names=names)
    for said in _notes(won, names, check):
        click.echo(said, err=True)
    content = emitted.text.encode(errors="replace")
    if in_place:
        from autotune.tables.patch import patched

        content = patched(output.read_bytes(), str(output), content.decode())
    if check:
        _compare(output, content)
        return
    output_file.write(output, content)
    if output == output_file.SCREEN:
        return
    sources = ", ".join(f"{count} {source}" for source, count in sorted(emitted.sources.items()))
    click.echo(f"{shown(output)}: {counted(emitted.rows, 'key')} ({sources})", err=True)
    if output.is_file():
        pasted = names == "jax" and not in_place
        click.echo(f"Next: {_next(output, pasted, won.unfinished)}", err=True)


def _notes(won: Winners, names: str, check: bool) -> Iterator[str]:
    """What to know of the winners before their table is used."""
    from autotune.results.baselines import uncompared_text

    if won.merged is not None:
        yield str(won.merged)
    for sweep in won.unfinished:
        yield f"unfinished: {sweep}: winners may change till it does"
    if won.narrowed and not check:
        yield won.narrowed
    if won.uncompared and not check:
        yield uncompared_text(won.uncompared, len(won.lines))
    if names == "jax" and "v4" in set(won.lines["target"]):
        yield "JAX's own look-up never consults its table on v4: the v4 rows change nothing there"


def _next(output: Path, pasted: bool, begun: Sequence[Begun]) -> str:
    """What to do with a table: finish its sweep, keep it or look at it, and put it to use.

    pasted: it is no module but rows for one.
    """
    from autotune.cli import next_step

    if begun:
        return next_step.going_on(begun)
    name = typed(output)
    first = f"{command_name()} check {name}"
    if next_step.committable(output):
        first = f"git add {name} && git commit -m 'Tuned block sizes'"
    if pasted:
        return (
            f"{first}; it is not a module: paste its rows into the TUNED_BLOCK_SIZES of "
            "jax/experimental/pallas/ops/tpu/ragged_paged_attention/tuned_block_sizes.py, in place of those "
            "under the same device name"
        )
    return f"{first}; in a program: with autotune.tables.use({str(output)!r}): ..."


def _holds_more(output: Path, base: str) -> bool:
    """Whether a table that is merged into its own file is not all of that file."""
    for name in (base, base.rpartition(":")[0]):
        with contextlib.suppress(OSError, ValueError):
            if name and output.samefile(name):
                with output.open("rb") as file:
                    return name != base or not output_file.own_table(file)
    return False


def _compare(path: Path, content: bytes) -> None:
    """Says whether a file is what would be written, and leaves with 1 if it is not."""
    if path.exists() and not path.is_file():  # a pipe or a device would be read for ever
        raise UsageError(f"{str(path)!r} is not a file: name the file to compare with")
    try:
        with path.open("rb") as file:
            same = file.read(len(content) + 1) == content
    except FileNotFoundError:
        same = False
    except OSError as error:
        raise UsageError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    click.echo(f"{shown(path)} {'is up to date' if same else 'would change'}", err=True)
    if not same:
        raise click.exceptions.Exit(EXIT_DIFFERENT)
