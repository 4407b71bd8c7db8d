"""How far estimates of compile time are off: of each program alone, and of a whole sweep replayed.

    python -m bench.estimate [--jobs 2] [DIR ...]

Each folder holds rows of `autotune sweep --target ... --preset published`. The default,
bench/data/idle_v6e, has a row a program from such a sweep on an idle machine with two cores (jax 0.10.2,
libtpu 0.0.42.1, December 2026). The rows behind the committed tables come from busy machines, where
compiles take several times as long.

In the replay the search is asked what to compile, and answered by the rows after the seconds that each
compile took. At several shares of the whole time, the estimate of the whole (what has passed and what is
left by it) is set against it.
"""

from __future__ import annotations

import argparse
import heapq
import statistics
from pathlib import Path
from typing import NamedTuple

import numpy as np

from autotune import sweep
from autotune.cli.eta import START_SECONDS, seconds_left, seconds_of
from autotune.kernel.problem import Settings
from autotune.keys import presets
from autotune.model.calibrate import current
from autotune.results import dataset, schema
from autotune.results.rows import program_of, rows_of
from autotune.search.plan import Planner, Request, known
from autotune.search.space import expected_compile_seconds
from autotune.tpu import generations
from autotune.tpu.compiler import Compiled

IDLE = Path(__file__).parent / "data" / "idle_v6e"
SHARES = (0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)


class Moment(NamedTuple):
    """elapsed, left: seconds that have passed, and that are said to be left."""

    elapsed: float
    left: float


def replay(folder: Path, jobs: int) -> tuple[str, int, list[Moment]]:
    """The target, the programs, and the moments at which a verdict came."""
    frame = dataset.read(folder)
    first = rows_of(frame.head(1))[0]
    generation = generations.by_name(first["target"])
    tools = schema.Tools(*(first[name] for name in schema.TOOL_COLUMNS))
    request = Request(
        generation=generation,
        keys=presets.keys("published"),
        settings=Settings(vmem_limit_bytes=first["vmem_limit_bytes"]),
    )
    verdicts = known(request, frame, tools)[1]
    search = sweep.search_for(request, Planner(request, None, tools, current(generation).version).plan())
    moments = [Moment(0.0, seconds_left(START_SECONDS, 0.0, search.outlook().seconds, jobs))]
    running: list[tuple[float, int]] = []
    started = []
    now = done = 0.0
    while True:
        while len(running) < jobs and (program := search.next()):
            # Of few programs, whose order the busy machine's clock decided, there is no row.
            verdict = verdicts.get(program) or Compiled(
                status="crashed", seconds=expected_compile_seconds(program)
            )
            heapq.heappush(running, (now + (verdict.seconds or 0.0), len(started)))
            started.append((program, verdict))
        if not running:
            return generation.name, len(started), moments
        now, number = heapq.heappop(running)
        program, verdict = started[number]
        done += seconds_of(expected_compile_seconds(program), verdict.status == "ok", verdict.seconds)
        search.tell(program, verdict)
        moments.append(Moment(now, seconds_left(now + START_SECONDS, done, search.outlook().seconds, jobs)))


def single(folder: Path) -> str:
    """Of programs that compiled: the estimate over what it took, and how many are off by over 3 times."""
    ratios = []
    for row in rows_of(dataset.read(folder)):
        if row["status"] == "ok" and row["compile_seconds"]:
            ratios.append(expected_compile_seconds(program_of(row)) / row["compile_seconds"])
    least, low, median, high, most = (np.percentile(ratios, p) for p in (0, 5, 50, 95, 100))
    off = sum(not 1 / 3 <= ratio <= 3 for ratio in ratios)
    return (
        f"{len(ratios)} compiles, estimate over time {median:.2f} (90%: {low:.2f} to {high:.2f}, "
        f"all: {least:.2f} to {most:.2f}), {off} off by over 3 times"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", type=Path, metavar="DIR")
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    folders = arguments.folders or [IDLE]
    for folder in folders:
        print(f"{folder}: {single(folder)}")
    print("estimate of the whole / the whole, after a share of it")
    print(f"{'':5} programs  seconds " + "".join(f"{share:8.0%}" for share in SHARES))
    errors: list[list[float]] = []
    for folder in folders:
        name, programs, moments = replay(folder, arguments.jobs)
        whole = moments[-1].elapsed
        at = [next(m for m in moments if m.elapsed >= share * whole) for share in SHARES]
        ratios = [(m.elapsed + m.left) / whole for m in at]
        print(f"{name:5} {programs:8} {whole:8.0f} " + "".join(f"{ratio:8.2f}" for ratio in ratios))
        errors.append([abs(ratio - 1) for ratio in ratios])
    medians = [statistics.median(column) for column in zip(*errors, strict=True)]
    print(f"{'median error':23} " + "".join(f"{error:8.0%}" for error in medians))


if __name__ == "__main__":
    main()
