"""A row: its columns, what tells it from others, and how one is made."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import functools
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autotune.kernel.problem import BlockSizes, Problem, Program, Settings, TableKey
from autotune.kernel.workload import Workload

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA_VERSION = 1

SOURCES = ("measured", "modelled", "interpreted")


class Status(enum.StrEnum):
    """What became of a candidate; only OK has a latency."""

    OK = "ok"
    VMEM_OOM = "vmem_oom"
    SMEM_OOM = "smem_oom"
    COMPILE_ERROR = "compile_error"
    INVALID = "invalid"  # the kernel refuses the shape
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    WRONG_RESULT = "wrong_result"


STATUSES = tuple(Status)

# What the column `timer` says.
KERNEL_EVENTS = "device trace"
MODULE_EVENTS = "device trace of the whole program"  # the trace has no event of the kernel itself
WALL_CLOCK = "wall clock"
# The most trusted first. Rows of two clocks are never compared.
CLOCKS = (KERNEL_EVENTS, MODULE_EVENTS, WALL_CLOCK)

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
def arrow() -> pa.Schema:
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
