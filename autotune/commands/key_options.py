"""The options that say which keys are meant, for every command that takes keys."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import click

from autotune.commands.options import parse_shape
from autotune.errors import UsageError
from autotune.kernel.problem import Problem, TableKey

PRESETS = ("smoke", "published")

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
)


@dataclasses.dataclass(frozen=True)
class KeyOptions:
    """What was typed of these options; the names are those of the parameters."""

    preset: str | None
    shapes: tuple[str, ...]

    def select(self, max_num_seqs: int) -> Selection:
        """What was typed, parsed; jax is not needed for that.

        Raises:
          UsageError: nothing was typed, or something that no call can have.
        """
        if not self.preset and not self.shapes:
            raise UsageError("nothing to sweep: give --preset smoke, --preset published or a --shape")
        return Selection(self.preset, tuple(parse_shape(text, max_num_seqs) for text in self.shapes))


@dataclasses.dataclass(frozen=True)
class Selection:
    """Keys that are meant: those of a preset and those of calls' shapes."""

    preset: str | None
    problems: tuple[Problem, ...]

    def keys(self) -> tuple[TableKey, ...]:
        """The canonical keys, each once; says on stderr which of them stand for another shape.

        Raises:
          UsageError: the kernel does not tile a shape's heads, or no padded shape has its key.
        """
        from autotune import presets
        from autotune.kernel.tiling import sweep_key

        keys: dict[TableKey, None] = dict.fromkeys(presets.keys(self.preset) if self.preset else ())
        for problem in self.problems:
            key = sweep_key(problem)
            keys[key] = None
            if key.canonical_problem(problem.max_num_seqs) != problem:
                click.echo(
                    f"q_heads={problem.num_q_heads}, kv_heads={problem.num_kv_heads}, "
                    f"max_model_len={problem.max_model_len}: JAX looks this shape up under the key "
                    f"({', '.join(map(str, key))}), so it is swept at that padded shape",
                    err=True,
                )
        return tuple(keys)


def key_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to a command, which gets them as one argument, `chosen`: a KeyOptions."""

    @functools.wraps(command)
    def call(**values: Any) -> Any:
        names = [field.name for field in dataclasses.fields(KeyOptions)]
        return command(chosen=KeyOptions(**{name: values.pop(name) for name in names}), **values)

    for option in reversed(_OPTIONS):
        call = option(call)
    return call
