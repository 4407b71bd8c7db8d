"""Whether a table of rows is one that a sweep can have made: rows come from others too, and are not trusted.

What is wrong with one is found here, where the file is still known, and not as a wrong table or a traceback.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from autotune.io.terminal import printable
from autotune.kernel.problem import DTYPE_BITS, LOOP_DEPTHS, MOST, SETTING_RANGES, BlockSizes, TableKey
from autotune.results.schema import CLOCKS, SOURCES, STATUSES, WALL_CLOCK, Status
from autotune.tpu.generations import GENERATIONS, MIB

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

MAX_FILE_ROWS, MAX_FILE_BYTES = 20_000_000, 8 << 30
# The most that a core of any TPU has, by JAX's get_tpu_info_for_chip: v5e's and v6e's VMEM, and all SMEM.
MOST_VMEM_BYTES, MOST_SMEM_BYTES = 128 * MIB, MIB
_WORDS = {
    "target": frozenset(GENERATIONS),
    "source": frozenset(SOURCES),
    "q_dtype": frozenset(DTYPE_BITS),
    "kv_dtype": frozenset(DTYPE_BITS),
    "timer": frozenset({*CLOCKS, None}),
}
_NEEDED = {
    *("schema_version", "target", "source", "q_dtype", "kv_dtype", "status", "time", "workload"),
    *("workload_fingerprint", "jax", "jaxlib", "kernel_fingerprint", "device_kind"),
}
_TEXTS = {*_NEEDED - {"schema_version", "time"}, "libtpu", "model", "host", "autotune"}
# What only a timing has, and what the compiled program says of itself: all of them, or none.
_TIMING = ("timer", "samples_us", "latency_low_us", "latency_high_us")
_PROGRAM = ("cycles", "vmem_used_bytes", "smem_used_bytes")
_OVERFLOWS, _OVERFLOW = (Status.VMEM_OOM, Status.SMEM_OOM), ("needed_bytes", "limit_bytes")
_POWERS = (*TableKey._fields[2:4], *TableKey._fields[5:])
# Read to judge a row, whatever is asked for.
JUDGED_BY = (
    *("target", "source", "status", "device_kind", "model", "latency_us", "chip"),
    *(*_TIMING, *_PROGRAM, *_OVERFLOW, *TableKey._fields, *BlockSizes._fields),
    *("num_q_heads", "num_kv_heads", "pages_per_seq", "vmem_limit_bytes"),
)
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
    "chip": (0, 65536, True),
    "vmem_used_bytes": (1, MOST_VMEM_BYTES, True),
    "smem_used_bytes": (0, MOST_SMEM_BYTES, True),
    "needed_bytes": (0, 2**62, True),
    "limit_bytes": (0, 2**40, True),
}
# Bundles of one loop depth: a listing of as many lines is 100 GB.
MOST_CYCLES = 2**30
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
        if name in _TEXTS and "" in pc.unique(column).to_pylist():
            return f"a row with an empty {name}"
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
            if lengths - {LOOP_DEPTHS} or flat.null_count or _beyond(flat, 0, MOST_CYCLES) is not None:
                return f"a row whose cycles are not {LOOP_DEPTHS} counts"
    if {"status", "latency_us"} <= set(table.column_names):
        # Such as a NaN that pandas has written, as null: the candidate would count as tried, and never win.
        for status in pc.unique(table["status"].filter(pc.is_null(table["latency_us"]))).to_pylist():
            if status == Status.OK:
                return "a row with status=ok and no latency_us"
        for status in pc.unique(table["status"].filter(pc.is_valid(table["latency_us"]))).to_pylist():
            if status != Status.OK:
                return f"a row with status={_short(status)} and a latency_us"
    if {"status", "error"} <= set(table.column_names):
        failed = pc.unique(table["status"].filter(pc.is_valid(table["error"]))).to_pylist()
        if Status.OK in failed:
            return "a row with status=ok and an error"
    if set(JUDGED_BY) <= set(table.column_names):
        rows = _Rows(table)
        for rules in (_of_sources, _of_programs, _of_calls, _of_timings):
            for wrong, said in rules(rows):
                if wrong.any():
                    return said
    return None


def clock_flaw(seconds: float) -> str | None:
    """What a clock says, if rows of that time could not be read back; None if they could.

    seconds: since 1970, as time.time gives them.
    """
    if _TIMES[0] <= seconds * 1e6 <= _TIMES[1]:
        return None
    try:
        return f"{datetime.datetime.fromtimestamp(seconds, datetime.UTC):%Y-%m-%d %H:%M} UTC"
    except (ValueError, OverflowError, OSError):  # of no year that has four digits
        return f"{seconds:.0f} seconds since 1970"


Flags = np.ndarray[Any, np.dtype[np.bool_]]


class _Rows:
    """Questions about each row, answered for all at once."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        self.ok, self.overflow = self.of("status", [Status.OK]), self.of("status", _OVERFLOWS)
        # Others are a later version's, of which no more is known than that they have no latency.
        self.known = self.of("status", STATUSES)
        self.measured, self.modelled, self.interpreted = (self.of("source", [s]) for s in SOURCES)

    def of(self, name: str, values: Collection[str]) -> Flags:
        import pyarrow as pa
        import pyarrow.compute as pc

        column = self.table[name]
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        found: Flags = pc.is_in(column, value_set=pa.array(list(values), column.type)).to_numpy()
        return found

    def has(self, name: str) -> Flags:
        import pyarrow.compute as pc

        found: Flags = pc.is_valid(self.table[name]).to_numpy()
        return found

    def number(self, name: str) -> Any:
        """The values of a column of numbers, 0 where there is none."""
        import pyarrow.compute as pc

        return pc.fill_null(self.table[name], 0).to_numpy()

    def innermost(self) -> Any:
        """Cycles of the innermost loop, -1 where a row has none."""
        import pyarrow.compute as pc

        return pc.fill_null(pc.list_element(self.table["cycles"], LOOP_DEPTHS - 1), -1).to_numpy()


Rules = Iterator[tuple[Flags, str]]


def _of_sources(rows: _Rows) -> Rules:
    """What each source writes, and what it does not."""
    timed = rows.ok & ~rows.modelled
    yield rows.modelled & ~rows.has("model"), "a modelled row without model"
    yield ~rows.modelled & rows.has("model"), "a model in a row that is not modelled"
    for name in (*_TIMING, "chip"):
        yield timed & ~rows.has(name), f"a timed row without {name}"
        yield rows.modelled & rows.has(name), f"a modelled row with {name}"
    for name in _TIMING:
        yield ~rows.ok & rows.has(name), f"a row that is not ok with {name}"
    yield (
        rows.interpreted & rows.has("timer") & ~rows.of("timer", [WALL_CLOCK]),
        ("an interpreted row with a device's clock"),
    )
    yield (
        rows.interpreted & ~rows.of("device_kind", ["cpu"]),
        "an interpreted row of another device than a cpu",
    )
    for generation in GENERATIONS.values():
        wrong = rows.of("target", [generation.name]) & ~rows.of("device_kind", generation.device_kinds)
        yield wrong & ~rows.interpreted, f"a row for {generation} of another device_kind"


def _of_programs(rows: _Rows) -> Rules:
    """What is known of a compiled program, and of one that does not fit."""
    whole = [rows.has(name) for name in _PROGRAM]
    yield np.any(whole, axis=0) & ~np.all(whole, axis=0), f"a row with some of {', '.join(_PROGRAM)} only"
    yield rows.modelled & rows.ok & ~whole[0], "a modelled row that is ok without cycles"
    compiled = rows.ok | rows.of("status", [Status.SMEM_OOM]) | ~rows.known
    if whole[0].any():
        yield rows.innermost() == 0, "a row whose KV block takes no cycle"
    limits = rows.number("vmem_limit_bytes")
    yield (
        rows.ok & (limits > 0) & (rows.number("vmem_used_bytes") > limits),
        "a row that is ok with more VMEM than its own limit",
    )
    yield rows.modelled & ~compiled & whole[0], "a row of a program that did not compile, with cycles"
    needed, limit = (rows.has(name) for name in _OVERFLOW)
    yield needed != limit, f"a row with one of {' and '.join(_OVERFLOW)} only"
    yield needed & rows.known & ~rows.overflow, "a row with needed_bytes that is no overflow"
    yield rows.modelled & rows.overflow & ~needed, "an overflow without needed_bytes"
    yield (
        needed & (rows.number("needed_bytes") < rows.number("limit_bytes")),
        ("an overflow that needs less than its limit"),
    )


def _of_calls(rows: _Rows) -> Rules:
    """A row is of the very call that its key stands for, padded as a look-up pads it."""
    key = {name: rows.number(name) for name in TableKey._fields[2:]}
    for name in _POWERS:
        yield key[name] & (key[name] - 1) != 0, f"a row whose {name} is no power of two"
    yield key["head_dim"] % 128 != 0, "a row whose head_dim is no multiple of 128"
    for name in ("num_q_heads", "num_kv_heads"):
        yield rows.number(name) != key[f"{name}_per_blk"], f"a row whose {name} is not that of its key"
    yield (
        key["num_q_heads_per_blk"] % key["num_kv_heads_per_blk"] != 0,
        ("a row whose query heads are no multiple of its KV heads"),
    )
    pages = rows.number("pages_per_seq")
    yield (
        pages != np.maximum(1, key["max_model_len"] // key["page_size"]),
        ("a row whose pages_per_seq is not that of its key"),
    )
    may_exceed = rows.of("status", [Status.INVALID]) | ~rows.known
    for name, most in zip(BlockSizes._fields, (pages, key["max_num_batched_tokens"]), strict=True):
        yield (rows.number(name) > most) & ~may_exceed, f"a row whose {name} is larger than its call"


def _of_timings(rows: _Rows) -> Rules:
    """The median of the samples, with an interval out of them."""
    import pyarrow.compute as pc

    timed = rows.has("samples_us")
    if not timed.any():
        return
    low, middle, high = (rows.number(f"latency{end}_us")[timed] for end in ("_low", "", "_high"))
    yield (low > middle) | (middle > high), "a row whose latency_us is not within its interval"
    samples = rows.table["samples_us"].filter(timed)
    count = pc.list_value_length(samples).to_numpy()
    yield count == 0, "a timed row without a sample"
    row = np.repeat(np.arange(len(count)), count)
    values = pc.list_flatten(samples).to_numpy()
    values = values[np.lexsort((values, row))]
    start = np.cumsum(count) - count
    found = (values[start + (count - 1) // 2] + values[start + count // 2]) / 2
    device = ~rows.of("timer", [WALL_CLOCK])[timed]
    yield device & (values[start] <= 0), "a device's clock with a sample that is not above zero"
    yield (
        ~np.isclose(middle, found, rtol=1e-9, atol=1e-9),
        "a row whose latency_us is not the median of its samples",
    )
    yield (
        (low < values[start]) | (high > values[start + count - 1]),
        "a row whose interval is not of its samples",
    )


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
