"""`autotune check`."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING

import click

from autotune.cli.commands import server_start
from autotune.cli.commands.server_start import ServerOptions, server_options
from autotune.cli.completing import TABLES, names_or_files
from autotune.cli.options import TARGET, NamedFolder, NumberRange, Seconds, Size, command_name, cores
from autotune.errors import EXIT_DIFFERENT, UsageError
from autotune.io.folders import Folder
from autotune.io.terminal import named, typed

if TYPE_CHECKING:
    from autotune.analysis.check import Finding
    from autotune.tables import Table

FORMATS = ("text", "markdown", "json", "github")


@click.command(epilog="Example: autotune check jax --compile --target v6e --limit 20")
@click.argument("table", required=False, shell_complete=names_or_files(*TABLES))
@click.option("--target", type=TARGET, help="Only this generation's rows.")
@click.option(
    "--lookup",
    metavar="NAME",
    help="Judge by this look-up; a wrong name lists those there are. [default: the file's own, told by the "
    "text of its functions]",
)
@click.option(
    "--compile", "compiling", is_flag=True, help="Compile the entries too, for each generation of the table."
)
@click.option(
    "--limit", type=click.IntRange(min=1), help="Compile at most this many programs, evenly spaced."
)
@click.option(
    "--vmem-limit",
    type=Size(),
    help="vmem_limit_bytes to compile at. [default: the table's own, else the compiler's]",
)
@click.option("--jobs", type=click.IntRange(1, 1024), help="Compiles at once. [default: the cores]")
@click.option(
    "--compile-timeout",
    type=Seconds(),
    default=900.0,
    show_default=True,
    help="Seconds that one compile may take.",
)
@click.option(
    "--slower-than",
    type=NumberRange(min=0),
    metavar="PERCENT",
    help="Report entries that cost this much more than the best candidate, by the rows.",
)
@click.option(
    "--results",
    "folders",
    type=NamedFolder(),
    multiple=True,
    help="Rows to compare with. Repeatable. [default: those of the committed tables]",
)
@click.option("--format", "form", type=click.Choice(FORMATS), default="text", show_default=True)
@server_options
@click.option("--all", "show_all", is_flag=True, help="Show every finding, not the first few of each kind.")
def command(
    table: str | None,
    target: str | None,
    lookup: str | None,
    compiling: bool,
    limit: int | None,
    vmem_limit: int | None,
    jobs: int | None,
    compile_timeout: float,
    slower_than: float | None,
    folders: tuple[Folder, ...],
    form: str,
    server: ServerOptions,
    show_all: bool,
) -> None:
    """Check a table, or what a server would run; exit code 1 if anything is found.

    TABLE is a Python file, `jax` for the installed JAX's own, a generation for the committed one, or a
    results folder; `:DEVICE` after it picks one device. Found are keys that no call can find, values above
    what a call has, heads that the kernel never has in one block, and names that two generations share; with
    --compile entries that do not fit, and with --slower-than entries that rows show to be slow.

    Without TABLE, --kernel and --model check a server's own attention: whether the block sizes that it would
    take compile for --target, and which would, where they do not. It takes minutes with many heads on a chip.
    """
    if table is None:
        server_start.run(server, target, vmem_limit, jobs, compile_timeout)
        return
    if server.kernel or server.model:
        raise UsageError(f"{table!r} is a table, and --kernel checks a server: leave out one of them")
    from autotune.analysis import check
    from autotune.cli.render import check as check_formats
    from autotune.tables import load
    from autotune.tables.dialects import JAX

    loaded = load(table, lookup)
    elsewhere = target is not None and not check.targets_of(loaded, target)
    if target is not None and not elsewhere:
        loaded = loaded.only(target)
    if (compiling or slower_than is not None) and loaded.dialect is not JAX:
        raise UsageError(
            f"{table!r} is a table of the {loaded.dialect} dialect, whose kernel is not JAX's: leave out "
            "--compile and --slower-than"
        )
    found = [check.without_rows(loaded, target)] if target and elsewhere else check.static_findings(loaded)
    report = check.Report(loaded, list(found))
    generations = check.targets_of(loaded, target)
    if compiling:
        limit_bytes = vmem_limit or loaded.provenance.get("vmem_limit_bytes")
        for generation in generations:
            counts, total, found = _compile(loaded, generation, limit_bytes, limit, jobs, compile_timeout)
            report.compiled[generation], report.programs[generation] = counts, total
            report.findings.extend(found)
    if slower_than is not None:
        found, unscored = _slow(loaded, generations, folders, slower_than)
        report.findings.extend(found)
        report = dataclasses.replace(report, unscored=unscored)
    click.echo(check_formats.render(report, form, show_all=show_all), nl=False)
    if form == "text" and loaded.dialect is JAX and generations and not (compiling or report.findings):
        asked = typed(named(table), "--compile", *(["--target", target] if target else []))
        click.echo(f"Next: {command_name()} check {asked}, to see whether all fit", err=True)
    if report.findings:
        raise click.exceptions.Exit(EXIT_DIFFERENT)


def _slow(
    table: Table, generations: list[str], folders: tuple[Folder, ...], percent: float
) -> tuple[list[Finding], int]:
    """Entries that rows show to be slow, and how many have no latency there."""
    from autotune.analysis import check
    from autotune.results import scores

    board = scores.read(list(folders)) if folders else scores.committed(generations)
    if board is None:
        raise UsageError("--slower-than compares with rows, and none are committed: name some with --results")
    return check.slow_findings(table, generations, board, percent / 100)


def _compile(
    table: Table,
    generation: str,
    vmem_limit: int | None,
    limit: int | None,
    jobs: int | None,
    timeout: float,
) -> tuple[Counter[str], int, list[Finding]]:
    """Verdicts by status, how many programs there are, and findings."""
    from autotune.analysis import check
    from autotune.cli.progress import of_batch
    from autotune.compile.batch import compile_all
    from autotune.kernel.problem import Settings
    from autotune.tpu import generations as chips

    if beyond := chips.beyond_vmem(chips.by_name(generation), vmem_limit):
        click.echo(beyond, err=True)
    programs = check.programs_of(table, generation, Settings(vmem_limit_bytes=vmem_limit))
    chosen = check.sample(list(programs), limit)
    verdicts = compile_all(
        chips.by_name(generation),
        chosen,
        named=False,
        jobs=jobs or cores(),
        timeout=timeout,
        start_progress=of_batch,
    )
    counts = Counter(verdict.status for verdict in verdicts.values())
    return counts, len(programs), list(check.compile_findings(table, generation, programs, verdicts))
