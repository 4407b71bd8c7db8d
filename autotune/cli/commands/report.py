"""`autotune report`."""

from __future__ import annotations

from pathlib import Path

import click

from autotune.cli import output as output_file
from autotune.cli.options import NamedFolder
from autotune.io.folders import Folder
from autotune.io.terminal import shown, typed


@click.command(epilog="Example: autotune report results/v5e results/v6e -o report.html")
@click.argument("folders", type=NamedFolder(), nargs=-1, required=True, metavar="DIR...")
@click.option(
    "-o", "--output", type=output_file.OutputFile(), required=True, help="File to write; - for the screen."
)
@output_file.force_option
@click.option("--target", help="Only this TPU generation.")
def command(folders: tuple[Folder, ...], output: Path, force: bool, target: str | None) -> None:
    """Write a page about results folders: one HTML file, which opens offline in any browser.

    It has a heat map of latency over the two block sizes for each key and workload, with the winner, JAX's
    default and the published value; failures; what was predicted beside what was measured; what each
    generation's winners cost on the others; and where the rows come from. Several folders are read as one.

    Needs plotly: pip install 'tpu-autotune[report]'.
    """
    from autotune.analysis.report import data, page
    from autotune.io.terminal import counted
    from autotune.tpu import generations

    if target is not None:
        generations.by_name(target)
    output_file.require_replaceable(output, output_file.own_page, force)
    plotly = page.plotly_js()
    report = data.build(folders, target)
    output_file.write(output, page.render(report, plotly).encode(errors="backslashreplace"))
    if output == output_file.SCREEN:
        return
    sources = ", ".join(
        counted(sum(by_status.values()), f"{source} row")
        for source, by_status in report.provenance.counts.items()
    )
    click.echo(f"{shown(output)}: {counted(len(report.keys.entries), 'key')} ({sources})", err=True)
    click.echo(f"Next: open {typed(output)} in a browser", err=True)
