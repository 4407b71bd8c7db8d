"""`autotune diff`."""

from __future__ import annotations

from pathlib import Path

import click

from autotune.cli.completing import TABLES, names_or_files
from autotune.cli.options import NamedFolder, command_name
from autotune.errors import EXIT_DIFFERENT, UsageError
from autotune.io.folders import Folder
from autotune.io.terminal import named, typed


@click.command(epilog='Example: autotune diff "jax:TPU v5" "jax:TPU v6" --format markdown')
@click.argument("tables", nargs=-1, metavar="A B [MORE]...", shell_complete=names_or_files(*TABLES))
@click.option(
    "--results",
    "folders",
    type=NamedFolder(),
    multiple=True,
    help="Rows that say what choices cost. Repeatable. [default: those of the committed tables]",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(("text", "csv", "json", "markdown")),
    default="text",
    show_default=True,
    help="csv has a line for each key that differs.",
)
@click.option("--all", "show_all", is_flag=True, help="Show every key, not the first few.")
@click.option("--exit-code", is_flag=True, help="Exit with 1 if the tables differ, as git does.")
def command(
    tables: tuple[str, ...], folders: tuple[Folder, ...], form: str, show_all: bool, exit_code: bool
) -> None:
    """Compare tables: keys added, removed and changed, and what each one's choices cost.

    A table is a Python file, `jax` for the installed JAX's own, a generation for the committed one, or a
    results folder; `:DEVICE` after it picks one device. Beside results folders, `jax` is what JAX answers for
    their keys, its defaults included. Between two tables the keys are shown, and which part
    of the key the changes run along; between more, counts. Where there are rows, a matrix says what each
    table's choices cost on each generation, above the best pair: by the committed rows, for results folders
    too, unless --results names these or others.
    """
    from itertools import combinations

    from autotune.analysis.diff import answers_for, compare, regret_matrix
    from autotune.cli.render.diff import Comparison, render
    from autotune.results import scores
    from autotune.tables import load
    from autotune.tables.dialects import JAX

    if len(tables) < 2:
        raise UsageError(f"diff compares two tables or more, and {len(tables)} are named: name A and B")
    loaded = [load(name) for name in tables]
    swept = [table for name, table in zip(tables, loaded, strict=True) if _is_results_folder(name)]
    if swept:
        pairs_of_names = zip(tables, loaded, strict=True)
        loaded = [answers_for(table, swept) if name == "jax" else table for name, table in pairs_of_names]
    pairs = {(i, j): compare(loaded[i], loaded[j]) for i, j in combinations(range(len(loaded)), 2)}
    board = None
    if folders:
        board = scores.read(list(folders))
    elif all(table.dialect is JAX for table in loaded):
        board = scores.committed(sorted({g for table in loaded for g in table.generations()}))
    comparison = Comparison(
        loaded,
        pairs,
        regret_matrix(loaded, board) if board else {},
        board.origin if board else None,
        board.sources() if board else (),
        board.vmem_limit_bytes if board else None,
    )
    click.echo(render(comparison, form, show_all=show_all), nl=False)
    if form == "text" and comparison.differs:
        click.echo(f"Next: {command_name()} check {typed(named(tables[-1]))}", err=True)
    if exit_code and comparison.differs:
        raise click.exceptions.Exit(EXIT_DIFFERENT)


def _is_results_folder(name: str) -> bool:
    return "://" in name or Path(name).is_dir()
