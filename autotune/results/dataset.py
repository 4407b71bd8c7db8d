"""The parquet data set of a sweep: one row a (target, key, block sizes, workload, source), failures included.

A data set is a folder, of this machine or of a bucket. Each append publishes a new file beside the others,
there whole or not at all, so any number of sweeps on any number of hosts may append at once. Rows are never
changed: the newest of two rows with one identity counts, and reading drops the others.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import time
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from autotune.errors import AutotuneError, MachineError, UsageError, first_line
from autotune.io import files, folders
from autotune.io.folders import Folder, RemoteFile
from autotune.io.terminal import printable
from autotune.results import schema
from autotune.results.codes import codes
from autotune.results.validate import JUDGED_BY, clock_flaw, flaw, oversize

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

# When rows were made that new ones are to replace, by identity.
Replaced = Mapping[tuple[Any, ...], datetime.datetime]

_TEXT = [name for name, kind, _ in schema.COLUMNS if kind == "string"]

# Read whatever columns are asked for: what a row is known by, and what says whether it can be one.
ALWAYS = ("schema_version", "status", "time", "workload", "latency_us")
# A reader lists the folder again until it shows nothing new: what it listed may have been compacted since
# into a file that it has not seen, and a listing in mid-compaction may hold neither the old file nor the new.
_LISTINGS = 20


def append(folder: Folder, rows: Iterable[Mapping[str, Any]]) -> str | None:
    """Add rows to a data set, all or none of them; they are there to stay when this returns.

    Returns the name of their file, None where there are no rows.

    Raises:
      UsageError: the folder cannot be made or written. MachineError: its bucket does not take them, or they
        are rows that `read` would refuse.
    """
    import pyarrow as pa

    table = pa.Table.from_pylist([dict(r) for r in rows], schema=schema.arrow())
    if not table.num_rows:
        return None
    name = f"rows-{uuid.uuid4().hex}.parquet"
    folders.publish(folder, name, parquet(table))
    return name


def newer(rows: Iterable[Mapping[str, Any]], replaced: Replaced) -> list[dict[str, Any]]:
    """Rows, those that replace others made newer than these: a clock may have gone back since."""
    made = [dict(filled) for filled in rows]
    for filled in made if replaced else ():
        older = replaced.get(schema.identity(filled))
        if older and older >= filled["time"]:
            filled["time"] = older + datetime.timedelta(microseconds=1)
    return made


def remove_abandoned(folder: Folder) -> None:
    """Remove what killed sweeps left half done, in a folder of this machine and among temporary files."""
    files.tidy()
    if isinstance(folder, Path):
        files.remove_abandoned(folder, files.HIDDEN)


def require_clock() -> None:
    """Raises MachineError where rows made now could not be read back, as this machine's clock is wrong."""
    if said := clock_flaw(time.time()):
        raise MachineError(
            f"this machine's clock says {said}, and results are kept with times from 2000 to 2200: set the "
            "clock, such as by `sudo timedatectl set-ntp true`, then type the same command again"
        )


def parquet(table: pa.Table) -> bytes:
    """Rows as the content of a file.

    Raises:
      MachineError: they are rows that `read` would refuse.
    """
    import pyarrow.parquet as pq

    if wrong := flaw(table, schema.SCHEMA_VERSION):
        require_clock()
        raise MachineError(
            f"a result that autotune itself could not read back ({wrong}) was not written; what is recorded "
            "so far is kept: please report this, with the command"
        )
    content = io.BytesIO()
    # Without checksums, one flipped bit in eleven gives other rows, and no error.
    pq.write_table(table, content, compression="zstd", write_page_checksum=True)
    return content.getvalue()


def names(folder: Folder) -> list[str]:
    """The files of a data set, sorted; none where there is no folder.

    Raises:
      MachineError: its bucket cannot be listed. UsageError: rows that are no file, such as a dangling link.
    """
    folders.require_files(folder, "rows-", ".parquet")
    return [entry.name for entry in folders.entries(folder) if entry.name.endswith(".parquet")]


def _names(folder: Folder) -> list[str]:
    found = names(folder)
    if not found and not folder.is_dir():
        what = "is no folder" if folder.exists() else "does not exist"
        raise UsageError(f"results folder {str(folder)!r} {what}: `autotune sweep --out` makes one")
    return found


def tables(folder: Folder, wanted: pa.Schema, only: Collection[str] | None = None) -> list[pa.Table]:
    """Every row of a data set, doubles included, a table a file; text is dictionary-encoded.

    wanted: a part of the schema. only: the files to read; those that are gone by now are passed over.

    Raises:
      UsageError: as `read`.
    """
    return list(by_file(folder, wanted, only).values())


def by_file(
    folder: Folder, wanted: pa.Schema, only: Collection[str] | None = None, *, others: bool = False
) -> dict[str, pa.Table]:
    """As `tables`, by the names of the files. others: with the columns that are not of this schema."""
    found: dict[str, pa.Table] = {}
    for listing in range(_LISTINGS if only is None else 1):
        new = [name for name in (_names(folder) if only is None else sorted(only)) if name not in found]
        if listing and not new:
            break
        for file in folders.files(folder, new):
            with contextlib.suppress(FileNotFoundError):  # its rows are in another file by now
                found[file.name] = _table(file, wanted, others)
    return found


def _table(path: Path | RemoteFile, wanted: pa.Schema, others: bool) -> pa.Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    judged = [field for field in schema.arrow() if field.name in JUDGED_BY and field.name not in wanted.names]
    known = pa.schema([*wanted, *judged])
    try:
        # An open handle, for a name ending in .parquet would else be looked at as a data set.
        with path.open("rb") as handle:
            file = pq.ParquetFile(handle)
            held = file.schema_arrow.names
            if larger := oversize(file.metadata):
                raise UsageError(f"{str(path)!r} holds {larger}: move it out of the folder")
            if "schema_version" not in held or len(set(held)) < len(held):
                raise UsageError(f"{str(path)!r} holds no rows of a sweep: move it out of the folder")
            present = [name for name in known.names if name in held]
            text = [name for name in _TEXT if name in present]  # the same few words in every row: held once
            file = pq.ParquetFile(
                handle, metadata=file.metadata, read_dictionary=text, page_checksum_verification=True
            )
            table = file.read(columns=None if others else present).replace_schema_metadata()
        for field in known:
            if field.name not in present:
                table = table.append_column(field, pa.nulls(table.num_rows, field.type))
        beyond = [f.remove_metadata() for f in table.schema if others and f.name not in schema.arrow().names]
        table = table.select([*known.names, *(field.name for field in beyond)])
        table = table.cast(pa.schema([*_encoded(known), *beyond]))
        table.validate(full=True)  # such as text that is not UTF-8, which is met only when it is shown
        if wrong := flaw(table, schema.SCHEMA_VERSION):
            raise UsageError(f"{str(path)!r} holds {wrong}: move it out of the folder")
        return table.select([*wanted.names, *(field.name for field in beyond)])
    except (FileNotFoundError, AutotuneError):
        raise
    except Exception as error:  # pyarrow has no class over all that it raises of a file that is not sound
        said = first_line(error)[:200]
        raise UsageError(
            f"{str(path)!r} cannot be read as parquet rows ({printable(said)}): move it out of the folder"
        ) from None


def together(parts: Iterable[pa.Table], wanted: pa.Schema) -> pa.Table:
    """Tables that have the columns of a schema, in one piece; those beyond it by name, after them.

    Raises:
      UsageError: two files have a column of one name and of types that are not one.
    """
    import pyarrow as pa

    whole = [wanted.empty_table(), *parts]
    beyond = sorted({name for part in whole for name in part.column_names} - set(wanted.names))
    try:
        table = pa.concat_tables(whole, promote_options="permissive")
    except pa.ArrowException as error:
        raise UsageError(
            "the files differ in the type of a column that this autotune does not know "
            f"({printable(first_line(error))[:200]}), and none of it is dropped: use the version that wrote "
            "them"
        ) from None
    # In one piece: taking rows out of many is slow.
    return _takeable(table.select([*wanted.names, *beyond]), beyond).unify_dictionaries().combine_chunks()


def _takeable(table: pa.Table, beyond: Sequence[str]) -> pa.Table:
    """The table with views, of which Arrow cannot take rows, as what they view.

    Raises:
      UsageError: a column is of a type that no row can be taken of.
    """
    import pyarrow as pa

    plain = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}
    for name in beyond:
        column = table[name]
        try:
            if column.type in plain:
                number = table.column_names.index(name)
                table = table.set_column(number, name, column.cast(plain[column.type]))
            table[name].slice(0, 1).take([0] if table.num_rows else [])
        except pa.ArrowNotImplementedError:
            raise UsageError(
                f"the column {printable(name)!r}, which this autotune does not know, is of the type "
                f"{column.type}, of which no row can be taken: use the version that wrote it"
            ) from None
    return table


def read(
    folder: Folder, columns: Sequence[str] | None = None, only: Collection[str] | None = None
) -> pd.DataFrame:
    """The rows of a data set, the newest of each identity, in an order that the files' names do not change.

    columns: those to read, IDENTITY and ALWAYS among them in any case; all by default. only: the files to
    read, by name; all by default.

    Raises:
      UsageError: no such folder, or a file in it that is not of this schema; the message names it.
      MachineError: the bucket cannot be read.
    """
    import pyarrow as pa

    wanted = schema.arrow()
    if columns is not None:
        wanted = pa.schema([f for f in wanted if f.name in {*columns, *schema.IDENTITY, *ALWAYS}])
    table = newest(together(tables(folder, wanted, only), _encoded(wanted)))
    frame: pd.DataFrame = table.cast(wanted).to_pandas(
        types_mapper=_nullable_types().get, ignore_metadata=True
    )
    return frame


def newest(table: pa.Table) -> pa.Table:
    """Of rows with one identity the newest, in the order of their identities."""
    code = codes(table, schema.IDENTITY)
    order = np.argsort(code, kind="stable")
    if (code[order][1:] == code[order][:-1]).any():
        made = table["time"].to_numpy().view(np.int64)
        order = np.lexsort((made, code))
        if ((code[order][1:] == code[order][:-1]) & (made[order][1:] == made[order][:-1])).any():
            # Of one moment, on two hosts: which one counts must not hang on the names of files.
            tied = [name for name in ("status", "latency_us") if name in table.column_names]
            order = np.lexsort((codes(table, tied), made, code))
    code = code[order]
    return table.take(order[np.append(code[1:] != code[:-1], True)] if len(order) else order)


def _encoded(wanted: pa.Schema) -> pa.Schema:
    """The schema with its text as dictionaries: see `read`."""
    import pyarrow as pa

    text = pa.dictionary(pa.int32(), pa.string())
    return pa.schema([f.with_type(text) if f.name in _TEXT else f for f in wanted])


def _nullable_types() -> dict[pa.DataType, Any]:
    """Whole numbers and text that may be missing stay what they are: no 100.0 for a limit in bytes."""
    import pandas as pd
    import pyarrow as pa

    return {pa.int64(): pd.Int64Dtype(), pa.int32(): pd.Int32Dtype(), pa.string(): pd.StringDtype("pyarrow")}
