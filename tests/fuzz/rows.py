"""Rows for fuzzing: sound files of them, and sound parquet with wild values or another schema."""

from __future__ import annotations

import datetime
import functools
import io
import math
import random
from typing import Any

from autotune.kernel.problem import SETTING_RANGES, BlockSizes, Layout, Program
from autotune.results import dataset, schema
from autotune.tpu.compiler import Compiled
from autotune.tpu.schedule import Schedule
from tests.factories import make_row

_POWERS = [sign << bits for bits in (31, 32, 40, 50, 62) for sign in (1, -1)]
_INTEGERS = (
    0,
    1,
    -1,
    2,
    7,
    8,
    127,
    128,
    65536,
    65537,
    *(power + by for power in _POWERS for by in (-1, 0, 1)),
)
_FLOATS = (0.0, -0.0, 1.0, -1.0, math.nan, math.inf, -math.inf, 1e-320, 1e-7, 1e308, -1e15, 1e15, 0.1)
_TEXTS = (
    *(
        "",
        "v6e",
        "v4",
        "ok",
        "measured",
        "modelled",
        "interpreted",
        "mixed",
        "bfloat16",
        "int4",
        "vmem_oom",
        "crashed",
    ),
    *(
        "\x1b[31mred",
        "a\nb",
        "\x00",
        "\u202e",
        "[/red]",
        "[bold]",
        "</script><script>",
        "=1+1",
        "../../etc",
        "x" * 5000,
    ),
    *("TPU v6 lite", "{}", "%s", "nan", "\ufeff", "\ud7ff", "'\""),
)
# By column, the ends of what the reader of rows takes, where the rest of a row may stay as it is: so what
# comes behind the reader gets odd values too.
_SIZES = (1, 2, 1 << 20)
_TAKEN: dict[str, tuple[Any, ...]] = {
    **{
        name: tuple(text for text in _TEXTS if text)
        for name in (
            *("workload", "workload_fingerprint", "jax", "jaxlib", "libtpu", "autotune"),
            *("kernel_fingerprint", "model", "host", "error"),
        )
    },
    **{name: (None, *ends) for name, ends in SETTING_RANGES.items()},
    "max_num_seqs": (1, 65536),
    "num_kv_pages_per_blk": (1, 3, 16),
    "num_queries_per_blk": (1, 33, 1024),
    "latency_us": (1e-6, 0.1, 1e15),
    "cycles": ([0, 0, 0, 0], [0, 0, 0, 2**30], [2**30] * 4),
    "vmem_used_bytes": _SIZES,
    "smem_used_bytes": (0, *_SIZES),
    "needed_bytes": (1 << 26, 2**62),
    "limit_bytes": (0, 1 << 27),
    "compile_seconds": (0.0, 1e-320, 1e9),
    "chip": (0, 65536),
    "time": (946_684_800_000_000, 7_258_118_400_000_000),
}


def program(pages: int = 4) -> Program:
    layout = Layout(
        q_dtype="bfloat16", kv_dtype="bfloat16", num_q_heads=8, num_kv_heads=2, head_dim=128, page_size=128
    )
    return Program(layout=layout, blocks=BlockSizes(pages, 32))


def verdict() -> Compiled:
    return Compiled(status="ok", schedule=Schedule((60, 280, 27, 1645), 1 << 20, 4096), seconds=3.5)


def as_row(found: Compiled) -> bytes:
    """A row of a verdict out of the store, as a sweep records it: what the schema does not take raises."""
    import pyarrow as pa

    schedule = found.schedule
    values: dict[str, Any] = {
        "needed_bytes": found.needed_bytes,
        "limit_bytes": found.limit_bytes,
        "error": found.error,
        "compile_seconds": found.seconds,
        "latency_us": 1.0 if found.status == "ok" else None,
    }
    if schedule is not None:
        values |= {
            "cycles": list(schedule.cycles),
            "vmem_used_bytes": schedule.vmem_bytes,
            "smem_used_bytes": schedule.smem_bytes,
        }
    table = pa.Table.from_pylist([make_row(status=found.status, **values)], schema=schema.arrow())
    if wrong := dataset.flaw(table, schema.SCHEMA_VERSION):
        raise AssertionError(f"a verdict that makes {wrong}")
    return dataset.parquet(table)


def some() -> list[dict[str, Any]]:
    """Some rows of each kind."""
    schedule = {
        "cycles": [60, 280, 27, 1645],
        "vmem_used_bytes": 1 << 20,
        "smem_used_bytes": 4096,
        "compile_seconds": 2.0,
    }
    timed = {
        "samples_us": [10.5, 11.0, 11.5],
        "timer": "device trace",
        "chip": 0,
        "model": None,
        "source": "measured",
    }
    return [
        make_row(latency_us=10.0, **schedule),
        make_row(16, minute=1, latency_us=12.5, **schedule),
        make_row(16, 64, status="vmem_oom", needed_bytes=1 << 27, limit_bytes=1 << 26, error="too large"),
        make_row(8, minute=2, latency_us=11.0, latency_low_us=10.5, latency_high_us=11.5, **timed),
    ]


def files() -> list[bytes]:
    """Small data sets: one whole, one with the columns that any must have alone, one without rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    whole = pa.Table.from_pylist(some(), schema=schema.arrow())
    needed = [
        *schema.IDENTITY,
        *dataset.ALWAYS,
        "latency_us",
        "num_q_heads",
        "num_kv_heads",
        "pages_per_seq",
        "device_kind",
        "cycles",
        "vmem_used_bytes",
        "smem_used_bytes",
    ]
    plain = io.BytesIO()
    pq.write_table(whole.select(needed).slice(0, 2), plain, compression="none", store_schema=False)
    return [dataset.parquet(whole), plain.getvalue(), dataset.parquet(whole.slice(0, 0))]


@functools.cache
def _sound() -> Any:
    import pyarrow as pa

    return pa.Table.from_pylist(some(), schema=schema.arrow())


def wild(rng: random.Random) -> bytes:
    """Sound parquet: half of them of values that no sweep makes, or with columns of
    other types, and half of values that are odd and may be a sweep's."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = _sound().slice(0, rng.choice((1, 2, 4, 4)))
    odd = rng.random() < 0.5
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at = table.column_names.index(rng.choice(list(_TAKEN))) if odd else rng.randrange(table.num_columns)
        field = table.schema.field(at)
        values = (
            table[field.name].cast(pa.int64()) if pa.types.is_timestamp(field.type) else table[field.name]
        )
        cells = values.to_pylist()
        for line in rng.sample(range(len(cells)), rng.randrange(1, len(cells) + 1)):
            if not odd:
                cells[line] = _value(rng, field.type)
            elif cells[line] is not None or None in _TAKEN[field.name]:
                cells[line] = rng.choice(_TAKEN[field.name])
        table = table.set_column(at, field, pa.array(cells, field.type))
    for _ in range(0 if odd else rng.choice((0, 0, 0, 1, 2))):
        table = _reshaped(rng, table)
    out = io.BytesIO()
    pq.write_table(
        table,
        out,
        compression=rng.choice(("zstd", "none", "snappy")),
        use_dictionary=rng.random() < 0.7,
        store_schema=rng.random() < 0.7,
    )
    return out.getvalue()


def _value(rng: random.Random, kind: Any) -> Any:
    import pyarrow as pa

    if rng.random() < 0.15:
        return None
    if pa.types.is_list(kind):
        return [_value(rng, kind.value_type) for _ in range(rng.choice((0, 1, 3, 4, 4, 5)))]
    if pa.types.is_timestamp(kind):
        return rng.choice((-(2**63), 2**63 - 1, 0, -1, 10**15, 10**17, 253402300800 * 10**6, 2**62))
    if pa.types.is_integer(kind):
        low = -(2 ** (kind.bit_width - 1))
        return max(low, min(-low - 1, rng.choice(_INTEGERS)))
    return rng.choice(_FLOATS if pa.types.is_floating(kind) else _TEXTS)


def _reshaped(rng: random.Random, table: Any) -> Any:
    """The table with a column dropped, doubled, renamed or of another type."""
    import pyarrow as pa

    at = rng.randrange(table.num_columns)
    name, length = table.column_names[at], table.num_rows
    what = rng.randrange(5)
    if what == 0:
        return table.remove_column(at)
    if what == 1:
        return table.append_column(name, table.column(at))
    if what == 2:
        names = list(table.column_names)
        names[at] = rng.choice((*_TEXTS, "time", "status"))
        return table.rename_columns(names)
    array = rng.choice(
        (
            lambda: pa.nulls(length),
            lambda: pa.array([1.5] * length),
            lambda: pa.array(["7"] * length),
            lambda: pa.array([b"\xff\xfe"] * length),
            lambda: pa.array([[[1]]] * length),
            lambda: pa.array([{"a": 1}] * length),
            lambda: pa.array([True] * length),
            lambda: pa.array([2**63] * length, pa.uint64()),
            lambda: pa.array([datetime.date(2026, 1, 1)] * length),
            lambda: pa.array([[("a", 1)]] * length, pa.map_(pa.string(), pa.int64())),
            lambda: pa.array([5] * length, pa.duration("s")),
            lambda: pa.array([1] * length, pa.decimal128(38, 0)),
            lambda: pa.array([253402300800] * length, pa.timestamp("s")),
            lambda: pa.array(["x"] * length).dictionary_encode(),
            lambda: pa.array([[math.nan]] * length),
            lambda: pa.array([b"\xff"] * length).cast(pa.string(), safe=False),
        )
    )
    return table.set_column(at, name, array())
