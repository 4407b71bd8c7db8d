"""Data sets as a whole: what one holds, several made into one, many files made into few, and other formats.

Merging and compacting keep every row that was ever made; only copies of the very same row are dropped. What
they write is decided by the rows alone, not by the order of folders, files or calls.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from autotune import folders, results
from autotune.errors import UsageError
from autotune.folders import Folder
from autotune.rowcodes import Codes, codes
from autotune.terminal import printable, typed

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
    """Lists as text, so that rows can be compared and sorted by them."""
    import pyarrow as pa
    import pyarrow.compute as pc

    for number, field in enumerate(table.schema):
        if pa.types.is_list(field.type):
            lists = table[field.name].combine_chunks()
            if isinstance(lists, pa.ChunkedArray):
                lists = lists.chunk(0) if lists.num_chunks else pa.array([], field.type)
            values = pc.cast(lists, pa.list_(pa.string()))
            table = table.set_column(number, field.name, pc.binary_join(values, " "))
    return table


def _together(parts: Sequence[pa.Table]) -> pa.Table:
    """Rows of several files in one piece, each of the schema."""
    import pyarrow as pa

    return pa.concat_tables([results.schema().empty_table(), *(t.cast(results.schema()) for t in parts)])


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
    plain = _plain(table.select([*results.IDENTITY, *(c for c in OUTCOME if c not in results.IDENTITY)]))
    identity = codes(plain, results.IDENTITY)
    both = np.unique(np.stack([identity, codes(plain, plain.column_names)]), axis=1)
    _, counts = np.unique(both[0], return_counts=True)
    return int((counts > 1).sum())


def merge(sources: Sequence[Folder], into: Folder) -> Gathered:
    """Add the rows of data sets to another, new or old, that it does not hold yet.

    Doing it again adds nothing, and the order of sources plays no part.

    Raises:
      UsageError: a source is not there, or a file is not of the schema. MachineError: a bucket refuses.
    """
    schema = results.schema()
    theirs = distinct(_together([table for source in sources for table in results.tables(source, schema)]))
    held = _together(results.tables(into, schema) if results.names(into) else [])
    both = _together([held, theirs])
    numbers = _codes(both)
    known = np.unique(numbers[: held.num_rows])
    new = theirs.filter(~np.isin(numbers[held.num_rows :], known))
    for target in sorted(set(new["target"].to_pylist())):
        _write(into, target, new)
    rows = len(np.unique(numbers))
    return Gathered(rows, new.num_rows, disagreeing(both), len(results.names(into)))


def compact(folder: Folder) -> Gathered:
    """Make one file a target of a data set's files.

    The new files are there before the old ones are deleted, and only files whose rows were read are: who is
    stopped in between leaves copies, which readers drop, and what others append meanwhile stays.

    Raises:
      UsageError: the folder is not there, or a file is not of the schema. MachineError: a bucket refuses.
    """
    names = results.names(folder)
    parts = results.tables(folder, results.schema(), only=names or None)
    table = _together(parts)
    rows = distinct(table)
    targets = sorted(set(rows["target"].to_pylist()))
    if len(parts) > len(targets) or rows.num_rows < table.num_rows:
        kept = {_write(folder, target, rows) for target in targets}
        for name in names:
            if name not in kept:
                folders.delete(folder, name)
    return Gathered(rows.num_rows, 0, disagreeing(rows), len(results.names(folder)))


def _write(folder: Folder, target: str, rows: pa.Table) -> str:
    """The rows of a target as one file, named after its content; returns the name."""
    import pyarrow.compute as pc

    content = results.parquet(rows.filter(pc.equal(rows["target"], target)))
    name = f"rows-{target}-{hashlib.sha256(content).hexdigest()[:32]}.parquet"
    folders.publish(folder, name, content)
    return name


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
    frame = results.read(folder, [*_COUNTED, "latency_us"])
    raw = results.tables(folder, pa.schema([results.schema().field("schema_version")]))
    candidate = [c for c in results.IDENTITY if c not in ("workload_fingerprint", "source", "model")]
    times = frame["time"]
    return {
        "folder": str(folder),
        "files": len(entries),
        "bytes": sum(entry.size for entry in entries),
        "rows": len(frame),
        "superseded": max(0, sum(table.num_rows for table in raw) - len(frame)),
        "keys": len(frame[["target", *results.KEY_COLUMNS]].drop_duplicates()),
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
    import pyarrow as pa

    if form not in FORMATS:
        raise UsageError(f"{form!r} is no format: use {', '.join(FORMATS)}")
    rows = results.rows_of(results.read(folder))
    if form == "parquet":
        return results.parquet(pa.Table.from_pylist(rows, schema=results.schema()))
    for row in rows:
        row["time"] = row["time"].isoformat()
    if form == "json":
        return (json.dumps(rows, indent=1, allow_nan=False) + "\n").encode()
    import csv

    text = io.StringIO()
    writer = csv.DictWriter(text, results.schema().names, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({n: json.dumps(v) if isinstance(v, list) else v for n, v in row.items()})
    return text.getvalue().encode()
