"""The options of a sweep in groups: the kernel, the search, the compiles, the timings."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from autotune.cli.completing import WORKLOADS, names_or_files
from autotune.cli.options import Number, Numbers, Percent, Seconds, Size, grouped
from autotune.errors import UsageError
from autotune.kernel.problem import DEFAULT_MAX_NUM_SEQS, Settings, TableKey

if TYPE_CHECKING:
    from autotune.search.plan import Request
    from autotune.timing.devices import Limits
    from autotune.tpu.generations import Generation


def _is_file(name: str) -> bool:
    return name.endswith(".csv") or os.sep in name or Path(name).exists()


class KernelOptions(NamedTuple):
    """Static arguments of the kernel, and the rows of the page table."""

    vmem_limit: int | None
    sliding_window: int | None
    soft_cap: float | None
    k_scale: float | None
    v_scale: float | None
    max_num_seqs: int

    def settings(self) -> Settings:
        """Raises UsageError where a value is none that the kernel takes."""
        try:
            return Settings(
                sliding_window=self.sliding_window,
                soft_cap=self.soft_cap,
                k_scale=self.k_scale,
                v_scale=self.v_scale,
                vmem_limit_bytes=self.vmem_limit,
            )
        except ValueError as error:
            raise UsageError(str(error)) from None


class SearchOptions(NamedTuple):
    """Which candidates to try, on which batches."""

    kv_pages: tuple[int, ...] | None
    queries: tuple[int, ...] | None
    workloads: tuple[str, ...]
    seed: int
    exhaustive: bool
    retry_failed: bool

    def request(
        self, generation: Generation, keys: Iterable[TableKey], kernel: KernelOptions, settings: Settings
    ) -> Request:
        """Raises UsageError where a workload's file cannot be read."""
        from autotune.kernel import workload
        from autotune.search.plan import Request

        named = self.workloads or tuple(workload.GENERATORS)
        return Request(
            generation=generation,
            keys=tuple(keys),
            kv_pages=self.kv_pages,
            queries=self.queries,
            workloads=tuple(
                name if name in workload.GENERATORS or not _is_file(name) else workload.from_csv(name)
                for name in named
            ),
            settings=settings,
            max_num_seqs=kernel.max_num_seqs,
            seed=self.seed,
            retry_failed=self.retry_failed,
            exhaustive=self.exhaustive,
        )


class CompileOptions(NamedTuple):
    """How programs are compiled. jobs: None for all there are."""

    jobs: int | None
    compile_timeout: float
    cache: bool


class TimingOptions(NamedTuple):
    """How candidates are timed. interpret: on the CPU, as a check of the path."""

    interpret: bool
    measure_top: int | None
    precision: float
    max_seconds: float | None
    run_timeout: float

    def limits(self, exhaustive: bool, compile_timeout: float) -> Limits:
        from autotune.timing.devices import Limits
        from autotune.timing.statistics import StoppingRule

        most = self.max_seconds or (0.5 if self.interpret else 5.0)
        return Limits(
            rule=StoppingRule(self.precision, most),
            top=self.measure_top,
            exhaustive=exhaustive,
            run_timeout=self.run_timeout,
            compile_timeout=compile_timeout,
        )


kernel_options = grouped(
    "kernel",
    KernelOptions,
    click.option(
        "--vmem-limit",
        type=Size(),
        help="vmem_limit_bytes of the kernel. [default: the compiler's own limit]",
    ),
    click.option("--sliding-window", type=click.IntRange(1, 2**30), help="Static argument of the kernel."),
    click.option("--soft-cap", type=Number(), help="Static argument of the kernel."),
    click.option("--k-scale", type=Number(), help="Static argument of the kernel."),
    click.option("--v-scale", type=Number(), help="Static argument of the kernel."),
    click.option(
        "--max-num-seqs",
        type=click.IntRange(1, 65536),
        default=DEFAULT_MAX_NUM_SEQS,
        show_default=True,
        help="Rows of the page table: the most sequences of a batch.",
    ),
)
search_options = grouped(
    "search",
    SearchOptions,
    click.option(
        "--kv-pages",
        type=Numbers(),
        help="num_kv_pages_per_blk to try. [default: 128 to 2048 tokens, and on where the best is at an end]",
    ),
    click.option(
        "--queries",
        type=Numbers(),
        help="num_queries_per_blk to try. [default: 32,64,128,256, and on where the best is at an end]",
    ),
    click.option(
        "--workload",
        "workloads",
        multiple=True,
        metavar="NAME|FILE.csv",
        shell_complete=names_or_files(*WORKLOADS),
        help="Ragged batch to judge by: mixed, decode-heavy, prefill-heavy, or a CSV file of q_len,kv_len "
        "lines. Repeatable. [default: the three]",
    ),
    click.option(
        "--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the generated batches."
    ),
    click.option(
        "--exhaustive",
        is_flag=True,
        help="Compile every candidate, not only those that could win; on a TPU, time all that compile.",
    ),
    click.option(
        "--retry-failed",
        is_flag=True,
        help="Try again all that failed before, but for what overflows or the kernel refuses.",
    ),
)
compiling_options = grouped(
    "compiling",
    CompileOptions,
    click.option(
        "--jobs", type=click.IntRange(1, 1024), help="Compiles at once. [default: the cores, or Ray's CPUs]"
    ),
    click.option(
        "--compile-timeout",
        type=Seconds(),
        default=900.0,
        show_default=True,
        help="Seconds that one compile may take.",
    ),
    click.option(
        "--cache/--no-cache",
        default=True,
        help="Use the store of compile results that sweeps share (see autotune cache). [default: use it]",
    ),
)
timing_options = grouped(
    "timing",
    TimingOptions,
    click.option(
        "--interpret",
        is_flag=True,
        help="Run the kernel on the CPU, in an interpreter: shows that all works, times nothing. --target is "
        "the generation to compile and predict for, v6e by default.",
    ),
    click.option(
        "--measure-top",
        type=click.IntRange(min=1),
        metavar="N",
        help="Candidates of a key to time, those predicted to be the fastest; today's values always, and "
        "more where the clock disagrees with the prediction. [default: a quarter, at least 4]",
    ),
    click.option(
        "--precision",
        type=Percent(),
        default="1%",
        show_default=True,
        help="Time until the interval of the median is this close to it, on either side.",
    ),
    click.option(
        "--max-seconds",
        type=Seconds(),
        help="The most time for one candidate on one workload. [default: 5; 0.5 with --interpret]",
    ),
    click.option(
        "--run-timeout",
        type=Seconds(least=1),
        default=60.0,
        show_default=True,
        help="Seconds after which a run on the device counts as hanging.",
    ),
)
