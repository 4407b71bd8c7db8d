"""How long a device waits for the compiler, with and without compiling ahead.

    python bench/device_busy.py [--jobs 2] [--keys 3]

Real compiles for v6e, of the smoke preset's smaller layout; a device that is stood in for by a sleep of the
predicted latency times a number of repeats, such that timing a candidate takes as long as compiling one, on
average. Where timing takes longer nothing is hard; where it takes much less no order of compiles can keep a
device busy.

Both sides have the schedules already, compile the same executables, and give the device the same work. `one
after the other` is what a script does that calls jax.jit on a candidate, times it, and goes on to the next.
Printed is the share of the time after the first executable in which the device had nothing to do.
"""

from __future__ import annotations

import argparse
import dataclasses
import queue
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from autotune import device_sweep, results, sweep
from autotune.calibrate import current
from autotune.devices import Devices, Timing
from autotune.kernel.inputs import pool_pages
from autotune.kernel.problem import BlockSizes, TableKey
from autotune.known import Known
from autotune.measure import Slot
from autotune.plan import Request
from autotune.progress import CompileProgress
from autotune.search import Outlook
from autotune.shortlist import geometric_mean
from autotune.tpu import chips
from autotune.tpu.executable import Call, Executable
from autotune.tpu.session import Loaded, Timed
from autotune.tpu.statistics import FEWEST_SAMPLES, StoppingRule
from autotune.tpu.trace import WALL_CLOCK
from autotune.workers import CompilePool

TIMEOUT = 600.0
TOP = 4


class Sleeper:
    """A device on which a call lasts `repeats` times its predicted latency; it says when it was busy."""

    chip = 0
    device_kind = "sleep"

    def __init__(self, latency: Callable[[BlockSizes], float], repeats: float) -> None:
        self.latency, self.repeats = latency, repeats
        self.first = self.last = 0.0
        self.busy = 0.0

    def prepare(self, *arguments: object) -> None:
        pass

    def load(self, blocks: BlockSizes, payload: bytes | None) -> Loaded:
        self.first = self.first or time.monotonic()
        return Loaded("ok", None, compiled=False)

    def time(self, workload: int, order: Sequence[BlockSizes]) -> Timed:
        seconds: dict[BlockSizes, list[float]] = {}
        start = time.monotonic()
        for blocks in order:
            lasts = self.latency(blocks) * self.repeats
            time.sleep(lasts)
            seconds.setdefault(blocks, []).append(lasts)
        self.last = time.monotonic()
        self.busy += self.last - start
        return Timed(seconds, WALL_CLOCK, None)

    def close(self) -> None:
        pass

    @property
    def waited(self) -> float:
        """The share of the time after the first executable in which there was nothing to do."""
        return 1 - self.busy / (self.last - self.first)


def keys(count: int) -> tuple[TableKey, ...]:
    """Keys that share their programs and not their executables, whose shapes differ."""
    base = TableKey("bfloat16", "bfloat16", 4, 1, 128, 64, 1024, 2048)
    return tuple(base._replace(max_num_batched_tokens=1024 << number) for number in range(count))


def with_schedules(request: Request, folder: Path, jobs: int) -> None:
    plan = sweep.load(folder, request, None)
    search = sweep.search_for(request, plan)
    progress = CompileProgress(search.outlook(), jobs)
    sweep.run(request, plan, search, None, folder, jobs, TIMEOUT, progress)


def ahead(request: Request, folder: Path, jobs: int, device: Sleeper) -> None:
    timing = Timing(source=results.MEASURED, device_kind="sleep", rule=StoppingRule(precision=0.5), top=TOP)
    plan = sweep.load(folder, request, None)
    search = sweep.search_for(request, plan)
    devices = Devices(timing, (Slot(0, lambda: device),))
    progress = CompileProgress(Outlook.of(()), jobs)
    device_sweep.run(request, plan, search, None, folder, jobs, TIMEOUT, devices, progress)


def compiled(calls: Sequence[Call], jobs: int) -> float:
    """Seconds that a compile takes on average, `jobs` at once."""
    done: queue.SimpleQueue[Executable] = queue.SimpleQueue()
    with CompilePool(jobs, TIMEOUT) as pool:
        for call in calls:
            pool.submit_ahead(call, done.put)
        verdicts = [done.get().verdict for _ in calls]
    assert all(verdict.status == "ok" for verdict in verdicts), verdicts
    return sum(verdict.seconds or 0.0 for verdict in verdicts) / len(verdicts)


def one_after_the_other(calls: Sequence[Call], device: Sleeper) -> None:
    done: queue.SimpleQueue[Executable] = queue.SimpleQueue()
    with CompilePool(1, TIMEOUT) as pool:
        for call in calls:
            pool.submit_ahead(call, done.put)
            done.get()
            device.load(call.blocks, None)
            device.time(0, [call.blocks] * FEWEST_SAMPLES)


def shortlisted(request: Request, folder: Path) -> tuple[list[Call], dict[BlockSizes, float]]:
    """The executables that are timed, in order, and the predicted seconds of each pair."""
    known = Known(request, results.MEASURED, results.Tools.installed(), current(request.generation).version)
    known.read(results.read(folder))
    calls, latency = [], {}
    for key in request.keys:
        problem = key.canonical_problem(request.max_num_seqs)
        plan = sweep.load(folder, dataclasses.replace(request, keys=(key,)), None)
        batches = next(trial.workloads for _, trials in plan.known.values() for trial in trials)
        names = {batch.fingerprint for batch in batches}
        ranking = known.ranking(key, names)
        for blocks in dict.fromkeys([*ranking[:TOP], *(b for b in plan.incumbents[key] if b)]):
            pages = pool_pages(problem, batches)
            calls.append(
                Call(
                    target=request.generation.name,
                    problem=problem,
                    total_num_pages=pages,
                    blocks=blocks,
                    settings=request.settings,
                )
            )
        for blocks in ranking:
            predicted = known.predicted(key, blocks)
            latency[blocks] = geometric_mean([predicted[name] for name in names]).median
    return calls, latency


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--keys", type=int, default=3)
    arguments = parser.parse_args()
    request = Request(generation=chips.V6E, keys=keys(arguments.keys), workloads=("mixed",))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with_schedules(request, folder, arguments.jobs)
        calls, latency = shortlisted(request, folder)
        middle = sorted(latency.values())[len(latency) // 2]

        def seconds(blocks: BlockSizes) -> float:
            return latency.get(blocks, middle)

        compile_seconds = compiled(calls, arguments.jobs)
        # All samples of a candidate together then last as long as its compile, on average.
        total = sum(seconds(call.blocks) for call in calls) / len(calls)
        repeats = compile_seconds / (total * FEWEST_SAMPLES)
        print(f"{len(calls)} executables of {arguments.keys} keys, {compile_seconds:.2f} s each to compile")
        plain = Sleeper(seconds, repeats)
        one_after_the_other(calls, plain)
        ours = Sleeper(seconds, repeats)
        ahead(request, folder, arguments.jobs, ours)
        print(f"{'':22} device waits   device busy")
        for title, device in (("one after the other", plain), ("compiling ahead", ours)):
            print(f"{title:22} {device.waited:11.1%}   {device.busy:9.1f} s")


if __name__ == "__main__":
    main()
