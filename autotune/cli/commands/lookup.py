"""`autotune lookup`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autotune.cli.completing import TABLES, names_or_files
from autotune.cli.key_options import KV_ALIASES
from autotune.cli.options import TARGET, NamedFolder, Seconds, Size, cores
from autotune.errors import UsageError
from autotune.io.folders import Folder
from autotune.kernel.problem import DEFAULT_MAX_NUM_SEQS, DTYPE_BITS, Problem, Settings, TableKey

if TYPE_CHECKING:
    from autotune.analysis.explain import Explanation
    from autotune.results.scores import Scoreboard
    from autotune.tables import Table

_COUNT = click.IntRange(1, 2**31 - 1)


@click.command(
    epilog="Example: autotune lookup --q-heads 28 --kv-heads 4 --head-dim 128 --page-size 16 "
    "--max-num-batched-tokens 2048 --max-model-len 4096 --target v6e --table jax"
)
@click.option("--q-heads", type=_COUNT, required=True, help="Query heads of the call, on one chip.")
@click.option("--kv-heads", type=_COUNT, required=True, help="KV heads of the call, on one chip.")
@click.option("--head-dim", type=_COUNT, default=128, show_default=True)
@click.option("--page-size", type=_COUNT, required=True, help="Tokens of a page.")
@click.option("--max-num-batched-tokens", type=_COUNT, required=True, help="Tokens of a batch.")
@click.option("--max-model-len", type=_COUNT, required=True, help="Tokens that one sequence can hold.")
@click.option(
    "--max-num-seqs",
    type=click.IntRange(1, 65536),
    default=DEFAULT_MAX_NUM_SEQS,
    show_default=True,
    help="Rows of the page table: the most sequences of a batch.",
)
@click.option(
    "--q-dtype", type=click.Choice(list(DTYPE_BITS)), metavar="DTYPE", default="bfloat16", show_default=True
)
@click.option(
    "--kv-dtype",
    type=click.Choice([*DTYPE_BITS, *KV_ALIASES]),
    metavar="DTYPE",
    default="bfloat16",
    show_default=True,
)
@click.option("--sliding-window", type=click.IntRange(1, 2**30), help="Static argument of the kernel.")
@click.option("--target", type=TARGET, help="TPU generation. [default: the attached TPU]")
@click.option(
    "--table",
    "tables",
    multiple=True,
    shell_complete=names_or_files(*TABLES),
    help="Look there: a file, jax, a generation or a results folder. Repeatable. "
    "[default: jax, and the committed table of the generation]",
)
@click.option(
    "--results",
    "folders",
    type=NamedFolder(),
    multiple=True,
    help="Rows that know the best pair. Repeatable. [default: the results folders among the tables, else "
    "those of the committed tables]",
)
@click.option(
    "--vmem-limit", type=Size(), help="vmem_limit_bytes of the kernel. [default: the compiler's own limit]"
)
@click.option(
    "--compile",
    "compiling",
    is_flag=True,
    help="Compile what neither rows nor the cache know, to say whether it fits and what it costs.",
)
@click.option(
    "--compile-timeout",
    type=Seconds(),
    default=300.0,
    show_default=True,
    help="Seconds that one compile may take.",
)
@click.option("--format", "form", type=click.Choice(("text", "json")), default="text", show_default=True)
def command(
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    max_num_seqs: int,
    q_dtype: str,
    kv_dtype: str,
    sliding_window: int | None,
    target: str | None,
    tables: tuple[str, ...],
    folders: tuple[Folder, ...],
    vmem_limit: int | None,
    compiling: bool,
    compile_timeout: float,
    form: str,
) -> None:
    """Explain what block sizes a call gets, and why.

    Prints the key that the call is looked up under, step by step; what each table says of it; what runs; and
    whether that fits and what it costs, as far as rows and the cache of compile results know. --compile finds
    out the rest, for the call's own shape: from a second to some minutes a pair.
    """
    from autotune.analysis import explain
    from autotune.cli.render import explain as explain_formats
    from autotune.keys.padding import head_dim_padding
    from autotune.tpu import generations

    if target is None:
        from autotune.tpu.attached import no_tpu

        raise no_tpu()
    problem = _problem(
        q_dtype=q_dtype,
        kv_dtype=KV_ALIASES.get(kv_dtype, kv_dtype),
        num_q_heads=q_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        max_num_batched_tokens=max_num_batched_tokens,
        pages_per_seq=-(-max_model_len // page_size),
        max_num_seqs=max_num_seqs,
    )
    _, key = explain.steps_of(problem, target)
    loaded, board = _known(target, tables, folders, key)
    settings = Settings(sliding_window=sliding_window, vmem_limit_bytes=vmem_limit)
    generation = generations.by_name(target)
    if beyond := generations.beyond_vmem(generation, vmem_limit):
        click.echo(beyond, err=True)
    explanation = explain.explain(problem, generation, loaded, settings, board)
    if padding := head_dim_padding(problem):
        click.echo(f"{padding}; what runs is told of that", err=True)
    padded = dataclasses.replace(problem, head_dim=explanation.key.head_dim)
    served = dataclasses.replace(explanation, problem=padded)
    stuck = _say_why_none(served)
    _fill_in(served, compile_timeout if compiling else None)
    if not stuck:
        _say_proven_limit(explanation)
    click.echo(explain_formats.render(explanation, form), nl=False)


def _problem(**values: Any) -> Problem:
    """The call; UsageError where there is none like it."""
    try:
        return Problem(**values)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _known(
    target: str, names: tuple[str, ...], folders: tuple[Folder, ...], key: TableKey
) -> tuple[list[Table], Scoreboard | None]:
    """The tables to look in, and what rows know of a key."""
    from autotune.results import scores
    from autotune.tables import load
    from autotune.tables.load import committed_path

    committed = [target] if committed_path(target).is_file() else []
    rows = list(folders) or [Path(name) for name in names if Path(name).is_dir()]
    board = scores.read(rows, key=key) if rows else scores.committed([target], key)
    return [load(name) for name in names or ("jax", *committed)], board


def _say_why_none(explanation: Explanation) -> bool:
    """Say why no pair whatever can run the call, with what could; whether that is so."""
    from autotune.keys import feasibility

    key, problem, generation = explanation.key, explanation.problem, explanation.generation
    block = dataclasses.replace(
        problem, num_q_heads=key.num_q_heads_per_blk, num_kv_heads=key.num_kv_heads_per_blk
    )
    why = feasibility.why_none(generation, block, explanation.settings)
    if why:
        ways = feasibility.ways(generation, key, explanation.settings, problem.max_num_seqs)
        click.echo(f"nothing can run on {generation}: {why}; type {ways}", err=True)
    return why is not None


def _say_proven_limit(explanation: Explanation) -> None:
    """Say with which --vmem-limit an entry that overflows was proven to compile."""
    from autotune.tpu.generations import MIB, vmem_limit

    now = vmem_limit(explanation.generation, explanation.settings.vmem_limit_bytes)
    for said in explanation.said:
        limit = said.table.provenance.get("vmem_limit_bytes")
        cost = explanation.costs.get(said.answer.blocks) if said.answer and said.row else None
        overflows = cost is not None and cost.verdict is not None and cost.verdict.status == "vmem_oom"
        if overflows and isinstance(limit, int) and limit > now:
            click.echo(
                f"the entry of {said.table.shown} was made for a VMEM limit of {limit / MIB:g} MiB: type "
                f"--vmem-limit {limit // MIB}MiB",
                err=True,
            )


def _fill_in(explanation: Explanation, timeout: float | None) -> None:
    """Fill in what the compiler says of the pairs: the cache, and with a timeout (seconds) a compile.

    Without a compiler, say so and leave them out.
    """
    from autotune.analysis import explain
    from autotune.cli.progress import of_batch
    from autotune.compile import batch
    from autotune.errors import MachineError
    from autotune.search import space

    generation = explanation.generation
    if overflow := space.page_table_overflow(generation, explanation.problem):
        for blocks in explanation.pairs():
            explanation.costs[blocks] = explain.cost(explanation, blocks, overflow)
        return
    programs = {explain.program(explanation, blocks): blocks for blocks in explanation.pairs()}
    try:
        verdicts = (
            batch.cached(generation, programs)
            if timeout is None
            else batch.compile_all(
                generation, programs, named=True, jobs=cores(), timeout=timeout, start_progress=of_batch
            )
        )
    except MachineError as error:
        click.echo(f"nothing was compiled: {error}", err=True)
        return
    for program, verdict in verdicts.items():
        blocks = programs[program]
        explanation.costs[blocks] = explain.cost(explanation, blocks, verdict)
