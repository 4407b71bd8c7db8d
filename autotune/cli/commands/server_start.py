"""`autotune check --kernel`: whether a server's attention compiles, before the server is started."""

from __future__ import annotations

import dataclasses
import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from autotune.cli.completing import names_or_files
from autotune.cli.key_options import KV_ALIASES
from autotune.cli.options import NamedPath, cores, grouped
from autotune.errors import EXIT_DIFFERENT, UsageError
from autotune.kernel.problem import DEFAULT_MAX_NUM_SEQS, DTYPE_BITS, Problem, Settings

if TYPE_CHECKING:
    from autotune.kernel.rpa_v3.blocks import Blocks
    from autotune.keys.models import Attention, Model

KERNELS = ("tpu-inference-v3",)
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
        "--tp", type=_COUNT, default=1, show_default=True, help="Chips that the --model is divided among."
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
    from autotune.kernel.rpa_v3 import blocks, source
    from autotune.keys import builtin_models
    from autotune.tpu import generations

    if typed.kernel is None and typed.model is None:
        raise UsageError("nothing is named: name a TABLE, such as jax, or a server by --kernel and --model")
    if typed.kernel is None or typed.model is None:
        missing = "--model" if typed.kernel else "--kernel"
        raise UsageError(
            f"{missing} is missing: a server is checked with both, such as --kernel {KERNELS[0]}"
        )
    if target is None:
        raise UsageError("--target is missing: name the generation that the server runs on, such as v7x")
    generation = generations.by_name(target)
    generations.beyond_vmem(generation, vmem_limit)
    given = blocks.from_environment(os.environ)
    model = builtin_models.find(typed.model)
    problems = [(attention, _problem(model, attention, typed)) for attention in model.attentions]
    folder = source.find(typed.kernel_source)
    require_compiler()
    failing = False
    for attention, problem in problems:
        settings = Settings(sliding_window=attention.window, vmem_limit_bytes=vmem_limit)
        server = server_start.Server(
            generation=generation, problem=problem, settings=settings, given=given, folder=folder
        )
        click.echo(render.heading(model, attention, server))
        cases = server_start.check(server, jobs or cores(), timeout, functools.partial(_say, problem))
        click.echo(render.cases(server, cases), nl=False)
        failing |= not all(case.starts for case in cases)
    if failing:
        raise click.exceptions.Exit(EXIT_DIFFERENT)


def _say(problem: Problem, case: str, blocks: Blocks | None) -> None:
    """One line a compile, with its time: 2 to 6 s with 4 query heads on a chip, 15 to 25 s with 16, 20 to
    150 s with 32 (two cores, jax 0.10.2, libtpu 0.0.42.1)."""
    what = str(blocks) if blocks else "the kernel's default"
    least, most = (round(factor * problem.num_q_heads) for factor in (0.6, 5))
    click.echo(f"compiling {case} with {what}: {least} to {most} s", err=True)


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
