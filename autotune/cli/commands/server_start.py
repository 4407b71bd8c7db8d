"""`autotune check --kernel`: whether a server's attention compiles, before the server is started."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click
from click.core import ParameterSource

from autotune.cli.completing import names_or_files
from autotune.cli.key_options import KV_ALIASES
from autotune.cli.options import NamedPath, cores, grouped
from autotune.errors import EXIT_DIFFERENT, UsageError
from autotune.kernel.problem import DEFAULT_MAX_NUM_SEQS, DTYPE_BITS, Problem, Settings

if TYPE_CHECKING:
    from autotune.analysis.server_start import Server
    from autotune.kernel.rpa_v3.blocks import Blocks
    from autotune.keys.models import Attention, Model

KERNELS = ("tpu-inference-v3",)
# Parameters of `check` that are about tables, and what is typed for them.
_OF_TABLES = {
    "lookup": "--lookup",
    "compiling": "--compile",
    "limit": "--limit",
    "slower_than": "--slower-than",
    "folders": "--results",
    "form": "--format",
    "show_all": "--all",
}
_COUNT = click.IntRange(1, 2**31 - 1)


class ServerOptions(NamedTuple):
    """What was typed of these options; the names are those of the parameters."""

    kernel: str | None
    kernel_source: Path | None
    model: str | None
    tp: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int | None
    page_size: int | None
    kv_dtype: str | None


server_options = grouped(
    "server",
    ServerOptions,
    click.option(
        "--kernel",
        type=click.Choice(KERNELS),
        help="In place of TABLE: check what this kernel of a server would run for --model.",
    ),
    click.option(
        "--kernel-source",
        type=NamedPath(),
        metavar="FOLDER",
        help="Checkout or unpacked wheel that holds the kernel; its code is run. [default: the "
        "installed one]",
    ),
    click.option(
        "--model",
        metavar="CONFIG.JSON|NAME",
        shell_complete=names_or_files(),
        help="The --kernel's model: its config.json, or a name of `autotune keys --list-models`.",
    ),
    click.option(
        "--tp", type=_COUNT, default=1, show_default=True, help="The server's --tensor-parallel-size."
    ),
    click.option(
        "--max-num-batched-tokens",
        type=_COUNT,
        default=2048,
        show_default=True,
        help="The server's option: its largest batch.",
    ),
    click.option(
        "--max-num-seqs",
        type=click.IntRange(1, 65536),
        default=DEFAULT_MAX_NUM_SEQS,
        show_default=True,
        help="The server's option: the most sequences of a batch.",
    ),
    click.option("--max-model-len", type=_COUNT, help="The server's option. [default: the model's longest]"),
    click.option(
        "--page-size", type=_COUNT, help="The server's --block-size. [default: what vLLM takes on TPUs]"
    ),
    click.option(
        "--kv-dtype",
        type=click.Choice([*DTYPE_BITS, *KV_ALIASES]),
        metavar="DTYPE",
        help="Dtype of the KV cache, such as fp8. [default: the model's]",
    ),
)


def run(
    typed: ServerOptions, target: str | None, vmem_limit: int | None, jobs: int | None, timeout: float
) -> None:
    """Prints what each kind of the model's layers would run; exits with 1 if something would not start."""
    from autotune.analysis import server_start
    from autotune.cli.render import server_start as render
    from autotune.compile.batch import require_compiler
    from autotune.compile.local_pool import CompilePool
    from autotune.keys import builtin_models

    if typed.model is None:
        raise UsageError(
            f"--model is missing: a server is checked with it and --kernel, such as --kernel {KERNELS[0]}"
            if typed.kernel
            else "nothing is named: name a TABLE, such as jax, or a server by --kernel and --model"
        )
    if typed.kernel is None:
        raise UsageError(f"--kernel is missing: a server is checked with both, such as --kernel {KERNELS[0]}")
    context = click.get_current_context()
    for name, option in _OF_TABLES.items():
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            raise UsageError(f"{option} is for a TABLE, and --kernel checks a server: leave out one of them")
    model = builtin_models.find(typed.model)
    servers = _servers(model, typed, target, vmem_limit)
    require_compiler()
    with CompilePool(jobs or cores(), timeout) as pool:
        kinds = [(server, server_start.check(pool, server, _say)) for server in servers]
        fitting = server_start.that_fit(pool, kinds, _say)
    click.echo(render.text(model.name, kinds, fitting), nl=False)
    if not all(case.starts for _, cases in kinds for case in cases):
        raise click.exceptions.Exit(EXIT_DIFFERENT)


def _servers(model: Model, typed: ServerOptions, target: str | None, vmem_limit: int | None) -> list[Server]:
    """What is asked about each kind of a model's layers.

    Raises:
      UsageError: what is typed, or the environment, is no server that runs this kernel.
      MachineError: the kernel's source is not here.
    """
    from autotune.analysis.server_start import Server
    from autotune.kernel.rpa_v3 import blocks, source
    from autotune.tpu import generations

    if target is None:
        raise UsageError("--target is missing: name the generation that the server runs on, such as v7x")
    if os.environ.get(blocks.BATCHED, "").lower() in ("1", "true"):
        raise UsageError(
            f"{blocks.BATCHED} is set, and with it the server runs another kernel, batched RPA, which cannot "
            f"be checked yet: `unset {blocks.BATCHED}` to check {KERNELS[0]}"
        )
    generation = generations.by_name(target)
    generations.beyond_vmem(generation, vmem_limit)
    given = blocks.from_environment(os.environ)
    problems = [_problem(model, attention, typed) for attention in model.attentions]
    folder = source.find(typed.kernel_source)
    return [
        Server(
            layers=layers,
            generation=generation,
            problem=problem,
            settings=Settings(
                sliding_window=window, soft_cap=attention.soft_cap, vmem_limit_bytes=vmem_limit
            ),
            given=given,
            folder=folder,
        )
        for attention, problem in zip(model.attentions, problems, strict=True)
        for layers, window in _windows(attention)
    ]


def _windows(attention: Attention) -> list[tuple[str, int | None]]:
    """The kinds of layers with these heads, by name, and the window of each."""
    if attention.some_window:
        return [("full-attention layers", None), ("windowed layers", attention.some_window)]
    return [(attention.layers, attention.window)]


def _say(server: Server, case: str, blocks: Blocks | None) -> None:
    """One line a compile, with its time: 2 to 6 s with 4 query heads on a chip, 15 to 25 s with 16, 20 to
    150 s with 32 (two cores, jax 0.10.2, libtpu 0.0.42.1)."""
    what = str(blocks) if blocks else "the kernel's default"
    least, most = (round(factor * server.problem.num_q_heads) for factor in (0.6, 5))
    layers = f" of {server.layers}" if server.layers else ""
    click.echo(f"compiling {case}{layers} with {what}: {least} to {most} s on idle cores", err=True)


def _problem(model: Model, attention: Attention, typed: ServerOptions) -> Problem:
    """The largest call of these layers: smaller batches never get larger block sizes.

    Raises:
      UsageError: the model cannot be divided so, names no length, or has heads of 64, which this kernel does
        not take.
    """
    from autotune.keys.resolve import Serving, of_model

    serving = Serving(
        tps=(typed.tp,),
        tokens=(typed.max_num_batched_tokens,),
        lengths=(typed.max_model_len,) if typed.max_model_len else None,
        page_sizes=(typed.page_size,) if typed.page_size else None,
        kv_dtype=KV_ALIASES.get(typed.kv_dtype or "", typed.kv_dtype),
        max_num_seqs=typed.max_num_seqs,
    )
    (asked,) = of_model(dataclasses.replace(model, attentions=(attention,)), serving)
    if attention.head_dim == 64:
        raise UsageError(
            f"{model.name} has head_dim 64, for which tpu-inference runs another kernel (v3 hd64): this one "
            "cannot be checked yet"
        )
    return asked.problem
