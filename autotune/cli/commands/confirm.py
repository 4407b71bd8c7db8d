"""`autotune confirm`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from autotune.cli.options import NamedFolder, cores
from autotune.cli.resumable import resumable
from autotune.errors import MachineError, UsageError
from autotune.io.folders import Folder
from autotune.io.terminal import say

if TYPE_CHECKING:
    from autotune.analysis.confirm import Check
    from autotune.cli.progress import CompileProgress
    from autotune.search.plan import Plan
    from autotune.search.strategy import Search
    from autotune.tpu.attached import Attached
    from autotune.tpu.generations import Generation

EXIT_FAILED = 1
# Of the small programs of the smoke keys, none of which compiles for long.
COMPILE_TIMEOUT, RUN_TIMEOUT = 300.0, 60.0
UNDETECTED = "detection", "the TPU cannot be used"
PRECISION = 0.01  # a sweep's default
MAX_SECONDS, INTERPRETED_MAX_SECONDS = 5.0, 0.5  # alike


@click.command(epilog="Example: autotune confirm --interpret")
@click.option(
    "--interpret",
    is_flag=True,
    help="Run the kernel on the CPU, in an interpreter: shows that this command works, checks no TPU.",
)
@click.option(
    "--out",
    type=NamedFolder(),
    default="results/confirm",
    show_default=True,
    metavar="FOLDER",
    help="Folder for the rows: those of the two sweeps go into its folders first and second.",
)
@click.option("--format", "form", type=click.Choice(("text", "json")), default="text", show_default=True)
@click.option("--jobs", type=click.IntRange(1, 1024), help="Compiles at once. [default: the cores]")
def command(interpret: bool, out: Folder, form: str, jobs: int | None) -> None:
    """Check on a TPU what was never run on one, in about ten minutes.

    One line a check says ok, failed with what was seen, or not applicable:

    \b
    detection    the TPU is found
    chips        a process a chip, all of them at once
    executables  what one process compiles, another loads
    results      the kernel's output is the reference's
    profile      the kernel's events are found in a profile, and what one costs
    sweep        the smoke keys are timed
    clock        other processes time them alike, to 2%
    ranking      the cost model has the clock's order

    Paste the text into an issue, whatever it says. The rows are kept. Exit code 1 if a check failed, 3 if
    there is no TPU.
    """
    from autotune.tpu import attached

    if not interpret and not attached.pci_chips():
        raise MachineError(f"{attached.no_tpu()}; with --interpret the CPU stands in for it")
    if isinstance(out, Path) and out.exists() and not out.is_dir():
        raise UsageError(f"--out {str(out)!r} is a file: name a folder")
    # The folder of the first sweep, as it is the one that tells whether anything is recorded.
    _confirm(out=out / "first", folder=out, interpret=interpret, form=form, jobs=jobs or cores())


@resumable
def _confirm(out: Folder, folder: Folder, interpret: bool, form: str, jobs: int) -> None:
    from autotune.tpu import environment

    if said := environment.told(environment.of_the_user()):
        say(said)

    # jax and pandas from here on.
    from autotune.analysis import confirm
    from autotune.cli.render import confirm as confirm_formats
    from autotune.compile.batch import require_compiler
    from autotune.tpu import attached, generations

    require_compiler()
    found: Attached | None = None
    if interpret:
        seen = "the CPU, in an interpreter, stands in for a v6e"
        detected = confirm.Check("detection", confirm.NOT_APPLICABLE, seen)
    else:
        say("starting the TPU ...")
        detected, found = confirm.detection(attached.attached)
    generation = generations.V6E if interpret else found.generation if found else None
    device_kind = "cpu" if interpret else found.device_kind if found else None
    head = confirm.head(interpret, generation, device_kind)
    checks = [detected]
    if form == "text":
        click.echo(confirm_formats.head(head))
        click.echo(confirm_formats.line(detected))
    for check in _further(generation, found, folder, jobs) if generation else confirm.skipped(*UNDETECTED):
        checks.append(check)
        if form == "text":
            click.echo(confirm_formats.line(check))
    code = EXIT_FAILED if any(check.state == confirm.FAILED for check in checks) else 0
    if form == "json":
        click.echo(confirm_formats.as_json(head, checks, code))
    else:
        click.echo(confirm_formats.end(head, checks))
    if code:
        raise click.exceptions.Exit(code)


def _further(generation: Generation, found: Attached | None, folder: Folder, jobs: int) -> Iterator[Check]:
    """All checks but detection; found: None for the interpreter."""
    from autotune.analysis import confirm
    from autotune.cli.progress import CompileProgress
    from autotune.compile.cache import Store, default_path
    from autotune.timing.devices import Limits, of_this_host
    from autotune.timing.statistics import StoppingRule

    def progress(plan: Plan, search: Search) -> CompileProgress:
        return CompileProgress(search.outlook(), jobs, candidates=plan.candidates - plan.recorded)

    study = confirm.Study(
        request=confirm.request(generation, interpreted=found is None),
        folder=folder,
        store=Store(default_path()),
        jobs=jobs,
        timeout=COMPILE_TIMEOUT,
        progress=progress,
    )
    limits = Limits(
        rule=StoppingRule(PRECISION, MAX_SECONDS if found else INTERPRETED_MAX_SECONDS),
        top=None,
        exhaustive=False,
        run_timeout=RUN_TIMEOUT,
        compile_timeout=COMPILE_TIMEOUT,
    )
    minutes = "ten minutes" if found else "a minute"
    say(f"about {minutes}, less where some is recorded already")
    yield from confirm.examine(study, lambda: of_this_host(found, limits))
