"""`autotune emit`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(epilog="Example: autotune emit results/first --allow-modelled -o tuned_block_sizes.py")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File to write. [default: the screen]")
@click.option(
    "--allow-modelled",
    is_flag=True,
    help="Emit values that were modelled from the compiler's schedule; the table says so.",
)
def command(folder: Path, output: Path | None, allow_modelled: bool) -> None:
    """Write the Python table of tuned block sizes.

    The module stands in for JAX's own tuned_block_sizes: the same names, signatures and errors. It is the
    same, byte for byte, for the same rows.
    """
    from autotune import emit
    from autotune.files import whole

    lines = emit.winning_lines(folder)
    text = emit.emit(lines, allow_modelled=allow_modelled)
    if output is None:
        click.echo(text, nl=False)
        return
    with whole(output) as file:
        file.write(text.encode())
    sources = ", ".join(f"{count} {source}" for source, count in lines["source"].value_counts().items())
    click.echo(f"{output}: {len(lines)} keys ({sources})", err=True)
