"""What several commands parse: lists of numbers, sizes in bytes, shapes."""

from __future__ import annotations

import functools
import math
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from autotune.errors import UsageError, did_you_mean
from autotune.io import folders
from autotune.io.folders import Folder
from autotune.io.terminal import typed
from autotune.kernel.problem import DTYPE_BITS, Problem

TARGETS = ("v4", "v5e", "v5p", "v6e", "v7x")

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:iB|B)?", re.IGNORECASE)
MAX_SIZE = 1 << 40
_MOST_MIB = 1024  # what a number without its unit may have meant
MAX_PARTS = 10000
_SHOWN = 200  # characters of what was typed that a message repeats
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def _is_count(text: str) -> bool:
    return len(text) <= 10 and text.isascii() and text.isdigit() and 0 < int(text) < 2**31


class Part(click.ParamType[tuple[int, int]]):
    """One part of several, 2/3; (2, 3) inside."""

    name = "I/N"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in value.split("/")]
        if len(parts) != 2 or not all(_is_count(part) for part in parts):
            self.fail(f"{value!r} is not a part such as 2/3, the second of three", param, ctx)
        number, count = map(int, parts)
        if not number <= count <= MAX_PARTS:
            self.fail(
                f"{value!r} is not a part: type 1/3, 2/3 or 3/3 for three; at most {MAX_PARTS} are possible",
                param,
                ctx,
            )
        return number, count


class _Target(click.Choice[str]):
    """A TPU generation, in any case."""

    def __init__(self) -> None:
        super().__init__(TARGETS, case_sensitive=False)

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        return super().get_invalid_choice_message(value, ctx) + did_you_mean(str(value).lower(), TARGETS)


TARGET = _Target()


class Number(click.types.FloatParamType):
    """A number; nan and inf are none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


class NumberRange(click.FloatRange):
    """A number in a range, in which nan and inf never are."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(Number().convert(value, param, ctx), param, ctx)


class Seconds(NumberRange):
    """A number of seconds above zero, or from `least` on."""

    def __init__(self, least: float = 0) -> None:
        super().__init__(min=least, min_open=not least)


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


class NamedPath(click.Path):
    """A path of this machine that is not empty, as a pathlib.Path."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("the name is empty", param, ctx)
        if isinstance(value, str) and _URL.match(value):
            self.fail(f"{value!r} is a URL: name a file of this machine, and copy it there", param, ctx)
        return super().convert(value, param, ctx)


class NamedFolder(click.ParamType[Folder]):
    """A results folder: a path, or one in a bucket, s3://BUCKET/DIR or gs://BUCKET/DIR."""

    name = "FOLDER"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Folder:
        if not isinstance(value, str):
            return value
        if value == "":
            self.fail("the name is empty", param, ctx)
        if value == "-":
            self.fail(
                "'-' is not a folder, and rows need one: type ./- for a folder of that name", param, ctx
            )
        return folders.parse(value)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="dir")]


class Numbers(click.ParamType[tuple[int, ...]]):
    """Positive whole numbers, separated by commas."""

    name = "N,N,..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in value.split(",")]
        if not all(_is_count(part) for part in parts):
            self.fail(f"{value!r} is not a list of positive whole numbers such as 4,8,16", param, ctx)
        return tuple(sorted({int(part) for part in parts}))


class Size(click.ParamType[int]):
    """A size in bytes: 67108864, 64MiB, 64M (the units are binary)."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = _SIZE.fullmatch(value.strip())
        size = float(match[1]) * _UNITS[match[2].upper()] if match and len(value) < 30 else 0.0
        if not 1 <= size <= MAX_SIZE:
            self.fail(f"{value!r} is not a size such as 100MiB, 64M or 67108864", param, ctx)
        if match and not match[2] and size < _UNITS["M"]:
            meant = f"{match[1]}MiB" if size <= _MOST_MIB else "100MiB"
            self.fail(f"{value!r} is bytes, and too few: did you mean {meant}?", param, ctx)
        return round(size)


def command_name() -> str:
    """What was typed to start this: `autotune`, or its path where it is not on PATH."""
    name = sys.argv[0]
    if Path(name).name == "__main__.py":
        return "python -m autotune"
    on_path = shutil.which("autotune")
    if Path(name).name != "autotune" or (on_path and Path(on_path).resolve() == Path(name).resolve()):
        return typed("python", name) if Path(name).name == "cli.py" and not on_path else "autotune"
    return typed(name)


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Percent(click.ParamType[float]):
    """A share as a percentage, 1% or 0.5%; a fraction of one inside."""

    name = "PERCENT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", value.strip())
        if not match or not 0 < float(match[1]) <= 100:
            self.fail(f"{value!r} is not a percentage such as 1% or 0.5%", param, ctx)
        return float(match[1]) / 100


def _shown(text: str) -> str:
    """What was typed, as a message repeats it: quoted, and cut short."""
    quoted = repr(text[: _SHOWN + 1])
    # What cannot be printed takes up to ten characters, and is cut by what it takes.
    return quoted if len(quoted) <= _SHOWN + 2 else f"{quoted[: _SHOWN + 1]}{quoted[0]}..."


def _plain(text: str) -> str:
    """The same without the quotation marks."""
    return _shown(text).replace("'", "")


SHAPE_FIELDS = (
    "q_heads",
    "kv_heads",
    "head_dim",
    "page_size",
    "max_num_batched_tokens",
    "max_model_len",
    "q_dtype",
    "kv_dtype",
)
_EXAMPLE = "q_heads=8,kv_heads=2,head_dim=128,page_size=128,max_num_batched_tokens=1024,max_model_len=2048"


def parse_shape(text: str, max_num_seqs: int) -> Problem:
    """The problem that a --shape describes; dtypes are bfloat16 unless given.

    Raises:
      UsageError: a field is unknown, missing, given twice, or has a value that no call can have.
    """
    fields: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or name not in SHAPE_FIELDS:
            meant = did_you_mean(name, SHAPE_FIELDS) if name not in SHAPE_FIELDS else ""
            fields_known = ", ".join(SHAPE_FIELDS)
            raise UsageError(f"--shape: {_shown(part)} is not one of {fields_known} as name=value.{meant}")
        if name in fields:
            raise UsageError(f"--shape: {name} is given twice, in {_shown(text)}")
        fields[name] = value
    dtypes = {name: fields.pop(name, "bfloat16") for name in ("q_dtype", "kv_dtype")}
    for name, dtype in dtypes.items():
        if dtype not in DTYPE_BITS:
            raise UsageError(f"--shape: {name}={_plain(dtype)} is unknown: use {', '.join(DTYPE_BITS)}")
    missing = [name for name in SHAPE_FIELDS[:6] if name not in fields]
    if missing:
        raise UsageError(f"--shape: {', '.join(missing)} missing in {_shown(text)}; an example: {_EXAMPLE}")
    numbers = {}
    for name, value in fields.items():
        if not _is_count(value):
            raise UsageError(f"--shape: {name}={_plain(value)} must be a positive whole number")
        numbers[name] = int(value)
    try:
        return Problem(
            num_q_heads=numbers["q_heads"],
            num_kv_heads=numbers["kv_heads"],
            head_dim=numbers["head_dim"],
            page_size=numbers["page_size"],
            max_num_batched_tokens=numbers["max_num_batched_tokens"],
            pages_per_seq=-(-numbers["max_model_len"] // numbers["page_size"]),
            max_num_seqs=max_num_seqs,
            **dtypes,
        )
    except ValueError as error:
        raise UsageError(f"--shape: {error}") from None


def grouped(
    name: str, kind: type[Any], *options: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds options to a command, which gets them as one argument: a NamedTuple of their parameters."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def call(**values: Any) -> Any:
            return command(**{name: kind(*(values.pop(field) for field in kind._fields))}, **values)

        wrapped: Callable[..., Any] = call
        for option in reversed(options):
            wrapped = option(wrapped)
        return wrapped

    return add
