"""The parquet data set of a sweep: one row a (target, key, block sizes, workload, source), failures included.

A data set is a folder, of this machine or of a bucket. Each append publishes a new file beside the others,
there whole or not at all, so any number of sweeps on any number of hosts may append at once. Rows are never
changed: the newest of two rows with one identity counts, and reading drops the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import io
import socket
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
from autotune.kernel.problem import BlockSizes, Problem, Program, Settings, TableKey
from autotune.kernel.workload import Workload
from autotune.results.codes import codes
from autotune.results.validate import JUDGED_BY, SOURCES, STATUSES, clock_flaw, flaw, oversize

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

SCHEMA_VERSION = 1

MEASURED, MODELLED, INTERPRETED = SOURCES

# (name, arrow type, meaning): the schema, and the table in docs/results.md, which a test compares with this.
COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("schema_version", "int32", f"version of this schema: {SCHEMA_VERSION}"),
    ("target", "string", "TPU generation compiled for or attached: v4, v5e, v5p, v6e, v7x"),
    ("q_dtype", "string", "key: dtype of the queries"),
    ("kv_dtype", "string", "key: dtype of the KV pages"),
    ("num_q_heads_per_blk", "int64", "key: query heads of a block, a power of two"),
    ("num_kv_heads_per_blk", "int64", "key: KV heads of a block, a power of two"),
    ("head_dim", "int64", "key: head dimension, a multiple of 128"),
    ("page_size", "int64", "key: tokens of a page"),
    ("max_num_batched_tokens", "int64", "key: tokens of a batch"),
    ("max_model_len", "int64", "key: page_size * pages_per_seq"),
    ("num_q_heads", "int64", "problem: query heads of the call"),
    ("num_kv_heads", "int64", "problem: KV heads of the call"),
    ("pages_per_seq", "int64", "problem: columns of the page table"),
    ("max_num_seqs", "int64", "problem: rows of the page table"),
    ("num_kv_pages_per_blk", "int64", "candidate: KV pages of a block"),
    ("num_queries_per_blk", "int64", "candidate: queries of a block"),
    ("sliding_window", "int64", "static argument of the kernel, null if not given"),
    ("soft_cap", "float64", "static argument of the kernel, null if not given"),
    ("k_scale", "float64", "static argument of the kernel, null if not given"),
    ("v_scale", "float64", "static argument of the kernel, null if not given"),
    ("vmem_limit_bytes", "int64", "static argument of the kernel, null for the compiler's own limit"),
    ("workload", "string", "name of the ragged batch, or the path of its CSV file"),
    ("workload_fingerprint", "string", "hash of its (q_len, kv_len) pairs"),
    ("source", "string", "where latency_us comes from: measured, modelled or interpreted"),
    ("status", "string", "ok, or why there is no latency: " + ", ".join(STATUSES[1:])),
    ("latency_us", "float64", "microseconds of one call: the median if measured; null unless ok"),
    ("latency_low_us", "float64", "lower end of the interval of the median, null unless timed"),
    ("latency_high_us", "float64", "upper end of the interval of the median, null unless timed"),
    ("samples_us", "list<float64>", "every timing, microseconds, null unless timed"),
    ("timer", "string", "what timed it: device trace or wall clock, null unless timed"),
    ("chip", "int64", "index of the chip that timed it on its host, null unless timed"),
    ("cycles", "list<int64>", "bundles of the schedule by loop depth: call, query block, visit, KV block"),
    ("vmem_used_bytes", "int64", "VMEM that the program allocates, spills included"),
    ("smem_used_bytes", "int64", "SMEM that the program allocates at its compile shape"),
    ("needed_bytes", "int64", "of an overflow: what the program needs; a lower bound if not compiled"),
    ("limit_bytes", "int64", "of an overflow: what there is"),
    ("compile_seconds", "float64", "wall time of the compile, null if this row needed none"),
    ("jax", "string", "version of jax"),
    ("jaxlib", "string", "version of jaxlib"),
    ("libtpu", "string", "version of libtpu"),
    ("autotune", "string", "version of this tool"),
    ("kernel_fingerprint", "string", "hash of the kernel's source"),
    ("model", "string", "version of the cost model and its calibration, null unless modelled"),
    ("device_kind", "string", "as the compile target's or the attached device spells it"),
    ("host", "string", "name of the host that made the row"),
    ("time", "timestamp[us, UTC]", "when the row was made"),
    ("error", "string", "first line of what went wrong, null if ok"),
)

KEY_COLUMNS = list(TableKey._fields)
BLOCK_COLUMNS = list(BlockSizes._fields)
SETTING_COLUMNS = [field.name for field in dataclasses.fields(Settings)]
# Rows with different tools are different measurements: an update of jax or libtpu tunes anew.
TOOL_COLUMNS = ["jax", "jaxlib", "libtpu", "kernel_fingerprint"]
IDENTITY = [
    "target",
    *KEY_COLUMNS,
    "max_num_seqs",
    *BLOCK_COLUMNS,
    *SETTING_COLUMNS,
    "workload_fingerprint",
    "source",
    "model",
    *TOOL_COLUMNS,
]


@functools.cache
def schema() -> pa.Schema:
    """COLUMNS as an arrow schema; every column may hold nulls, so that older files stay readable."""
    import pyarrow as pa

    types = {
        "int32": pa.int32(),
        "int64": pa.int64(),
        "float64": pa.float64(),
        "string": pa.string(),
        "list<float64>": pa.list_(pa.float64()),
        "list<int64>": pa.list_(pa.int64()),
        "timestamp[us, UTC]": pa.timestamp("us", tz="UTC"),
    }
    return pa.schema([pa.field(name, types[kind]) for name, kind, _ in COLUMNS])


@dataclasses.dataclass(frozen=True)
class Tools:
    """Versions of what makes a row; part of its identity."""

    jax: str
    jaxlib: str
    libtpu: str | None
    kernel_fingerprint: str

    @classmethod
    def installed(cls) -> Tools:
        """Those of this environment."""
        from importlib.metadata import version

        from autotune.io import installed
        from autotune.kernel.jax_rpa import call

        return cls(version("jax"), version("jaxlib"), installed.libtpu_version(), call.fingerprint())


def row(
    *,
    target: str,
    device_kind: str,
    key: TableKey,
    problem: Problem,
    program: Program,
    workload: Workload,
    source: str,
    status: str,
    tools: Tools,
    **values: Any,
) -> dict[str, Any]:
    """One row; `values` are further columns, those not given are null.

    Raises:
      KeyError: a value's name is no column.
    """
    import autotune

    filled: dict[str, Any] = dict.fromkeys(name for name, _, _ in COLUMNS)
    filled.update(
        schema_version=SCHEMA_VERSION,
        target=target,
        device_kind=device_kind,
        num_q_heads=problem.num_q_heads,
        num_kv_heads=problem.num_kv_heads,
        pages_per_seq=problem.pages_per_seq,
        max_num_seqs=problem.max_num_seqs,
        workload=workload.name,
        workload_fingerprint=workload.fingerprint,
        source=source,
        status=status,
        autotune=autotune.__version__,
        host=socket.gethostname(),
        time=datetime.datetime.now(datetime.UTC),
        **key._asdict(),
        **program.blocks._asdict(),
        **dataclasses.asdict(program.settings),
        **dataclasses.asdict(tools),
    )
    for name, value in values.items():
        if name not in filled:
            raise KeyError(f"{name} is no column of a row")
        filled[name] = value
    return filled


def identity(filled: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tells a row from others: two rows with one identity are the same candidate, made twice."""
    return tuple(filled[name] for name in IDENTITY)


# When rows were made that new ones are to replace, by identity.
Replaced = Mapping[tuple[Any, ...], datetime.datetime]

_TEXT = [name for name, kind, _ in COLUMNS if kind == "string"]

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

    table = pa.Table.from_pylist([dict(r) for r in rows], schema=schema())
    if not table.num_rows:
        return None
    name = f"rows-{uuid.uuid4().hex}.parquet"
    folders.publish(folder, name, parquet(table))
    return name


def newer(rows: Iterable[Mapping[str, Any]], replaced: Replaced) -> list[dict[str, Any]]:
    """Rows, those that replace others made newer than these: a clock may have gone back since."""
    made = [dict(filled) for filled in rows]
    for filled in made if replaced else ():
        older = replaced.get(identity(filled))
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

    if wrong := flaw(table, SCHEMA_VERSION):
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

    judged = [field for field in schema() if field.name in JUDGED_BY and field.name not in wanted.names]
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
        beyond = [f.remove_metadata() for f in table.schema if others and f.name not in schema().names]
        table = table.select([*known.names, *(field.name for field in beyond)])
        table = table.cast(pa.schema([*_encoded(known), *beyond]))
        table.validate(full=True)  # such as text that is not UTF-8, which is met only when it is shown
        if wrong := flaw(table, SCHEMA_VERSION):
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
    return table.select([*wanted.names, *beyond]).unify_dictionaries().combine_chunks()


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

    wanted = schema()
    if columns is not None:
        wanted = pa.schema([f for f in wanted if f.name in {*columns, *IDENTITY, *ALWAYS}])
    table = newest(together(tables(folder, wanted, only), _encoded(wanted)))
    frame: pd.DataFrame = table.cast(wanted).to_pandas(
        types_mapper=_nullable_types().get, ignore_metadata=True
    )
    return frame


def newest(table: pa.Table) -> pa.Table:
    """Of rows with one identity the newest, in the order of their identities."""
    code = codes(table, IDENTITY)
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


def rows_of(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The frame's rows as plain Python values, None where a value is missing."""
    import pyarrow as pa

    names = [name for name in schema().names if name in frame.columns]
    part = pa.schema([schema().field(name) for name in names])
    return pa.Table.from_pandas(frame[names], schema=part, preserve_index=False).to_pylist()
