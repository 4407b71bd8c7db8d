"""`autotune sweep`."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from autotune.cli.completing import WORKLOADS, names_or_files
from autotune.cli.executor_options import ExecutorOptions, executor_options
from autotune.cli.key_options import KeyOptions, key_options
from autotune.cli.options import TARGET, NamedFolder, Number, Numbers, Part, Percent, Seconds, Size
from autotune.cli.resumable import resumable
from autotune.errors import UsageError
from autotune.io.folders import Folder
from autotune.io.terminal import printable, say, shown
from autotune.kernel.problem import DEFAULT_MAX_NUM_SEQS, Settings

if TYPE_CHECKING:
    from autotune.analysis.overview import Overview
    from autotune.compile.cache import Store
    from autotune.compile.pool import StartPool
    from autotune.search.plan import Plan, Request
    from autotune.search.shard import Shard
    from autotune.search.strategy import Search
    from autotune.sweep import Summary
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
@click.option("--kv-pages", type=Numbers(), help="num_kv_pages_per_blk to try. [default: by page size]")
@click.option("--queries", type=Numbers(), help="num_queries_per_blk to try. [default: 32,64,128,256]")
@click.option(
    "--workload",
    "workloads",
    multiple=True,
    metavar="NAME|FILE.csv",
    shell_complete=names_or_files(*WORKLOADS),
    help="Ragged batch to judge by: mixed, decode-heavy, prefill-heavy, or a CSV file of q_len,kv_len lines. "
    "Repeatable. [default: the three]",
)
@click.option(
    "--vmem-limit", type=Size(), help="vmem_limit_bytes of the kernel. [default: the compiler's own limit]"
)
@click.option("--sliding-window", type=click.IntRange(1, 2**30), help="Static argument of the kernel.")
@click.option("--soft-cap", type=Number(), help="Static argument of the kernel.")
@click.option("--k-scale", type=Number(), help="Static argument of the kernel.")
@click.option("--v-scale", type=Number(), help="Static argument of the kernel.")
@click.option(
    "--max-num-seqs",
    type=click.IntRange(1, 65536),
    default=DEFAULT_MAX_NUM_SEQS,
    show_default=True,
    help="Rows of the page table: the most sequences of a batch.",
)
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the generated batches."
)
@executor_options
@click.option(
    "--jobs", type=click.IntRange(1, 1024), help="Compiles at once. [default: the cores, or Ray's CPUs]"
)
@click.option(
    "--compile-timeout",
    type=Seconds(),
    default=900.0,
    show_default=True,
    help="Seconds that one compile may take.",
)
@click.option(
    "--exhaustive",
    is_flag=True,
    help="Compile every candidate, not only those that could win; on a TPU, time all that compile.",
)
@click.option("--retry-failed", is_flag=True, help="Try again what timed out or crashed before.")
@click.option(
    "--cache/--no-cache",
    default=True,
    help="Use the store of compile results that sweeps share (see autotune cache). [default: use it]",
)
@click.option(
    "--interpret",
    is_flag=True,
    help="Run the kernel on the CPU, in an interpreter: shows that all works, times nothing. --target is the "
    "generation to compile and predict for, v6e by default.",
)
@click.option(
    "--measure-top",
    type=click.IntRange(min=1),
    metavar="N",
    help="Candidates of a key to time, those predicted to be the fastest; today's values always, and more "
    "where the clock disagrees with the prediction. [default: a quarter, at least 4]",
)
@click.option(
    "--precision",
    type=Percent(),
    default="1%",
    show_default=True,
    help="Time until the interval of the median is this close to it, on either side.",
)
@click.option(
    "--max-seconds",
    type=Seconds(),
    help="The most time for one candidate on one workload. [default: 5; 0.5 with --interpret]",
)
@click.option(
    "--run-timeout",
    type=Seconds(least=1),
    default=60.0,
    show_default=True,
    help="Seconds after which a run on the device counts as hanging.",
)
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
    kv_pages: tuple[int, ...] | None,
    queries: tuple[int, ...] | None,
    workloads: tuple[str, ...],
    vmem_limit: int | None,
    sliding_window: int | None,
    soft_cap: float | None,
    k_scale: float | None,
    v_scale: float | None,
    max_num_seqs: int,
    seed: int,
    executor: ExecutorOptions,
    jobs: int | None,
    compile_timeout: float,
    exhaustive: bool,
    retry_failed: bool,
    cache: bool,
    interpret: bool,
    measure_top: int | None,
    precision: float,
    max_seconds: float | None,
    run_timeout: float,
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
    from autotune.tpu import attached, environment

    measured = target is None and not interpret
    if measured and not executor.ray and not attached.pci_chips():
        raise attached.no_tpu()
    selection = chosen.select(max_num_seqs)
    if out is None and not dry_run:
        raise UsageError("--out is missing: name a results folder, such as --out results/first")
    if isinstance(out, Path) and out.exists() and not out.is_dir():
        raise UsageError(f"--out {str(out)!r} is a file: name a folder")
    try:
        settings = Settings(
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            k_scale=k_scale,
            v_scale=v_scale,
            vmem_limit_bytes=vmem_limit,
        )
    except ValueError as error:
        raise UsageError(str(error)) from None
    executor.check()
    if said := environment.told(environment.of_the_user()):
        say(said)

    # jax and pandas from here on.
    from autotune import sweep
    from autotune.compile.cache import Store, default_path
    from autotune.io.terminal import said_if_slow
    from autotune.kernel import workload
    from autotune.search.plan import Request
    from autotune.search.shard import Shard
    from autotune.search.shard import keys as keys_of_shard
    from autotune.tpu import generations

    keys = selection.keys(target or ("v6e" if interpret else None))
    # The TPU is asked for last: it takes seconds to start.
    place = click.get_current_context().with_resource(executor.opened())
    generation = place.tpu() if measured else generations.by_name(target or "v6e")
    if beyond := generations.beyond_vmem(generation, vmem_limit):
        say(beyond)
    named = workloads or tuple(workload.GENERATORS)
    request = Request(
        generation=generation,
        keys=tuple(keys),
        kv_pages=kv_pages,
        queries=queries,
        workloads=tuple(
            n if n in workload.GENERATORS or not _is_file(n) else workload.from_csv(n) for n in named
        ),
        settings=settings,
        max_num_seqs=max_num_seqs,
        seed=seed,
        retry_failed=retry_failed,
        exhaustive=exhaustive,
    )
    store = Store(default_path()) if cache else None
    part = Shard(*shard) if shard else None
    if part and (measured or interpret):
        request = dataclasses.replace(request, keys=keys_of_shard(request, part))
    with said_if_slow(f"planning {_count(len(request.keys), 'key')} ..."):
        of_programs = None if measured or interpret else part
        prepared = sweep.prepare(request, out or Path(os.devnull), store, of_programs)
    plan, search = prepared
    cores = jobs or place.jobs
    _announce(request, plan, search, cores, part)
    if stuck := selection.no_room(request.keys, generation, settings):
        say(f"{stuck[0]}; type {stuck[1]}")
    if dry_run:
        return
    assert out is not None
    devices = None
    if measured or interpret:
        from autotune.timing.devices import Limits
        from autotune.timing.statistics import StoppingRule

        limits = Limits(
            rule=StoppingRule(precision, max_seconds or (0.5 if interpret else 5.0)),
            top=measure_top,
            exhaustive=exhaustive,
            run_timeout=run_timeout,
            compile_timeout=compile_timeout,
        )
        devices = place.devices(generation, measured, limits)
    summary = _run(
        request, plan, search, store, out, cores, compile_timeout, devices, verbose, place.start_pool, part
    )
    if store and store.broken:
        where = f"{shown(store.path)} cannot be used ({store.broken})"
        say(f"compile results are not kept for other sweeps: {where}")
    _report(summary, plan, request, out, devices, stuck[1] if stuck else None)


def _is_file(name: str) -> bool:
    return name.endswith(".csv") or os.sep in name or Path(name).exists()


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _announce(request: Request, plan: Plan, search: Search, jobs: int, part: Shard | None) -> None:
    from autotune.cli.eta import seconds_left
    from autotune.cli.progress import duration

    parts = [f"{_count(len(plan.incumbents), 'key')}, {_count(plan.candidates, 'candidate')}"]
    if plan.recorded:
        parts.append(f"{plan.recorded} recorded before")
    if plan.reused:
        parts.append(f"{plan.reused} known from compiles of the same program")
    if plan.ruled_out:
        parts.append(f"{plan.ruled_out} ruled out without a compile")
    programs = _count(len(plan.waiting), "program")
    outlook = search.outlook()
    if outlook.programs < len(plan.waiting):  # the others cannot win, or will probably turn out not to
        programs = f"about {outlook.programs} of {programs}" if outlook.programs else f"none of {programs}"
    parts.append(f"{programs} to compile for {request.generation}")
    if outlook.programs:
        parts.append(f"about {duration(seconds_left(0.0, 0.0, outlook.seconds, jobs))} with --jobs {jobs}")
    say((f"shard {part}: " if part else "") + "; ".join(parts))


def _run(
    request: Request,
    plan: Plan,
    search: Search,
    store: Store | None,
    out: Folder,
    jobs: int,
    timeout: float,
    devices: Devices | None,
    verbose: bool,
    start_pool: StartPool,
    part: Shard | None,
) -> Summary:
    from autotune import sweep
    from autotune.cli.progress import CompileProgress
    from autotune.results import unfinished

    candidates = plan.candidates - plan.recorded
    progress = CompileProgress(search.outlook(), jobs, candidates=candidates, verbose=verbose)
    asked = dataclasses.replace(request, keys=(), retry_failed=False, exhaustive=False)
    asked_of = (asked, part) if part else asked
    with unfinished.noted(out, request.generation.name, request.keys, asked_of, sys.argv[1:]):
        return sweep.sweep(
            request,
            out,
            progress,
            prepared=sweep.Prepared(plan, search),
            store=store,
            devices=devices,
            jobs=jobs,
            timeout=timeout,
            start_pool=start_pool,
        )


def _report(
    summary: Summary, plan: Plan, request: Request, out: Folder, devices: Devices | None, room: str | None
) -> None:
    """room: what to type where nothing whatever can fit a key."""
    from autotune.analysis import overview
    from autotune.cli import next_step
    from autotune.cli.render import overview as show_formats
    from autotune.sweep import accounts, at_the_ends

    if devices:
        counts = ", ".join(f"{count} {status}" for status, count in summary.timings.most_common()) or "none"
        clocks = f"; by {' and '.join(summary.clocks)}" if summary.clocks else ""
        click.echo(
            f"newly {devices.timing.source} (a candidate on a workload each): {counts}{clocks}", err=True
        )
        if summary.compiled_here:
            why = f" ({printable(summary.refused)})" if summary.refused else ""
            say(
                f"{summary.compiled_here} of them with an executable that the device compiled itself, as the "
                f"one compiled ahead did not load{why}"
            )
    for line in accounts(summary, plan):
        say(line)
    seen = overview.overview(out, request.generation.name)
    click.echo(show_formats.render(seen, "text"), nl=False)
    mine = [line for line in seen.lines if line.key in request.keys]
    for line in at_the_ends(request, {line.key: line.blocks for line in mine}):
        say(line)
    if devices and devices.timing.interpreted:
        click.echo("No table can be made of this: interpreted rows test the path, and time nothing")
    elif then := next_step.after_rows(seen, out):
        click.echo(f"Next: {then}")
    elif not seen.lines and room:
        click.echo(f"Next: the same with {room}")
    elif not seen.lines and (advice := _after_failures(seen, request)):
        click.echo(f"Next: {advice}")


def _after_failures(seen: Overview, request: Request) -> str | None:
    """What to try where no candidate is ok, by what fails most; None where nothing is known to help."""
    from collections import Counter

    from autotune.tpu.generations import MIB, hardware, vmem_limit

    counts = sum((Counter(by_status) for by_status in seen.statuses.values()), Counter[str]())
    if counts["compile_error"]:
        of = f"{counts['compile_error']} of {_count(counts.total(), 'candidate')}"
        return (
            f"other heads or pages: the compiler refuses {of}, and another --vmem-limit changes nothing of "
            "that (-v says why, in full)"
        )
    if counts["smem_oom"] > counts["vmem_oom"]:
        return "a larger page size, a shorter --max-model-len or a smaller --max-num-seqs"
    if not counts["vmem_oom"]:
        return None
    most = hardware(request.generation).vmem_bytes
    limited = vmem_limit(request.generation, request.settings.vmem_limit_bytes) < most
    larger = f", or a larger --vmem-limit, up to {most // MIB}MiB" if limited else ""
    return f"try smaller --kv-pages and --queries{larger}"
