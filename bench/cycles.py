"""The cycle data set: the compiler's schedule of every program behind JAX's published tables.

    python -m bench.cycles --target v6e [--jobs 1]

compiles what bench/data/cycles_<target>.parquet lacks, the programs of reachable keys first and cheap ones
before dear ones, and adds it; stop it at any moment. The whole set is about ten CPU hours a target.

Programs are compiled at the real head counts of the published keys, also where no look-up reaches a key:
its winner was timed all the same. Candidates and VMEM limit are those with which the tables were made:
{4, 8, 16} pages by {32, 64, 128, 256} queries, 100 MiB.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

import pandas as pd

from autotune.compile.local_pool import CompilePool
from autotune.compile.pool import Task
from autotune.io.files import whole
from autotune.kernel.jax_rpa.call import published_table
from autotune.kernel.jax_rpa.tiling import is_canonical
from autotune.kernel.problem import BlockSizes, Layout, Program, Settings, TableKey
from autotune.results.schema import Tools
from autotune.search.space import expected_compile_seconds
from autotune.tpu import generations
from autotune.tpu.generations import MIB

DATA = Path(__file__).parent / "data"
PAGES, QUERIES = (4, 8, 16), (32, 64, 128, 256)
LAYOUT_COLUMNS = ["q_dtype", "kv_dtype", "num_q_heads", "num_kv_heads", "head_dim", "page_size"]
PROGRAM_COLUMNS = [*LAYOUT_COLUMNS, *BlockSizes._fields]
KEPT = 20  # results between two writes of the file


def candidates(key: TableKey) -> list[BlockSizes]:
    """The block sizes among which a published winner was chosen."""
    return [BlockSizes(p, q) for p in PAGES if p <= key.pages_per_seq for q in QUERIES]


@functools.cache
def reachable(key: TableKey) -> bool:
    """Whether any call of the kernel looks this key up."""
    return is_canonical(key)


def programs() -> dict[tuple[object, ...], bool]:
    """Every program of the published keys, by PROGRAM_COLUMNS; whether a reachable key needs it."""
    found: dict[tuple[object, ...], bool] = {}
    for table in published_table().values():
        for key in table:
            for blocks in candidates(key):
                program = (*key[:6], *blocks)
                found[program] = found.get(program, False) or reachable(key)
    return found


def path(target: str) -> Path:
    return DATA / f"cycles_{target}.parquet"


def read(target: str) -> pd.DataFrame:
    """The data set of a target, one line a program: PROGRAM_COLUMNS, status, cycles, seconds, versions."""
    columns = [*PROGRAM_COLUMNS, "status", "cycles", "compile_seconds", "jax", "libtpu"]
    return pd.read_parquet(path(target)) if path(target).exists() else pd.DataFrame(columns=columns)


def write(target: str, frame: pd.DataFrame) -> None:
    frame = frame.sort_values(PROGRAM_COLUMNS, ignore_index=True)
    with whole(path(target)) as file:
        frame.to_parquet(file, index=False, compression="zstd")


def program_of(line: tuple[object, ...]) -> Program:
    return Program(
        layout=Layout(**dict(zip(LAYOUT_COLUMNS, line[:6], strict=True))),  # type: ignore[arg-type]
        blocks=BlockSizes(*line[6:]),  # type: ignore[arg-type]
        settings=Settings(vmem_limit_bytes=100 * MIB),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", choices=list(generations.GENERATIONS), required=True)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=3600.0)
    parser.add_argument("--reachable", action="store_true", help="only the programs of reachable keys")
    args = parser.parse_args()
    frame, wanted, tools = read(args.target), programs(), Tools.installed()
    done = set(frame[PROGRAM_COLUMNS].itertuples(index=False, name=None))
    missing = [line for line in wanted if line not in done and (wanted[line] or not args.reachable)]
    missing.sort(key=lambda line: (not wanted[line], expected_compile_seconds(program_of(line))))
    print(f"{len(wanted)} programs, {len(done)} there, {len(missing)} to compile", flush=True)
    lines = {Task(args.target, program_of(line)): line for line in missing}
    added: list[dict[str, object]] = []
    try:
        with CompilePool(args.jobs, args.timeout) as pool:
            waiting = iter(lines)
            for task, verdict in pool.run(lambda: next(waiting, None)):
                added.append(
                    {
                        **dict(zip(PROGRAM_COLUMNS, lines[task], strict=True)),
                        "status": verdict.status,
                        "cycles": list(verdict.schedule.cycles) if verdict.schedule else None,
                        "compile_seconds": verdict.seconds,
                        "jax": tools.jax,
                        "libtpu": tools.libtpu,
                    }
                )
                if len(added) % KEPT == 0:
                    write(args.target, pd.concat([frame, pd.DataFrame(added)]))
    finally:
        if added:
            write(args.target, pd.concat([frame, pd.DataFrame(added)]))


if __name__ == "__main__":
    main()
