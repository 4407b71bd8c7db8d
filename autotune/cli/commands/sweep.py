"""`autotune sweep`."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from autotune.cli.executor_options import ExecutorOptions, executor_options
from autotune.cli.key_options import KeyOptions, key_options
from autotune.cli.options import TARGET, NamedFolder, Part
from autotune.cli.resumable import resumable
from autotune.cli.sweep_options import (
    CompileOptions,
    KernelOptions,
    SearchOptions,
    TimingOptions,
    compiling_options,
    kernel_options,
    search_options,
    timing_options,
)
from autotune.errors import UsageError
from autotune.io.folders import Folder
from autotune.io.terminal import counted, said_if_slow, say, shown

if TYPE_CHECKING:
    from autotune.compile.cache import Store
    from autotune.compile.pool import StartPool
    from autotune.executors.places import Executor
    from autotune.search.plan import Request
    from autotune.search.shard import Shard
    from autotune.sweep import Prepared, Summary
    from autotune.timing.devices import Devices


@click.command(
    epilog=(
        "Example: autotune sweep --target v6e --out results/llama --shape q_heads=32,kv_heads=8,"
        "head_dim=128,page_size=128,max_num_batched_tokens=2048,max_model_len=4096"
    )
)
@click.option(
    "--target",
    type=TARGET,
    help="TPU generation to compile for, none being needed. Without it: the attached TPU.",
)
@key_options
@search_options
@kernel_options
@executor_options
@compiling_options
@timing_options
@click.option(
    "--out",
    type=NamedFolder(),
    metavar="FOLDER",
    help="Results folder to add rows to: a path, s3://BUCKET/DIR or gs://BUCKET/DIR.",
)
@click.option(
    "--shard",
    type=Part(),
    help="Sweep only this part of the programs, as 2/3 on the second of three hosts with the same other "
    "options. Parts take about as long as one another, and no program is in two.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be swept, and stop.")
@click.option("-v", "--verbose", is_flag=True, help="Say of each failure what the compiler said, in full.")
@resumable
def command(
    target: str | None,
    chosen: KeyOptions,
    search: SearchOptions,
    kernel: KernelOptions,
    executor: ExecutorOptions,
    compiling: CompileOptions,
    timing: TimingOptions,
    out: Folder | None,
    shard: tuple[int, int] | None,
    dry_run: bool,
    verbose: bool,
) -> None:
    """Try block sizes on a TPU generation and record every result.

    Each candidate pair (num_kv_pages_per_blk, num_queries_per_blk) of each key becomes a row of parquet in
    the results folder, failures included. Stop it at any moment: the same command goes on where it was.

    With --target, libtpu's own compiler says what fits and a cost model over its schedule predicts the
    latency. These rows say `modelled`; nothing was timed.

    Without --target, the candidates that are predicted to be the fastest are timed on the attached TPU, or
    on those of the Ray cluster, and their outputs compared with the reference. These rows say `measured`.
    """
    measured = target is None and not timing.interpret
    _check(out, dry_run=dry_run, no_tpu=measured and not executor.ray)
    if target:
        _say_that_nothing_is_timed(target)
    selection = chosen.select(kernel.max_num_seqs)
    settings = kernel.settings()
    executor.check()

    # jax and pandas from here on.
    from autotune.cli.render.sweep import announcement
    from autotune.tpu import generations

    keys = selection.keys(target or ("v6e" if timing.interpret else None))
    # The TPU is asked for last: it takes seconds to start.
    place = click.get_current_context().with_resource(executor.opened())
    generation = place.tpu() if measured else generations.by_name(target or "v6e")
    if beyond := generations.beyond_vmem(generation, kernel.vmem_limit):
        say(beyond)
    request = search.request(generation, keys, kernel, settings)
    task = _task(request, out, compiling, shard, place, on_device=measured or timing.interpret)
    say(announcement(task.request, *task.prepared, task.jobs, task.part))
    if stuck := selection.no_room(task.request.keys, generation, settings):
        say(f"{stuck[0]}; type {stuck[1]}")
    if out is None or dry_run:
        return
    devices = None
    if measured or timing.interpret:
        limits = timing.limits(search.exhaustive, compiling.compile_timeout)
        devices = place.devices(generation, measured, limits)
    summary = _run(task, out, devices, compiling.compile_timeout, place.start_pool, verbose=verbose)
    _report(summary, task, out, devices, stuck[1] if stuck else None)


def _say_that_nothing_is_timed(target: str) -> None:
    """On a host with a TPU of the target, which a reader may take to be used."""
    from autotune.tpu import attached

    if target in attached.listed_generations() and attached.pci_chips():
        say(f"this host has a TPU {target}, and --target times nothing on it: leave --target out to time")


def _check(out: Folder | None, *, dry_run: bool, no_tpu: bool) -> None:
    """Refuse what can be told at once. no_tpu: a TPU of this machine is meant."""
    from autotune.tpu import attached, environment

    if no_tpu and not attached.pci_chips():
        raise attached.no_tpu()
    if out is None and not dry_run:
        raise UsageError("--out is missing: name a results folder, such as --out results/first")
    if isinstance(out, Path) and out.exists() and not out.is_dir():
        raise UsageError(f"--out {str(out)!r} is a file: name a folder")
    if said := environment.told(environment.of_the_user()):
        say(said)


@dataclasses.dataclass(frozen=True)
class _Task:
    """What a sweep is going to do. part: of it, this host's. jobs: compiles at once."""

    request: Request
    prepared: Prepared
    store: Store | None
    part: Shard | None
    jobs: int


def _task(
    request: Request,
    out: Folder | None,
    compiling: CompileOptions,
    shard: tuple[int, int] | None,
    place: Executor,
    *,
    on_device: bool,
) -> _Task:
    """on_device: a part is then one of the keys, not of the programs."""
    from autotune import sweep
    from autotune.compile.cache import Store, default_path
    from autotune.search import shard as shards

    part = shards.Shard(*shard) if shard else None
    if part and on_device:
        request = dataclasses.replace(request, keys=shards.keys(request, part))
    store = Store(default_path()) if compiling.cache else None
    with said_if_slow(f"planning {counted(len(request.keys), 'key')} ..."):
        prepared = sweep.prepare(request, out or Path(os.devnull), store, None if on_device else part)
    return _Task(request, prepared, store, part, compiling.jobs or place.jobs)


def _run(
    task: _Task,
    out: Folder,
    devices: Devices | None,
    timeout: float,
    start_pool: StartPool,
    *,
    verbose: bool,
) -> Summary:
    from autotune import sweep
    from autotune.cli.progress import CompileProgress
    from autotune.results import unfinished

    request, (plan, search) = task.request, task.prepared
    candidates = plan.candidates - plan.recorded
    progress = CompileProgress(search.outlook(), task.jobs, candidates=candidates, verbose=verbose)
    asked = dataclasses.replace(request, keys=(), retry_failed=False, exhaustive=False)
    asked_of = (asked, task.part) if task.part else asked
    with unfinished.noted(out, request.generation.name, request.keys, asked_of, sys.argv[1:]):
        return sweep.sweep(
            request,
            out,
            progress,
            prepared=task.prepared,
            store=task.store,
            devices=devices,
            jobs=task.jobs,
            timeout=timeout,
            start_pool=start_pool,
        )


def _report(summary: Summary, task: _Task, out: Folder, devices: Devices | None, room: str | None) -> None:
    """room: what to type where nothing whatever can fit a key."""
    from autotune.analysis import overview
    from autotune.cli import next_step
    from autotune.cli.render import overview as show_formats
    from autotune.cli.render.sweep import accounts, after_failures, at_the_ends, timings

    request, store = task.request, task.store
    if store and store.broken:
        where = f"{shown(store.path)} cannot be used ({store.broken})"
        say(f"compile results are not kept for other sweeps: {where}")
    for line in (
        *(timings(summary, devices.timing.source) if devices else ()),
        *accounts(summary, task.prepared.plan),
    ):
        say(line)
    seen = overview.overview(out, request.generation.name)
    click.echo(show_formats.render(seen, "text"), nl=False)
    for line in at_the_ends(request, {e.key: e.blocks for e in seen.lines if e.key in request.keys}):
        say(line)
    if devices and devices.timing.interpreted:
        click.echo("Interpreted rows are not timings: no table can be made from them")
    elif then := next_step.after_rows(seen, out):
        click.echo(f"Next: {then}")
    elif not seen.lines and room:
        click.echo(f"Next: the same with {room}")
    elif not seen.lines and (advice := after_failures(seen, request)):
        click.echo(f"Next: {advice}")
