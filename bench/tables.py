"""Seconds and memory to load and to compare tables of 100,000 rows, in each dialect.

    python bench/tables.py

The peer is Python's own `ast.literal_eval` on the same literal. Exits with 1 if a load takes over 10 seconds.
"""

from __future__ import annotations

import ast
import itertools
import resource
import sys
import tempfile
import time
from pathlib import Path

from autotune.analysis import diff
from autotune.kernel.problem import BlockSizes, TableKey
from autotune.tables import load
from autotune.tables.dialects import DIALECTS, INFERENCE, JAX, SGLANG, Dialect
from autotune.tables.keys import SglangKey, inference_key
from autotune.tables.source import render
from autotune.tables.table import Table

ROWS = 100_000
MOST_SECONDS = 10.0


def rows(dialect: Dialect, offset: int) -> dict[tuple[object, ...], BlockSizes]:
    """100,000 rows with distinct keys; another offset changes a third of the values."""
    powers = [1 << i for i in range(13)]
    shapes = itertools.product(range(1, 33), (1, 2, 4, 8), (128, 256), powers[4:9], powers, powers)
    out: dict[tuple[object, ...], BlockSizes] = {}
    for number, (q, kv, dim, page, tokens, length) in enumerate(itertools.islice(shapes, ROWS)):
        dtypes = ("bfloat16", "bfloat16")
        if dialect is JAX:
            key: tuple[object, ...] = TableKey(*dtypes, q, kv, dim, page, tokens, length)
        elif dialect is SGLANG:
            key = SglangKey(*dtypes, q, kv, dim, page, tokens * 8192 + length)
        else:
            key = inference_key(*dtypes, q, kv, dim, page, length, tokens)
        out[key] = BlockSizes(16, 32 + (offset if number % 3 == 0 else 0))
    return out


def main() -> int:
    slowest = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for dialect in DIALECTS.values():
            name = "TPU v6e"
            paths = []
            for offset in (0, 32):
                path = Path(folder) / f"{dialect}-{offset}.py"
                path.write_text(render(Table(dialect=dialect, devices={name: rows(dialect, offset)})))
                paths.append(path)
            start = time.perf_counter()
            tables = [load(str(path)) for path in paths]
            loaded = (time.perf_counter() - start) / 2
            start = time.perf_counter()
            [device] = diff.compare(*tables)
            diff.dimensions(tables[0], device)
            compared = time.perf_counter() - start
            assert (len(tables[0]), len(device.changed)) == (ROWS, len(range(0, ROWS, 3)))
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            size = paths[0].stat().st_size / 1e6
            print(
                f"{dialect!s:14} {size:5.1f} MB: load {loaded:5.2f} s, compare {compared:5.2f} s, "
                f"peak memory so far {peak:5.0f} MB"
            )
            slowest = max(slowest, loaded, compared)
        text = (Path(folder) / f"{INFERENCE}-0.py").read_text()
    text = text[text.index("= {") + 2 :]
    start = time.perf_counter()
    ast.literal_eval(text)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"ast.literal_eval of the {INFERENCE} one: {time.perf_counter() - start:.2f} s, peak {peak:.0f} MB")
    return 0 if slowest <= MOST_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
