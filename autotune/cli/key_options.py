"""The options that say which keys are meant, for every command that takes keys."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from autotune.cli.completing import names_or_files
from autotune.cli.options import Numbers, cores, parse_shape
from autotune.errors import MachineError, UsageError
from autotune.kernel.problem import DTYPE_BITS, NO_SETTINGS, Problem, Program, Settings, TableKey

if TYPE_CHECKING:
    from autotune.keys.models import Model
    from autotune.keys.resolve import Asked, Entry, Serving
    from autotune.tpu.compiler import Compiled
    from autotune.tpu.generations import Generation

PRESETS = ("smoke", "published", "serving", "long")
# vLLM's names on TPUs (TPU_STR_DTYPE_TO_TORCH_DTYPE in tpu_inference/layers/vllm/backends/flash_attn.py), and
# the kernel's own.
KV_ALIASES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
_LISTED = 60  # lines of the listing before a sweep
COMPILE_TIMEOUT = 300.0  # seconds


def _complete_model(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from autotune.keys.builtin_models import KNOWN

    return names_or_files(*KNOWN)(ctx, param, incomplete)


_OPTIONS = (
    click.option("--preset", type=click.Choice(PRESETS), help="A named set of keys."),
    click.option(
        "--shape",
        "shapes",
        multiple=True,
        metavar="NAME=VALUE,...",
        help="A call's shape: q_heads, kv_heads, head_dim, page_size, max_num_batched_tokens, max_model_len, "
        "and if not bfloat16, q_dtype and kv_dtype. Stands for the key that JAX looks it up by. Repeatable.",
    ),
    click.option(
        "--model",
        "models",
        multiple=True,
        metavar="CONFIG.JSON|NAME",
        shell_complete=_complete_model,
        help="A model as it is served: its Hugging Face config.json, the folder of it, or a built-in name "
        "such as llama-3.1-8b (autotune keys --list-models). Repeatable.",
    ),
    click.option(
        "--tp",
        type=Numbers(),
        help="Chips that a --model's heads are divided among; of several numbers, those that cannot be are "
        "skipped. [default: 1]",
    ),
    click.option(
        "--max-num-batched-tokens",
        "tokens",
        type=Numbers(),
        help="Tokens of a batch of a --model; name all sizes that the stack pads batches to. [default: those "
        "of vLLM on TPUs, 16,32,64,128,256,512,1024,2048]",
    ),
    click.option(
        "--max-model-len",
        "lengths",
        type=Numbers(),
        help="Tokens that one sequence of a --model can hold. [default: its own longest]",
    ),
    click.option(
        "--page-size",
        "page_sizes",
        type=Numbers(),
        help="Tokens of a page for a --model. [default: what vLLM takes on TPUs for the length]",
    ),
    click.option(
        "--dtype", type=click.Choice(["bfloat16", "float32"]), help="A --model's dtype. [default: its own]"
    ),
    click.option(
        "--kv-dtype",
        type=click.Choice([*DTYPE_BITS, *KV_ALIASES]),
        metavar="DTYPE",  # the choices would be a line of 100 columns
        help="Dtype of a --model's KV cache, such as fp8 (float8_e4m3fn) or int8. [default: the model's]",
    ),
    click.option(
        "--keys",
        "files",
        multiple=True,
        metavar="FILE",
        help="Keys that `autotune keys` wrote, csv or json; - for standard input. Repeatable.",
    ),
    click.option(
        "--pad-heads",
        is_flag=True,
        help="Where heads do not tile, take the nearest layout that does, and say what serving must do.",
    ),
)


@dataclasses.dataclass(frozen=True)
class KeyOptions:
    """What was typed of these options; the names are those of the parameters."""

    preset: str | None
    shapes: tuple[str, ...]
    models: tuple[str, ...]
    tp: tuple[int, ...] | None
    tokens: tuple[int, ...] | None
    lengths: tuple[int, ...] | None
    page_sizes: tuple[int, ...] | None
    dtype: str | None
    kv_dtype: str | None
    files: tuple[str, ...]
    pad_heads: bool

    def select(self, max_num_seqs: int) -> Selection:
        """What was typed, with its files read and parsed; jax is not needed for that.

        Raises:
          UsageError: nothing was typed, or something that no call can have.
        """
        from autotune.keys import builtin_models
        from autotune.keys import files as key_files

        if not (self.preset or self.shapes or self.models or self.files):
            raise UsageError(
                "no keys are named: give --preset smoke, --preset published, a --model, a --shape or --keys"
            )
        serving = {
            "--tp": self.tp,
            "--max-num-batched-tokens": self.tokens,
            "--max-model-len": self.lengths,
            "--page-size": self.page_sizes,
            "--dtype": self.dtype,
            "--kv-dtype": self.kv_dtype,
        }
        if not self.models and (given := [name for name, value in serving.items() if value]):
            raise UsageError(f"{given[0]} needs a --model: a --shape already holds it")
        return Selection(
            chosen=self,
            max_num_seqs=max_num_seqs,
            problems=tuple(parse_shape(text, max_num_seqs) for text in self.shapes),
            models=tuple(builtin_models.find(text) for text in dict.fromkeys(self.models)),
            read=tuple(itertools.chain.from_iterable(map(key_files.read, self.files))),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection:
    """Keys that are meant: what was typed, with its shapes, models and files as values."""

    chosen: KeyOptions
    max_num_seqs: int
    problems: tuple[Problem, ...]
    models: tuple[Model, ...]
    read: tuple[tuple[TableKey, str, str], ...]

    def keys(self, target: str | None, *, compiling: bool = False) -> dict[TableKey, str]:
        """The canonical keys, each once, with its origin; says on stderr what stands for what.

        target: a generation, of which earlier compiles may know what a layout costs where heads do not tile.
        compiling: compile one program of a layout of which nothing is known.

        Raises:
          UsageError: the kernel does not tile the heads of a shape or model, or no call has a key.
        """
        from autotune.compile.cache import Store, default_path
        from autotune.keys import presets
        from autotune.keys import resolve as keyset
        from autotune.keys.estimates import Estimates
        from autotune.keys.resolve import Asked, Entry, Serving
        from autotune.tpu import generations

        estimates = None
        if target:
            generation = generations.by_name(target)
            compiler = functools.partial(_compiled, generation) if compiling else None
            estimates = Estimates(generation, Store(default_path()), self.max_num_seqs, compiler)
        resolve = functools.partial(keyset.resolve, pad_heads=self.chosen.pad_heads, estimates=estimates)
        name = self.chosen.preset
        entries = [Entry(key, f"preset {name}") for key in presets.keys(name)] if name else []
        lines = []
        for entry in resolve(Asked(problem, "--shape") for problem in self.problems):
            entries.append(entry)
            lines += _of_shape(entry)
        chosen = self.chosen
        serving = Serving(
            tps=chosen.tp or (1,),
            tokens=chosen.tokens,
            lengths=chosen.lengths,
            page_sizes=chosen.page_sizes,
            dtype=chosen.dtype,
            kv_dtype=KV_ALIASES.get(chosen.kv_dtype or "", chosen.kv_dtype),
            max_num_seqs=self.max_num_seqs,
        )
        for model in self.models:
            of_model, skipped = _divided(model, serving, resolve)
            entries += of_model
            lines += skipped
            lines += keyset.listing(model, of_model, not chosen.page_sizes, not chosen.tokens)
        from_files, notes = keyset.canonical(self.read)
        entries += from_files
        lines += notes
        for line in lines[:_LISTED]:
            click.echo(line, err=True)
        if len(lines) > _LISTED:
            click.echo(f"and {len(lines) - _LISTED} lines more: `autotune keys` prints all keys", err=True)
        return keyset.merged(entries)

    def no_room(
        self, keys: Sequence[TableKey], generation: Generation, settings: Settings = NO_SETTINGS
    ) -> tuple[str, str] | None:
        """Why nothing can run for some of the keys, and what to type; None if something may for all."""
        from autotune.keys import feasibility

        if self.models:
            words = feasibility.Words(kv_heads=self._fewer_heads)
        else:
            heads = "kv_heads={0}, those of one of several chips".format
            words = feasibility.Words("page_size=", "max_model_len=", heads)
        return feasibility.no_room(generation, keys, settings, self.max_num_seqs, words)

    def _fewer_heads(self, most: int, key: TableKey) -> str:
        """The least --tp that leaves no model more KV heads of a key's kind on a chip."""
        from autotune.keys import resolve as keyset

        divided = (keyset.unpadded(model, key.canonical_problem()) for model in self.models)
        least = [next((tp for tp, _, kv_heads in each if kv_heads <= most), 0) for each in divided]
        heads = f"at most {most} KV head{'s' if most > 1 else ''} on a chip"
        return f"--tp {max(least)}, which leaves {heads}" if all(least) else heads


def _divided(
    model: Model, serving: Serving, resolve: Callable[[Iterable[Asked]], list[Entry]]
) -> tuple[list[Entry], list[str]]:
    """A model's keys with each --tp that its heads can be divided by, and a line for each that they cannot.

    Raises:
      UsageError: there is no other; what is wrong with each.
    """
    from autotune.keys import resolve as keyset

    entries: list[Entry] = []
    refused: dict[int, UsageError] = {}
    for tp in serving.tps:
        try:
            entries += resolve(keyset.of_model(model, dataclasses.replace(serving, tps=(tp,))))
        except UsageError as error:
            refused[tp] = error
    if not entries:
        raise UsageError("\n".join(dict.fromkeys(map(str, refused.values()))))
    return entries, [f"--tp {tp} is skipped: {str(error).splitlines()[0]}" for tp, error in refused.items()]


def _compiled(generation: Generation, programs: list[Program]) -> dict[Program, Compiled]:
    """Verdicts on the programs; where this machine has no compiler, as of one that does not compile."""
    from autotune.cli.progress import of_batch
    from autotune.compile.batch import compile_all
    from autotune.tpu.compiler import Compiled

    try:
        return compile_all(
            generation, programs, named=False, jobs=cores(), timeout=COMPILE_TIMEOUT, start_progress=of_batch
        )
    except MachineError as error:
        click.echo(f"nothing was compiled: {error}", err=True)
        return {program: Compiled(status="compile_error", error=str(error)) for program in programs}


def _of_shape(entry: Entry) -> list[str]:
    """What to say of a --shape: nothing where it is its own key's."""
    from autotune.keys.padding import head_dim_padding
    from autotune.keys.resolve import rounded

    problem = entry.problem
    assert problem is not None
    padding = [text] if (text := head_dim_padding(problem)) else []
    if entry.padded:
        return [*padding, f"{entry.padded.advice(problem)}; swept as ({', '.join(map(str, entry.key))})"]
    if entry.key.canonical_problem(problem.max_num_seqs) == problem:
        return []
    return [
        *padding,
        f"q_heads={problem.num_q_heads}, kv_heads={problem.num_kv_heads}: JAX looks this shape up under the "
        f"key ({', '.join(map(str, entry.key))}), so it is swept at that padded shape"
        + (f"; {why}" if (why := rounded(problem, entry.key)) else ""),
    ]


def key_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to a command, which gets them as one argument, `chosen`: a KeyOptions."""

    @functools.wraps(command)
    def call(**values: Any) -> Any:
        names = [field.name for field in dataclasses.fields(KeyOptions)]
        return command(chosen=KeyOptions(**{name: values.pop(name) for name in names}), **values)

    for option in reversed(_OPTIONS):
        call = option(call)
    return call
