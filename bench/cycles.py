"""The cycle data set: the compiler's schedule of every program behind JAX's published tables.

    python -m bench.cycles --target v6e [--jobs 1]

compiles what bench/data/cycles_<target>.parquet lacks, cheap programs before dear ones, and adds it; stop it
at any moment. The whole set is about five CPU hours a target.

Candidates and VMEM limit are those with which the tables were made: {4, 8, 16} pages by {32, 64, 128, 256}
queries, up to 128 pages where a winner has more than 16, and 100 MiB. Keys that no look-up reaches are left
out.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

import pandas as pd

from autotune.compile.local_pool import CompilePool
from autotune.compile.pool import Task
from autotune.io.files import whole
from autotune.kernel.jax_rpa.tiling import is_canonical
from autotune.kernel.problem import BlockSizes, Layout, Program, Settings, TableKey
from autotune.results.schema import Tools
from autotune.search.space import expected_compile_seconds
from autotune.tpu import generations
from autotune.tpu.generations import MIB

DATA = Path(__file__).parent / "data"
PAGES, QUERIES = (4, 8, 16), (32, 64, 128, 256)
WIDE_PAGES = (4, 8, 16, 32, 64, 128)  # of some keys of the tables of April and June
LAYOUT_COLUMNS = ["q_dtype", "kv_dtype", "num_q_heads", "num_kv_heads", "head_dim", "page_size"]
PROGRAM_COLUMNS = [*LAYOUT_COLUMNS, *BlockSizes._fields]
KEPT = 20  # results between two writes of the file


def candidates(key: TableKey, winner: BlockSizes) -> list[BlockSizes]:
    """The block sizes among which a published winner was chosen: of up to 128 pages where it has over 16."""
    pages = WIDE_PAGES if winner.num_kv_pages_per_blk > max(PAGES) else PAGES
    return [BlockSizes(p, q) for p in pages if p <= key.pages_per_seq for q in QUERIES]


@functools.cache
def reachable(key: TableKey) -> bool:
    """Whether any call of the kernel looks this key up."""
    return is_canonical(key)


def programs(target: str) -> set[tuple[object, ...]]:
    """Every program of the reachable keys of a target's published tables, by PROGRAM_COLUMNS."""
    from bench.fidelity import published

    return {
        (*key[:6], *blocks)
        for table in published(target).values()
        for key, winner in table.items()
        for blocks in candidates(key, winner)
    }


def path(target: str) -> Path:
    return DATA / f"cycles_{target}.parquet"


def read(target: str) -> pd.DataFrame:
    """The data set of a target, one line a program: PROGRAM_COLUMNS, status, cycles, seconds, versions."""
    columns = [*PROGRAM_COLUMNS, "status", "cycles", "compile_seconds", "jax", "libtpu"]
    return pd.read_parquet(path(target)) if path(target).exists() else pd.DataFrame(columns=columns)


def known(target: str) -> dict[tuple[object, ...], tuple[int, ...] | None]:
    """Cycles by loop depth of each program, by PROGRAM_COLUMNS; None where it does not compile."""
    frame = read(target)[[*PROGRAM_COLUMNS, "status", "cycles"]]
    return {
        tuple(line[:-2]): tuple(map(int, line[-1])) if line[-2] == "ok" else None
        for line in frame.itertuples(index=False, name=None)
    }


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
    args = parser.parse_args()
    frame, wanted, tools = read(args.target), programs(args.target), Tools.installed()
    done = set(frame[PROGRAM_COLUMNS].itertuples(index=False, name=None))
    missing = sorted(wanted - done, key=lambda line: expected_compile_seconds(program_of(line)))
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
