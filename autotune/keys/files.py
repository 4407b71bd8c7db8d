"""Keys as csv, json or a table, and read back from files; with bounds, for others may have made them."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from autotune.errors import UsageError
from autotune.kernel.problem import DTYPE_BITS, MOST, TableKey

FORMATS = ("csv", "json", "table")
MAX_BYTES = 16 << 20
MAX_KEYS = 100_000
FIELDS = (*TableKey._fields, "origin")
_DTYPES, _NUMBERS = TableKey._fields[:2], TableKey._fields[2:]
_ORIGIN_CHARACTERS = 200


def render(keys: Mapping[TableKey, str], form: str) -> str:
    """The keys, each with its origin, in one of FORMATS; csv and json can be read back."""
    if form == "json":
        lines = [json.dumps(dict(zip(FIELDS, (*key, origin), strict=True))) for key, origin in keys.items()]
        return "[\n" + ",\n".join(lines) + "\n]\n"
    rows = [FIELDS, *((*key, origin) for key, origin in keys.items())]
    if form == "csv":
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows(rows)
        return out.getvalue()
    short = ("q dtype", "kv dtype", "q heads", "kv heads", "dim", "page", "tokens", "length", "origin")
    texts = [short, *(tuple(map(str, row)) for row in rows[1:])]
    widths = [max(len(row[column]) for row in texts) for column in range(len(short))]
    return "".join(
        "  ".join(
            cell.ljust(width) if column in (0, 1, 8) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        + "\n"
        for row in texts
    )


def read(name: str) -> list[tuple[TableKey, str, str]]:
    """(key, origin, place) of each key in a csv or json file; - is the standard input.

    Raises:
      UsageError: it cannot be read, is over 16 MiB or 100,000 keys, or holds something that is no key; one
        line that names the file and the place in it.
    """
    shown = "standard input" if name == "-" else repr(name)
    try:
        if name == "-":
            data = sys.stdin.buffer.read(MAX_BYTES + 1)
        elif not Path(name).is_file():  # reading a pipe could wait for ever
            state = "is no file" if Path(name).exists() else "does not exist"
            raise UsageError(
                f"--keys {shown} {state}: name a file that `autotune keys` wrote, or - for its pipe"
            )
        else:
            with Path(name).open("rb") as file:
                data = file.read(MAX_BYTES + 1)
        text = data.decode("utf-8-sig")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UsageError(f"--keys {shown} cannot be read: {reason}") from None
    if len(data) > MAX_BYTES:
        raise UsageError(f"--keys {shown} is larger than {MAX_BYTES >> 20} MiB")
    rows = _json_rows if text.lstrip()[:1] in ("[", "{") else _csv_rows
    keys = []
    for row, place in rows(text, f"--keys {shown}"):
        keys.append((_key(row, place), _origin(row), place))
        if len(keys) > MAX_KEYS:
            raise UsageError(f"--keys {shown} holds more than {MAX_KEYS} keys")
    if not keys:
        raise UsageError(f"--keys {shown} holds no key: `autotune keys` writes such files")
    return keys


def _json_rows(text: str, where: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    try:
        value = json.loads(text)
    except RecursionError:
        raise UsageError(f"{where} is nested too deeply for a list of keys") from None
    except ValueError as error:
        said = f", line {error.lineno}: {error.msg}" if isinstance(error, json.JSONDecodeError) else ""
        raise UsageError(f"{where} is not JSON{said}") from None
    if not isinstance(value, list):
        raise UsageError(
            f"{where}: json of keys is a list of objects, one a key, as `autotune keys` writes it"
        )
    for number, row in enumerate(value, 1):
        if not isinstance(row, dict):
            raise UsageError(f"{where}, key {number}: {_shown(row)} is no object with the fields of a key")
        yield row, f"{where}, key {number}"


def _csv_rows(text: str, where: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    lines = csv.reader(io.StringIO(text))
    try:
        header = [name.strip() for name in next(lines, [])]
        missing = [name for name in TableKey._fields if name not in header]
        if missing:
            raise UsageError(f"{where}: its first line has no {missing[0]}: it must name {', '.join(FIELDS)}")
        for cells in lines:
            if cells:
                yield dict(zip(header, cells, strict=False)), f"{where}, line {lines.line_num}"
    except csv.Error as error:
        raise UsageError(f"{where}, line {lines.line_num}: {error}") from None


def _key(row: Mapping[str, Any], place: str) -> TableKey:
    for name in _DTYPES:
        dtype = row.get(name)
        if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
            raise UsageError(f"{place}: {name}={_shown(dtype)} is unknown: use {', '.join(DTYPE_BITS)}")
    numbers = []
    for name in _NUMBERS:
        value = row.get(name)
        if isinstance(value, str) and value.strip().isascii() and value.strip().isdigit() and len(value) < 20:
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST:
            raise UsageError(f"{place}: {name}={_shown(value)} must be a whole number within 1 and {MOST}")
        numbers.append(value)
    return TableKey(row["q_dtype"], row["kv_dtype"], *numbers)


def _origin(row: Mapping[str, Any]) -> str:
    origin = row.get("origin")
    text = origin if isinstance(origin, str) else ""
    return "".join(
        c if c.isprintable() else "?" for c in text[:_ORIGIN_CHARACTERS]
    )  # no escapes to a terminal


def _shown(value: object) -> str:
    if isinstance(value, int) and abs(value) >= 10**20:  # Python refuses to print the longest
        return "a huge number"
    text = "nothing" if value is None else ascii(value)
    return text if len(text) <= 40 else text[:37] + "..."
