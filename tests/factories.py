"""Rows, tables and sweeps that tests of several packages make."""

from __future__ import annotations

import datetime
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from autotune.kernel.problem import BlockSizes, Program, Settings, TableKey
from autotune.kernel.workload import Sequence, Workload
from autotune.results import dataset, schema, winners
from autotune.results.rows import blocks_of
from autotune.tables.dialects import Dialect
from autotune.tpu.generations import GENERATIONS
from tests.conftest import ROOT, command_line, user_environment

# Rows, and what is made of them.


KEY = TableKey("bfloat16", "bfloat16", 8, 2, 128, 128, 1024, 2048)


TOOLS = schema.Tools("0.10.2", "0.10.2", "0.0.42.1", "abc")


START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def make_row(
    pages: int = 8,
    queries: int = 32,
    *,
    key: TableKey = KEY,
    target: str = "v6e",
    workload: str = "mixed",
    source: str = "modelled",
    status: str = "ok",
    settings: Settings = Settings(),  # noqa: B008
    minute: int = 0,
    tools: schema.Tools = TOOLS,
    **values: Any,
) -> dict[str, Any]:
    problem = key.canonical_problem()
    if status == "ok":
        latency = values.setdefault("latency_us", 1.0)
        if source == "modelled":
            values = {
                "cycles": [60, 280, 27, 1645],
                "vmem_used_bytes": 1 << 20,
                "smem_used_bytes": 4096,
            } | values
        else:
            low = values.setdefault("latency_low_us", latency)
            high = values.setdefault("latency_high_us", latency)
            clock = "wall clock" if source == "interpreted" or low is None or low < 0 else "device trace"
            values = {"samples_us": [low, latency, high], "timer": clock, "chip": 0} | values
    elif status in ("vmem_oom", "smem_oom"):
        values = {"needed_bytes": 2, "limit_bytes": 1} | values
    row = schema.row(
        target=target,
        device_kind="cpu" if source == "interpreted" else GENERATIONS[target].device_kinds[0],
        key=key,
        problem=problem,
        program=Program(layout=problem.layout, blocks=BlockSizes(pages, queries), settings=settings),
        workload=Workload(workload, (Sequence(1, 1 + len(workload)),)),
        source=source,
        status=status,
        tools=tools,
        **{"model": "m1" if source == "modelled" else None, **values},
    )
    row["time"] = START + datetime.timedelta(minutes=minute)
    return row


def frame_of(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Rows as reading them gives them, without the disk."""
    table = pa.Table.from_pylist(rows, schema=schema.arrow())
    return table.to_pandas(types_mapper=dataset._nullable_types().get)


def winner(rows: list[dict[str, Any]], incumbents: list[BlockSizes] | None = None) -> BlockSizes:
    scored = winners.scores(frame_of(rows))
    chosen = winners.choose(scored, {("v6e", KEY): incumbents or []})
    [blocks] = blocks_of(chosen)
    return blocks


# Tables.


PUBLISHED = ROOT / "tests" / "data" / "published"


def published_rows(name: str, dialect: Dialect) -> tuple[dict[str, dict[Any, BlockSizes]], int]:
    """The rows of a public table, and how many there are."""
    rows = json.loads((PUBLISHED / f"{name}.json").read_text())["rows"]
    devices: dict[str, dict[Any, BlockSizes]] = {}
    for device, *key, blocks in rows:
        devices.setdefault(device, {})[dialect.key_type(*key)] = BlockSizes(*blocks)
    return devices, len(rows)


# Sweeps from the command line.


def shape(**changes: object) -> str:
    fields = {
        "q_heads": 4,
        "kv_heads": 1,
        "head_dim": 128,
        "page_size": 16,
        "max_num_batched_tokens": 512,
        "max_model_len": 512,
        **changes,
    }
    return ",".join(f"{name}={value}" for name, value in fields.items())


SWEEP = [
    "sweep",
    "--target",
    "v6e",
    "--shape",
    shape(),
    "--kv-pages",
    "8,16",
    "--queries",
    "32,64",
    "--out",
    "r",
]


def start(tmp_path: Path, path: str, *extra: str) -> subprocess.Popen[str]:
    """Twelve programs, one after the other. path: PYTHONPATH."""
    queries = ",".join(str(q) for q in range(32, 33 + 8 * 11, 8))
    return subprocess.Popen(
        command_line(*SWEEP[:6], "16", "--queries", queries, "--out", "r", "--jobs", "1", *extra),
        cwd=tmp_path,
        env={**user_environment(tmp_path / "cache"), "PYTHONPATH": path},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def wait_for_rows(folder: Path, files: int) -> None:
    deadline = time.monotonic() + 300
    while len(list(folder.glob("*.parquet"))) < files:
        assert time.monotonic() < deadline
        time.sleep(0.02)
