"""Data sets as a whole: what one holds, several made into one, many files made into few, and other formats.

Merging and compacting keep every row that was ever made; only copies of the very same row are dropped. What
they write is decided by the rows alone, not by the order of folders, files or calls.
"""

from __future__ import annotations

import datetime
import hashlib
import io
import json
import math
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from autotune.errors import UsageError
from autotune.io import folders
from autotune.io.folders import Folder
from autotune.io.terminal import cell, printable, typed
from autotune.results import dataset, schema
from autotune.results.codes import Codes, codes

if TYPE_CHECKING:
    import pyarrow as pa

# Two rows of one candidate agree if these are equal: what a winner could hang on. Others, such as the host or
# the seconds of a compile, differ between any two runs.
OUTCOME = ("status", "latency_us", "latency_low_us", "latency_high_us", "cycles", "vmem_used_bytes")
FORMATS = ("csv", "json", "parquet")
_COUNTED = ("target", "source", "status", "jax", "libtpu", "autotune", "kernel_fingerprint", "model", "host")


class Gathered(NamedTuple):
    """rows: those that the data set holds now. new: those that it did not hold before. disagreeing:
    candidates of which it holds rows that differ in OUTCOME. files: those of the data set now."""

    rows: int
    new: int
    disagreeing: int
    files: int


def _plain(table: pa.Table) -> pa.Table:
    """What cannot be ranked, such as lists, as text: so that rows can be compared and sorted by it."""
    import pyarrow as pa
    import pyarrow.compute as pc

    for number, field in enumerate(table.schema):
        column = table[field.name]
        if field.name in schema.arrow().names:
            if not pa.types.is_list(field.type):
                continue
            lists = column.combine_chunks()
            if isinstance(lists, pa.ChunkedArray):
                lists = lists.chunk(0) if lists.num_chunks else pa.array([], field.type)
            text = pc.binary_join(pc.cast(lists, pa.list_(pa.string())), " ")
        elif not _ranked(field.type):
            text = pa.array(
                [None if value is None else repr(value) for value in column.to_pylist()], pa.string()
            )
        else:
            continue
        table = table.set_column(number, field.name, text)
    return table


def _ranked(kind: pa.DataType) -> bool:
    """Whether Arrow can sort values of a type that this version does not know."""
    import pyarrow as pa

    if pa.types.is_float16(kind) or pa.types.is_null(kind) or isinstance(kind, pa.BaseExtensionType):
        return False
    return pa.types.is_primitive(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _together(parts: Iterable[pa.Table]) -> pa.Table:
    """Rows of several files in one piece: the columns of the schema, and after them those that it lacks."""
    import pyarrow as pa

    known = schema.arrow()
    return dataset.together(
        (part.cast(pa.schema([*known, *list(part.schema)[len(known) :]])) for part in parts), known
    )


def _all_of(folder: Folder, only: Collection[str] | None = None) -> dict[str, pa.Table]:
    """A folder's rows by file, with every column that they have."""
    return dataset.by_file(folder, schema.arrow(), only, others=True)


def _codes(table: pa.Table) -> Codes:
    """A number a row, equal for equal rows only, and in an order that their values alone decide."""
    return codes(_plain(table), table.column_names) if table.num_rows else np.zeros(0, np.int64)


def distinct(table: pa.Table) -> pa.Table:
    """The rows, each once, in an order that their values alone decide."""
    _, first = np.unique(_codes(table), return_index=True)
    return table.take(first)


def disagreeing(table: pa.Table) -> int:
    """Candidates of which there are rows that differ in OUTCOME."""
    if not table.num_rows:
        return 0
    plain = _plain(table.select([*schema.IDENTITY, *(c for c in OUTCOME if c not in schema.IDENTITY)]))
    identity = codes(plain, schema.IDENTITY)
    both = np.unique(np.stack([identity, codes(plain, plain.column_names)]), axis=1)
    _, counts = np.unique(both[0], return_counts=True)
    return int((counts > 1).sum())


def merge(sources: Sequence[Folder], into: Folder) -> Gathered:
    """Add the rows of data sets to another, new or old, that it does not hold yet.

    Doing it again adds nothing, and the order of sources plays no part.

    Raises:
      UsageError: a source is not there, or a file is not of the schema. MachineError: a bucket refuses.
    """
    theirs = distinct(_together(table for source in sources for table in _all_of(source).values()))
    held = _together(_all_of(into).values() if dataset.names(into) else [])
    both = _together([held, theirs])
    numbers = _codes(both)
    known = np.unique(numbers[: held.num_rows])
    new = both.slice(held.num_rows).filter(~np.isin(numbers[held.num_rows :], known))
    for target in sorted(set(new["target"].to_pylist())):
        _write(into, target, new)
    rows = len(np.unique(numbers))
    return Gathered(rows, new.num_rows, disagreeing(both), len(dataset.names(into)))


def compact(folder: Folder) -> Gathered:
    """Make one file a target of a data set's files.

    The new files are there before the old ones are deleted, and only files whose rows were read are: who is
    stopped in between leaves copies, which readers drop, and what others append meanwhile stays.

    Raises:
      UsageError: the folder is not there, or a file is not of the schema. MachineError: a bucket refuses.
    """
    parts = _all_of(folder, dataset.names(folder) or None)
    table = _together(parts.values())
    rows = distinct(table)
    targets = sorted(set(rows["target"].to_pylist()))
    if len(parts) > len(targets) or rows.num_rows < table.num_rows:
        kept = {_write(folder, target, rows) for target in targets}
        for name in parts:  # those that were read, and no others
            if name not in kept:
                folders.delete(folder, name)
    return Gathered(rows.num_rows, 0, disagreeing(rows), len(dataset.names(folder)))


def _write(folder: Folder, target: str, rows: pa.Table) -> str:
    """The rows of a target as one file, named after its content; returns the name.

    Raises:
      UsageError: a column that this version does not know is of a type that parquet does not keep.
    """
    import pyarrow.compute as pc

    mine = rows.filter(pc.equal(rows["target"], target))
    content = dataset.parquet(mine)
    beyond = [name for name in rows.column_names if name not in schema.arrow().names]
    for name in beyond if not _kept(content, mine.select(beyond)) else ():
        raise UsageError(
            f"the column {printable(name)!r}, which this autotune does not know, cannot be written as it "
            "was: nothing is changed; use the version that wrote it"
        )
    name = f"rows-{target}-{hashlib.sha256(content).hexdigest()[:32]}.parquet"
    folders.publish(folder, name, content)
    return name


def _kept(content: bytes, columns: pa.Table) -> bool:
    """Whether a file gives back some columns just as they are."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not columns.num_columns:
        return True
    back = pq.ParquetFile(io.BytesIO(content)).read().select(columns.column_names)
    if back.schema.types != columns.schema.types:
        return False
    numbers = _codes(pa.concat_tables([columns, back.replace_schema_metadata()]))
    return bool((numbers[: columns.num_rows] == numbers[columns.num_rows :]).all())


def nothing(folders: Sequence[Folder], target: str | None, held: Collection[str] = ()) -> str:
    """What to say of folders without a row (of a target); rows may be in folders below, which are not looked
    into. held: the targets of the rows that there are.
    """
    names = ", ".join(repr(str(folder)) for folder in folders)
    if held:
        have = ", ".join(sorted(map(printable, held)))
        return f"{names}: no rows for {target}, but for {have}: name one of these with --target"
    here = [folder for folder in folders if isinstance(folder, Path)]
    below = sorted({path.parent for folder in here for path in folder.glob("*/*.parquet")})
    if below:
        return f"{names}: no rows in the folder itself: name those in it: {typed(*below[:5])}"
    of = f" for {target}" if target else ""
    return f"{names}: no rows{of}: `autotune sweep --out` makes some"


def inventory(folder: Folder) -> dict[str, Any]:
    """What a data set holds, as plain values that json can write.

    Counts are of the rows that count, the newest of each identity; `superseded` are the others.

    Raises:
      UsageError: as `results.read`.
    """
    import pyarrow as pa

    entries = [entry for entry in folders.entries(folder) if entry.name.endswith(".parquet")]
    frame = dataset.read(folder, [*_COUNTED, "latency_us"])
    raw = dataset.tables(folder, pa.schema([schema.arrow().field("schema_version")]))
    candidate = [c for c in schema.IDENTITY if c not in ("workload_fingerprint", "source", "model")]
    times = frame["time"]
    return {
        "folder": str(folder),
        "files": len(entries),
        "bytes": sum(entry.size for entry in entries),
        "rows": len(frame),
        "superseded": max(0, sum(table.num_rows for table in raw) - len(frame)),
        "keys": len(frame[["target", *schema.KEY_COLUMNS]].drop_duplicates()),
        "candidates": len(frame[candidate].drop_duplicates()),
        "first": times.min().isoformat() if len(frame) else None,
        "last": times.max().isoformat() if len(frame) else None,
        **{
            name: {
                str(value): int(count)
                for value, count in sorted(frame[name].value_counts().items(), key=lambda item: str(item[0]))
            }
            for name in (*_COUNTED, "workload")
        },
    }


def exported(folder: Folder, form: str) -> bytes:
    """The rows that count, as the content of a csv, json or parquet file; times as ISO 8601, lists as JSON.

    Raises:
      UsageError: as `results.read`, or an unknown format.
    """
    if form not in FORMATS:
        raise UsageError(f"{form!r} is no format: use {', '.join(FORMATS)}")
    table = dataset.newest(_together(_all_of(folder).values()))
    if form == "parquet":
        return dataset.parquet(table)
    rows = [{name: _told(value) for name, value in row.items()} for row in table.to_pylist()]
    if form == "json":
        return (json.dumps(rows, indent=1, allow_nan=False) + "\n").encode()
    import csv

    text = io.StringIO()
    writer = csv.DictWriter(text, table.column_names, lineterminator="\n")
    writer.writerow({name: cell(name) for name in table.column_names})
    for row in rows:
        writer.writerow({n: cell(json.dumps(v) if isinstance(v, list | dict) else v) for n, v in row.items()})
    return text.getvalue().encode()


def _told(value: Any) -> Any:
    """A value as JSON has it: times as ISO 8601, and what it has no form for as text."""
    if isinstance(value, list | tuple):
        return [_told(one) for one in value]
    if isinstance(value, dict):
        return {str(name): _told(one) for name, one in value.items()}
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    known = (
        value is None
        or isinstance(value, str | bool | int)
        or (isinstance(value, float) and math.isfinite(value))
    )
    return value if known else str(value)
