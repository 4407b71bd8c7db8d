"""Whether a table of rows is one that a sweep can have made: rows come from others too, and are not trusted.

What is wrong with one is found here, where the file is still known, and not as a wrong table or a traceback.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from autotune.kernel.problem import DTYPE_BITS, LOOP_DEPTHS, MOST, SETTING_RANGES, BlockSizes, TableKey
from autotune.terminal import printable
from autotune.tpu.chips import GENERATIONS

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

MAX_FILE_ROWS, MAX_FILE_BYTES = 20_000_000, 8 << 30
_WORDS = {
    "target": frozenset(GENERATIONS),
    "source": frozenset({"measured", "modelled", "interpreted"}),
    "q_dtype": frozenset(DTYPE_BITS),
    "kv_dtype": frozenset(DTYPE_BITS),
}
_NEEDED = {"schema_version", "status", "time", "workload", "workload_fingerprint", *_WORDS}
# Column: (least, most, whether a row may lack it).
_COUNT = (1, MOST, False)
_RANGES: dict[str, tuple[float, float, bool]] = {
    **dict.fromkeys([*TableKey._fields[2:], *BlockSizes._fields], _COUNT),
    **dict.fromkeys(["num_q_heads", "num_kv_heads", "pages_per_seq"], _COUNT),
    "max_num_seqs": (1, 65536, False),
    **{name: (*ends, True) for name, ends in SETTING_RANGES.items()},
    **dict.fromkeys(["latency_us", "latency_high_us"], (1e-6, 1e15, True)),
    # A wall clock's samples are differences, and the lower end of their interval may be below zero.
    "latency_low_us": (-1e15, 1e15, True),
    "compile_seconds": (0, 1e9, True),
    **dict.fromkeys(["vmem_used_bytes", "smem_used_bytes", "needed_bytes", "limit_bytes"], (0, 2**50, True)),
}
_CYCLES = (0, 2**40)
_SAMPLES = (-1e15, 1e15)
# Microseconds since 1970: 2000 to 2200, which every calendar on the way can hold.
_TIMES = (946_684_800_000_000, 7_258_118_400_000_000)


def oversize(metadata: pq.FileMetaData) -> str | None:
    """How much a parquet file holds, in a few words, if that is more than is read; None if it is not.

    A few bytes of parquet may stand for any number of rows.
    """
    groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
    unpacked = sum(group.total_byte_size for group in groups)
    if metadata.num_rows <= MAX_FILE_ROWS and unpacked <= MAX_FILE_BYTES:
        return None
    return f"{metadata.num_rows} rows, {unpacked} bytes unpacked, more than is read of one file"


def flaw(table: pa.Table, schema_version: int) -> str | None:
    """The first thing that is wrong with the rows, in a few words; None if all could be a sweep's.

    table: rows with those columns of the schema that are to be read.
    """
    import pyarrow.compute as pc

    if not table.num_rows:
        return None
    for version in pc.unique(table["schema_version"]).to_pylist():
        if version != schema_version:
            return f"rows of schema version {version}, where this autotune reads {schema_version}"
    for name in table.column_names:
        column = table[name]
        if name in _NEEDED and column.null_count:
            return f"a row without {name}"
        if name in _WORDS:
            for value in pc.unique(column).to_pylist():
                if value not in _WORDS[name]:
                    return f"a row with {name}={_short(value)}"
        if name in _RANGES:
            least, most, may_lack = _RANGES[name]
            if column.null_count and not may_lack:
                return f"a row without {name}"
            sizes = pc.abs(column) if name == "soft_cap" else column
            if (bad := _beyond(sizes, least, most)) is not None:
                return f"a row with {name}={bad}"
        if name == "time" and _beyond(pc.cast(column, "int64"), *_TIMES) is not None:
            return "a row of a time before 2000 or after 2200"
        if name == "samples_us":
            flat = pc.list_flatten(column)
            if flat.null_count or _beyond(flat, *_SAMPLES) is not None:
                return "a row whose samples_us are not numbers"
        if name == "cycles":
            lengths = set(pc.unique(pc.list_value_length(column)).to_pylist()) - {None}
            flat = pc.list_flatten(column)
            if lengths - {LOOP_DEPTHS} or flat.null_count or _beyond(flat, *_CYCLES) is not None:
                return f"a row whose cycles are not {LOOP_DEPTHS} counts"
    if {"status", "latency_us"} <= set(table.column_names):
        # Such as a NaN that pandas has written, as null: the candidate would count as tried, and never win.
        for status in pc.unique(table["status"].filter(pc.is_null(table["latency_us"]))).to_pylist():
            if status == "ok":
                return "a row with status=ok and no latency_us"
        for status in pc.unique(table["status"].filter(pc.is_valid(table["latency_us"]))).to_pylist():
            if status != "ok":
                return f"a row with status={_short(status)} and a latency_us"
    return None


def _beyond(column: Any, least: float, most: float) -> Any:
    """A value of a column that is not between two numbers, the ends included; None if all are."""
    import pyarrow.compute as pc

    ends = pc.min_max(column).as_py()  # passes over nulls, and over NaN among numbers
    for value in ends.values():
        if value is not None and not least <= value <= most:
            return value
    if column.type in ("double", "float64") and pc.any(pc.is_nan(column)).as_py():
        return math.nan
    return None


def _short(value: object) -> str:
    return printable(str(value))[:40]
