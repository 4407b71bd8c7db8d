"""Tables as Python source: which dialect a file is, its rows, and each dialect written back."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from autotune.errors import UsageError
from autotune.io.terminal import printable
from autotune.kernel.problem import BlockSizes
from autotune.tables.dialects import INFERENCE, JAX, SGLANG, Dialect
from autotune.tables.keys import InferenceKey, Key
from autotune.tables.literal import MAX_BYTES, STRING, Entries, LiteralError, assigned, names_assigned
from autotune.tables.lookups import recognised
from autotune.tables.table import Repeat, Table

TABLE_NAME = "TUNED_BLOCK_SIZES"
PROVENANCE_NAME = "PROVENANCE"
SOURCE_NAME, LIMIT_NAME = "SOURCE", "VMEM_LIMIT_BYTES"  # of a module that stands in for JAX's
# Past this no TPU's VMEM holds a block, whatever the page size.
MAX_BLOCK = 1 << 20
MAX_NUMBER = 1 << 31
LOOKUP = "lookup"  # of PROVENANCE: the look-up that rows without functions are for
_NAMES_SAID, _NAME_SAID = 5, 40
_SAID = 1000  # characters of a text of the provenance that are kept
_INDENT = "    "


def read_file(path: Path) -> Table:
    """The table in a Python file.

    Raises:
      UsageError: the file cannot be read, is over 32 MiB or not UTF-8, or its table is not a literal of one
        dialect; one line that names the file, the line and what stands there.
    """
    where = repr(str(path))
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"table {where} cannot be read: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise UsageError(f"table {where} is larger than {MAX_BYTES >> 20} MiB: a table is a few MiB at most")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(
            f"table {where} is not UTF-8 text: byte {data[error.start]:#04x} in line {line}; save it as UTF-8"
        ) from None
    try:
        return read_text(text, str(path))
    except LiteralError as error:
        raise UsageError(f"table {where}, {error}") from None


def read_text(text: str, origin: str) -> Table:
    """The table in a module's text.

    Raises:
      LiteralError: it has none, or one that is not a literal of one dialect; a table of another kernel is
        named as that.
    """
    try:
        return _table(text, origin)
    except LiteralError as error:
        if kernel := other_kernel(text):
            raise LiteralError(f"line 1: it is a table of another kernel: {kernel}") from error
        raise


# Other kernels' tables, by what they are called.
_OTHER_TABLES = {
    "TUNED_BLOCK_SIZES_V3": "sglang-jax's ragged paged attention v3, with four block sizes a stage",
    "TUNED_BLOCK_SIZES_MLA": "multi-head latent attention (MLA)",
    "TUNED_BLOCK_SIZES_FUSED": "ragged paged attention with one table for fused and one for split KV",
    "TUNED_VARLEN_BLOCK_SIZES": "attention over sequences of varying length",
    "TUNED_BLOCK_SIZES_RAW": "quantized matmul",
    "TUNED_BLOCK_CONFIGS": "fused MoE",
    "TUNED_BT": "top-k routing",
}
# And by names in their code, where the look-up is not one of ragged paged attention.
_OTHER_NAMES = {
    "actual_lkv_dim": "multi-head latent attention (MLA)",
    "kv_lora_rank": "multi-head latent attention (MLA)",
    "num_page_indices": "batched ragged paged attention",
    "block_k_major": "flash attention",
    "q_len": "flash attention",
    "ep_size": "fused MoE",
    "num_current_groups": "megablox, a grouped matmul",
    "x_q_dtype": "quantized matmul",
    "tp_size": "a matmul with all-gather",
}
_OWN_LOOK_UP = re.compile(r"^def get_tuned_block_sizes\([^)]*\bpages_per_seq\b", re.M)


def other_kernel(text: str) -> str | None:
    """The kernel that a module's table is of, where that is another than ragged paged attention's."""
    assigns = set(names_assigned(text))
    if named := next((kernel for name, kernel in _OTHER_TABLES.items() if name in assigns), None):
        return named
    if _OWN_LOOK_UP.search(text):
        return None
    pattern = re.compile(rf"{STRING}|#[^\n]*|\b(?P<name>{'|'.join(_OTHER_NAMES)})\b", re.S)
    found = {match["name"] for match in pattern.finditer(text)}
    return next((kernel for name, kernel in _OTHER_NAMES.items() if name in found), None)


def _table(text: str, origin: str) -> Table:
    values = assigned(text, TABLE_NAME, (PROVENANCE_NAME, SOURCE_NAME, LIMIT_NAME))
    if TABLE_NAME not in values:
        names = [name for name in names_assigned(text) if name != "logger" and not name.startswith("_")]
        named = ", ".join(name[:_NAME_SAID] for name in names[:_NAMES_SAID])
        instead = f"; it assigns {printable(named)}" if named else ""
        raise LiteralError(f"line 1: the file assigns no {TABLE_NAME} = {{...}}{instead}")
    value = values[TABLE_NAME]
    if not isinstance(value, Entries):
        raise LiteralError(f"line 1: {TABLE_NAME} is {_named(value)}, not a dict of device names")
    dialect = _dialect_of(value)
    devices: dict[str, dict[Key, BlockSizes]] = {}
    lines: dict[tuple[str, Key], int] = {}
    repeats: list[Repeat] = []
    for device, level, line in value.items:
        _check_device(device, level, line)
        if device in devices:
            raise LiteralError(f"line {line}: device {device!r} is there twice; put its rows in one dict")
        rows = devices[device] = {}
        for key, blocks, at in _rows(dialect, level):
            if key in rows:
                if rows[key] != blocks:
                    raise LiteralError(
                        f"line {at}: key {tuple(key)} of {device!r} is there twice: {tuple(rows[key])} in "
                        f"line {lines[device, key]}, {tuple(blocks)} here"
                    )
                repeats.append(Repeat(device, key, at, lines[device, key]))
                continue
            rows[key] = blocks
            lines[device, key] = at
    provenance = _provenance(values)
    return Table(
        dialect=dialect,
        devices=devices,
        origin=origin,
        provenance=provenance,
        lines=lines,
        repeats=tuple(repeats),
        rule=recognised(text, provenance.get(LOOKUP), dialect),
    )


def _provenance(values: Mapping[str, Any]) -> dict[str, Any]:
    """What is said of the values, for people to read: text without what could steer a terminal."""
    stated = values.get(PROVENANCE_NAME)
    if isinstance(stated, Entries):
        return {
            _said(str(key)): _said(value) if isinstance(value, str) else value
            for key, value, _ in stated.items
            if not isinstance(value, Entries)
        }
    source, limit = values.get(SOURCE_NAME), values.get(LIMIT_NAME)
    return ({"source": _said(source)} if isinstance(source, str) else {}) | (
        {"vmem_limit_bytes": limit} if isinstance(limit, int) else {}
    )


def _said(text: str) -> str:
    return printable(text[:_SAID])


def _check_device(device: Any, level: Any, line: int) -> None:
    if not isinstance(device, str):
        raise LiteralError(f"line {line}: a device name is a string, not {_named(device)}")
    if not isinstance(level, Entries):
        raise LiteralError(f"line {line}: device {device!r} holds {_named(level)}, not a dict of rows")


def _dialect_of(value: Entries) -> Dialect:
    """The dialect, by the first key under a device; jax for a table without any."""
    for device, level, line in value.items:
        _check_device(device, level, line)
        for key, _, at in level.items:
            if isinstance(key, int):
                return INFERENCE
            for dialect in (JAX, SGLANG):
                if isinstance(key, tuple) and len(key) == len(dialect.key_type._fields):
                    return dialect
            raise LiteralError(
                f"line {at}: {_named(key)} is no key of a table: jax has tuples of 8, sglang-jax tuples "
                "of 7, tpu-inference a page size over nested dicts"
            )
    return JAX


def _rows(dialect: Dialect, level: Entries) -> Iterator[tuple[Key, BlockSizes, int]]:
    if dialect is INFERENCE:
        yield from _nested_rows(level, ())
        return
    make, fields = dialect.key_type._make, dialect.key_type._fields
    types = [str, str] + [int] * (len(fields) - 2)
    for key, value, line in level.items:
        if not isinstance(key, tuple) or [*map(type, key)] != types or max(key[2:]) > MAX_NUMBER:
            raise LiteralError(
                f"line {line}: {_named(key)} is no key of the {dialect} dialect: ({', '.join(fields)})"
            )
        yield make(key), _blocks(value, line), line


# What each level of a nested table is keyed by.
_LEVELS = (
    ("page size, a whole number", int),
    ("'q_{dtype}_kv_{dtype}'", str),
    ("'q_head-{}_kv_head-{}_head-{}'", str),
    ("'max_model_len-{}-sw-{}'", str | int),
)


def _nested_rows(level: Entries, above: tuple[Any, ...]) -> Iterator[tuple[Key, BlockSizes, int]]:
    expected, kind = _LEVELS[len(above)]
    seen: dict[Any, int] = {}
    for key, value, line in level.items:
        if not isinstance(key, kind) or isinstance(key, bool):
            raise LiteralError(f"line {line}: {_named(key)} where the tpu-inference dialect has a {expected}")
        path = (*above, key)
        if len(path) == len(_LEVELS):
            yield InferenceKey(*path), _blocks(value, line), line
        elif not isinstance(value, Entries):
            raise LiteralError(f"line {line}: {key!r} holds {_named(value)}, not a dict")
        elif key in seen:
            raise LiteralError(f"line {line}: {key!r} is there twice, first in line {seen[key]}")
        else:
            seen[key] = line
            yield from _nested_rows(value, path)


def _blocks(value: Any, line: int) -> BlockSizes:
    if not isinstance(value, tuple) or [*map(type, value)] != [int, int]:
        raise LiteralError(
            f"line {line}: {_named(value)} where a pair (num_kv_pages_per_blk, num_queries_per_blk) belongs"
        )
    if not 0 < min(value) <= max(value) <= MAX_BLOCK:
        raise LiteralError(f"line {line}: block sizes {value} must be from 1 to {MAX_BLOCK}")
    return BlockSizes(*value)


def _named(value: Any) -> str:
    """A value of a file as a message repeats it: its kind, and itself cut short."""
    if isinstance(value, Entries):
        return "a dict"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def render(table: Table, header: str = "Tuned block sizes.", quote: str | None = None) -> str:
    """The table as Python source of its dialect: a docstring, PROVENANCE and the literal.

    Rows stay in the table's order, and reading the text gives the same rows and provenance. For a stack's own
    module only the literal is wanted; it is laid out as those files are. quote: the quotation mark, by
    default that of the dialect's own file.
    """
    quote = quote or table.dialect.quote
    parts = [f'"""{_one_line(header)}"""\n\n']
    if table.provenance:
        parts.append(f"{PROVENANCE_NAME} = {{\n")
        for name, value in table.provenance.items():
            parts.append(f"{_INDENT}{_quoted(name, quote)}: {_quoted(value, quote)},\n")
        parts.append("}\n\n")
    parts.append(f"{TABLE_NAME} = {{\n")
    for device, rows in table.devices.items():
        parts.append(f"{_INDENT}{_quoted(device, quote)}: {{\n")
        if table.dialect is INFERENCE:
            _render_nested(parts, rows, quote)
        else:
            for key, blocks in rows.items():
                parts.append(f"{_INDENT * 2}{_quoted(key, quote)}: ({blocks[0]}, {blocks[1]}),\n")
        parts.append(f"{_INDENT}}},\n")
    parts.append("}\n")
    return "".join(parts)


def _render_nested(parts: list[str], rows: Mapping[Key, BlockSizes], quote: str) -> None:
    tree: dict[Any, Any] = {}
    for key, blocks in rows.items():
        level = tree
        for part in key[:-1]:
            level = level.setdefault(part, {})
        level[key[-1]] = blocks

    def write(level: dict[Any, Any], depth: int) -> None:
        indent = _INDENT * depth
        for part, value in level.items():
            name = _quoted(part, quote)
            if isinstance(value, BlockSizes):
                parts.append(f"{indent}{name}: ({value[0]}, {value[1]}),\n")
            else:
                parts.append(f"{indent}{name}: {{\n")
                write(value, depth + 1)
                parts.append(f"{indent}}},\n")

    write(tree, 2)


def _quoted(value: Any, quote: str) -> str:
    """A literal with this quotation mark, or the other if it holds this one; what neither could is a '?'."""
    if isinstance(value, str):
        other = "'" if quote == '"' else '"'
        if quote in value and other not in value:
            quote = other
        return quote + re.sub(rf"[\\{quote}\x00-\x1f\x7f]", "?", value) + quote
    if isinstance(value, tuple):
        inside = ", ".join(_quoted(part, quote) for part in value)
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    return repr(value)


def _one_line(text: str) -> str:
    return re.sub(r'[\\\x00-\x1f\x7f]|"""', "?", text)
