"""`autotune keys`."""

from __future__ import annotations

import csv
import io
import json

import click
from click.core import ParameterSource

from autotune.cli.key_options import KeyOptions, key_options
from autotune.cli.options import TARGET
from autotune.io.terminal import cell
from autotune.kernel.problem import DEFAULT_MAX_NUM_SEQS
from autotune.keys.files import FORMATS, render


@click.command(
    epilog="Example: autotune keys --model llama-3.1-8b --tp 1,8 --max-model-len 8192 --format json"
)
@key_options
@click.option(
    "--max-num-seqs",
    type=click.IntRange(1, 65536),
    default=DEFAULT_MAX_NUM_SEQS,
    show_default=True,
    help="The most sequences of a batch; long pages are recommended for many.",
)
@click.option(
    "--target",
    type=TARGET,
    help="TPU generation to say what layouts cost on, where heads do not tile.",
)
@click.option(
    "--compile/--no-compile",
    "compiling",
    default=True,
    help="With --target, compile one program of a layout of which no program was compiled before.",
)
@click.option("--format", "form", type=click.Choice(FORMATS), default="csv", show_default=True)
@click.option(
    "--list-models", is_flag=True, help="Print the built-in models, each with its source, and stop."
)
def command(
    chosen: KeyOptions, max_num_seqs: int, target: str | None, compiling: bool, form: str, list_models: bool
) -> None:
    """Print the keys that models, shapes and presets stand for, to be swept elsewhere with --keys.

    A model's heads are divided among --tp chips as serving stacks do it: query heads evenly, and KV heads
    too, or each on several chips where there are fewer of them. What a model's keys do not hold, such as a
    sliding window, and heads that are padded are told on standard error.
    """
    if list_models:
        given = click.get_current_context().get_parameter_source("form")
        click.echo(_models(None if given is ParameterSource.DEFAULT else form), nl=False)
        return
    selection = chosen.select(max_num_seqs)
    keys = selection.keys(target, compiling=compiling)
    if target:
        from autotune.tpu import generations

        if stuck := selection.no_room(list(keys), generations.by_name(target)):
            click.echo(f"{stuck[0]}; type {stuck[1]}", err=True)
    if form == "csv":
        keys = {key: str(cell(origin)) for key, origin in keys.items()}
    click.echo(render(keys, form), nl=False)


def _models(form: str | None) -> str:
    """The built-in models: as a table for a person, unless a format was asked for."""
    from autotune.keys.builtin_models import KNOWN

    if form is not None:
        records = [{"name": name, **line._asdict()} for name, line in KNOWN.items()]
        if form == "json":
            return json.dumps(records, indent=1) + "\n"
        text = io.StringIO()
        writer = csv.DictWriter(text, list(records[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({column: cell(value) for column, value in record.items()} for record in records)
        return text.getvalue()
    lines = [f"{'name':16}  q heads  kv heads  dim  longest  window      source"]
    for name, line in KNOWN.items():
        window = f"{line.window}{' (some)' if line.some else ''}" if line.window else ""
        lines.append(
            f"{name:16}  {line.num_q_heads:>7}  {line.num_kv_heads:>8}  {line.head_dim:>3}  "
            f"{line.max_model_len:>7}  {window:10}  {line.source}"
        )
    return "\n".join(lines) + "\n"
