"""A million rows of 40,000 keys: winners and the emitted table, against a plain pandas groupby, in one run.

    python bench/rows.py [--rows 1000000]

Each contender reads the same data set in a process of its own, so that its peak memory is its own. The peer
is what one writes by hand: read the parquet with pandas, keep what is ok, take the geometric mean of the
latency over the workloads and the smallest of each key.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from autotune.kernel.problem import NO_SETTINGS, BlockSizes, Program, TableKey
from autotune.kernel.workload import Sequence, Workload
from autotune.results import schema

WORKLOADS = ("mixed", "decode-heavy", "prefill-heavy")
CANDIDATES = [BlockSizes(pages, queries) for pages in (4, 8, 16, 32) for queries in (32, 64)]


def make(folder: Path, count: int) -> int:
    """A data set of at least `count` rows, whole keys only, in files of 100,000; returns its rows."""
    per_key = len(CANDIDATES) * len(WORKLOADS)
    keys = -(-count // per_key)
    rng = np.random.default_rng(0)
    template = schema.row(
        target="v6e",
        device_kind="TPU v6 lite",
        key=(key := TableKey("bfloat16", "bfloat16", 8, 2, 128, 128, 1024, 2048)),
        problem=key.canonical_problem(),
        program=Program(layout=key.canonical_problem().layout, blocks=CANDIDATES[0], settings=NO_SETTINGS),
        workload=Workload("mixed", (Sequence(1, 1),)),
        source="modelled",
        status="ok",
        tools=schema.Tools("1", "1", "1", "x"),
        model="m",
        cycles=[60, 280, 27, 1645],
        smem_used_bytes=4096,
    )
    rows = keys * per_key
    key_number = np.repeat(np.arange(keys), per_key)
    candidate = np.tile(np.repeat(np.arange(len(CANDIDATES)), len(WORKLOADS)), keys)
    workload = np.tile(np.arange(len(WORKLOADS)), keys * len(CANDIDATES))
    failed = rng.random(rows) < 0.02
    columns = {
        # Canonical keys that hold every candidate: 22 numbers of tokens, 20 lengths, 2**7 dims.
        "max_num_batched_tokens": 1 << 6 + key_number % 22,
        "max_model_len": 1 << 12 + key_number // 22 % 20,
        "pages_per_seq": 1 << 5 + key_number // 22 % 20,
        "head_dim": 128 * (1 + key_number // 440),
        "num_kv_pages_per_blk": np.array([c[0] for c in CANDIDATES])[candidate],
        "num_queries_per_blk": np.array([c[1] for c in CANDIDATES])[candidate],
        "workload": np.array(WORKLOADS)[workload],
        "workload_fingerprint": np.array(WORKLOADS)[workload],
        "latency_us": np.where(failed, np.nan, rng.uniform(100, 200, rows)),
        "vmem_used_bytes": pa.array(rng.integers(1 << 20, 1 << 24, rows), mask=failed),
        "smem_used_bytes": pa.array(np.full(rows, 4096), mask=failed),
        "cycles": pa.array([None if bad else template["cycles"] for bad in failed], pa.list_(pa.int64())),
        "needed_bytes": pa.array(np.full(rows, 2), mask=~failed),
        "limit_bytes": pa.array(np.full(rows, 1), mask=~failed),
        "status": np.where(failed, "vmem_oom", "ok"),
    }
    folder.mkdir(parents=True)
    for number, start in enumerate(range(0, rows, 100_000)):
        size = min(100_000, rows - start)
        arrays = [
            _array(columns[field.name][start : start + size]).cast(field.type)
            if field.name in columns
            else pa.array([template[field.name]] * size, field.type)
            for field in schema.arrow()
        ]
        pq.write_table(pa.table(arrays, schema=schema.arrow()), folder / f"rows-{number}.parquet")
    return rows


def _array(values: np.ndarray | pa.Array) -> pa.Array:
    return values if isinstance(values, pa.Array) else pa.array(values, from_pandas=True)


OURS = """
from pathlib import Path
from autotune.results import dataset, winners
from autotune.results.rows import blocks_of, keys_of
lines = winners.choose(winners.scores(dataset.read(Path(FOLDER), winners.READ_COLUMNS)))
best = {tuple(k[4:]): tuple(b) for k, b in zip(keys_of(lines), blocks_of(lines))}
"""
EMIT = """
from pathlib import Path
from autotune import emit
best = {0: len(str(emit.emit(emit.read(Path(FOLDER)), allow_modelled=True)))}
"""
PEER = """
import numpy as np, pandas as pd
frame = pd.read_parquet(FOLDER)
key = ["q_dtype", "kv_dtype", "num_q_heads_per_blk", "num_kv_heads_per_blk", "head_dim", "page_size",
       "max_num_batched_tokens", "max_model_len"]
blocks = ["num_kv_pages_per_blk", "num_queries_per_blk"]
frame = frame.sort_values("time").drop_duplicates([*key, *blocks, "workload_fingerprint"], keep="last")
frame = frame[frame["status"] == "ok"]
frame["log"] = np.log(frame["latency_us"])
mean = frame.groupby([*key, *blocks])["log"].agg(["mean", "size"]).reset_index()
mean = mean[mean["size"] == 3]
lines = mean.loc[mean.groupby(key)["mean"].idxmin()]
best = {(*k, ): (p, q) for *k, p, q in zip(*(lines[c] for c in [*key[4:], *blocks]))}
"""
_MEASURED = """
import json, resource, time
start = time.perf_counter()
{code}
seconds = time.perf_counter() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
import hashlib
digest = hashlib.sha256(json.dumps(sorted((str(k), str(v)) for k, v in best.items())).encode()).hexdigest()
print(json.dumps(dict(seconds=seconds, peak_mib=peak, keys=len(best), digest=digest)))
"""


def run(code: str, folder: Path) -> dict[str, float | str]:
    script = _MEASURED.format(code=code.replace("FOLDER", repr(str(folder))))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    found: dict[str, float | str] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "rows"
        print(f"{make(folder, arguments.rows):,} rows")
        best: dict[str, list[float]] = {}
        digests = {}
        # Interleaved, so that whatever else the machine does hits all alike.
        for _ in range(arguments.repeats):
            for name, code in (("winners", OURS), ("pandas groupby", PEER), ("emit", EMIT)):
                found = run(code, folder)
                best.setdefault(name, []).append(float(found["seconds"]))
                digests[name] = found["digest"]
                print(
                    f"{name:15} {found['seconds']:6.2f} s  {found['peak_mib']:6.0f} MiB  {found['keys']} keys"
                )
        assert digests["winners"] == digests["pandas groupby"], "the two disagree on a winner"
        ratio = min(best["winners"]) / min(best["pandas groupby"])
        print(f"winners / pandas groupby: {ratio:.2f} (best of {arguments.repeats}); the same winners")


if __name__ == "__main__":
    main()
