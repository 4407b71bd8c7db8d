"""What an hour on a TPU host buys: the time of a sweep of all published keys, added up without a TPU.

    python -m bench.tpu_hour --target v6e [--chips 4] [--keys 20]

Measured here, on one core: the CPU seconds of every program that the process with the chip compiles, ahead of
time for the topology of one chip; the host's part of inputs and reference; reading a profile. Counted: traces
and calls, by the real scheduling code on a scripted device that answers with the modelled latencies and 1%
of noise, every executable there at once. What only a TPU tells is assumed, and said in the table. The keys,
their candidates and the compiles of the other cores come from the rows that are committed with the table.
Half a minute on one core.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import heapq
import itertools
import math
import multiprocessing
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from autotune.kernel.jax_rpa import inputs
from autotune.kernel.problem import (
    DTYPE_BITS,
    NO_SETTINGS,
    BlockSizes,
    Layout,
    Problem,
    Program,
    Settings,
    TableKey,
)
from autotune.kernel.workload import GENERATORS, Workload, generate, place
from autotune.keys import presets
from autotune.results import dataset, schema
from autotune.results.rows import rows_of
from autotune.search.plan import Planner, Request
from autotune.search.plan import known as verdicts_of
from autotune.search.space import expected_compile_seconds
from autotune.timing.chip_jobs import LEAST_JOBS_AHEAD, WORKERS_PER_JOB_AHEAD
from autotune.timing.device_worker import Timed, Turn
from autotune.timing.history import Known
from autotune.timing.key_timing import Executables, Job, KeyTiming
from autotune.timing.shortlist import Shortlist
from autotune.timing.slot import Slot
from autotune.timing.statistics import StoppingRule
from autotune.timing.timer import MARKS, mark_name
from autotune.tpu import generations
from autotune.tpu.compiler import Compiled, take_environment, target_device
from autotune.tpu.executable import Executable
from tests.timing.scripted import Script, ScriptedDevice

ROWS = Path(__file__).resolve().parent.parent / "autotune" / "tables" / "rows"
CORES_PER_CHIP = 44  # vCPUs of a host with one v6e chip, ct6e-standard-1t; with four 180
NOISE = 0.01
RULE = StoppingRule(precision=0.01, max_seconds=5.0)  # the defaults of `autotune sweep`
TRACE_SECONDS = (0.1, 0.3, 1.0)

# Assumed; no TPU has told.
START_SECONDS = 60.0  # libtpu, twice: to find the TPU and to hold it
LOAD_SECONDS = 0.1  # of one executable
HOST_BYTES_PER_SECOND = 5e9
DISPATCH_SECONDS = 0.0003  # of one call, the wait included

# The keys and what is known of them.


@dataclasses.dataclass(frozen=True)
class Case:
    """A key as a sweep comes to time it.

    ranking, always: of its Shortlist. predicted: seconds by candidate and by the workload's fingerprint.
    latency: alike, of the scripted device; where a candidate of `always` was never modelled, the slowest of
    the key. compile_seconds: of each candidate's program, as it is expected.
    """

    key: TableKey
    ranking: tuple[BlockSizes, ...]
    always: tuple[BlockSizes, ...]
    predicted: dict[BlockSizes, dict[str, float]]
    latency: dict[BlockSizes, dict[str, float]]
    compile_seconds: dict[BlockSizes, float]

    @property
    def problem(self) -> Problem:
        return self.key.canonical_problem()

    @property
    def workloads(self) -> tuple[Workload, ...]:
        return tuple(generate(name, self.problem) for name in GENERATORS)


@dataclasses.dataclass(frozen=True)
class Preset:
    """Published keys of a generation, as its committed rows have them.

    schedules: seconds of one core for each program that a sweep compiles for its schedule.
    """

    target: str
    settings: dict[str, Any]
    cases: tuple[Case, ...]
    schedules: tuple[float, ...]


def published(target: str, keys: Sequence[TableKey] | None = None) -> Preset:
    """The published keys, or some of them, from the rows that are committed with a generation's table."""
    frame = dataset.read(ROWS / target)
    row = rows_of(frame.head(1))[0]
    settings = {name: row[name] for name in schema.SETTING_COLUMNS}
    tools = schema.Tools(**{name: row[name] for name in schema.TOOL_COLUMNS})
    generation = generations.by_name(target)
    request = Request(
        generation=generation,
        keys=tuple(keys or presets.keys("published")),
        settings=Settings(**settings),
    )
    model = row["model"]  # constants may have been fitted anew since
    known = Known(request, schema.MEASURED, tools, model)
    known.read(frame)
    plan = Planner(request, frame, tools, model).plan()
    # As on an idle machine: committed rows were compiled on busy ones, in several times the seconds.
    compiled = verdicts_of(request, frame, tools)[1]
    seconds = [expected_compile_seconds(p) for p, verdict in compiled.items() if verdict.seconds]

    def case(key: TableKey) -> Case:
        layout, batches = key.canonical_problem().layout, workloads_of(key)
        ranking, predicted = known.ranking(key, batches), known.predictions(key)
        slowest = {batch: max(predicted[blocks][batch] for blocks in ranking) for batch in batches}
        program = {
            blocks: Program(layout=layout, blocks=blocks, settings=request.settings)
            for blocks in (*ranking, *filter(None, plan.incumbents[key]))
        }
        # As DeviceSweep has it: what did not compile is not timed, what the model left out is.
        incumbents = (b for b in plan.incumbents[key] if b)
        return Case(
            key=key,
            ranking=ranking,
            always=tuple(b for b in incumbents if b in ranking or program[b] in plan.waiting),
            predicted=predicted,
            latency={b: predicted[b] if b in ranking else slowest for b in program},
            compile_seconds={b: expected_compile_seconds(p) for b, p in program.items()},
        )

    return Preset(target, settings, tuple(map(case, request.keys)), tuple(seconds))


def workloads_of(key: TableKey) -> set[str]:
    """Fingerprints of the workloads of a key."""
    problem = key.canonical_problem()
    return {generate(name, problem).fingerprint for name in GENERATORS}


def sample(cases: Sequence[Case], number: int, seed: int) -> list[Case]:
    """A random sample; a smaller one is the beginning of a larger."""
    return random.Random(seed).sample(list(cases), len(cases))[:number]


# Traces, counted.


class Timing(NamedTuple):
    """What timing a key took. asked: candidates whose executables were compiled. calls: marks included.
    device_seconds: of all calls. reading_seconds: CPU seconds of this machine, for reading the profiles."""

    key: TableKey
    asked: tuple[BlockSizes, ...]
    traces: int
    calls: int
    device_seconds: float
    reading_seconds: float


class Read(ScriptedDevice):
    """Notes how long its profiles take to be read."""

    seconds = 0.0
    _taken = 0.0

    def _profile(self, run: Any) -> bytes:
        profile = super()._profile(run)
        self._taken = time.process_time()
        return profile

    def time(self, order: Sequence[Turn]) -> Timed:
        timed = super().time(order)
        self.seconds += time.process_time() - self._taken
        return timed


def timed(case: Case, settings: Settings, target: str) -> Timing:
    """One key, timed by the real scheduling code."""
    rng = random.Random(f"0 {case.key}")  # as ChipThreads has it
    seed = random.Random(f"noise {case.key}").randrange(1 << 32)
    script = Script(lambda blocks, batch: case.latency[blocks][batch], noise=NOISE, seed=seed)
    device = Read(script)
    asked: list[BlockSizes] = []

    def request(store: Executables, wanted: Sequence[BlockSizes]) -> None:
        asked.extend(wanted)
        for blocks in wanted:
            store.add(blocks, Executable(verdict=Compiled(status="ok"), payload=b""))

    job = Job(
        key=case.key,
        problem=case.problem,
        settings=settings,
        workloads=case.workloads,
        shortlist=Shortlist(case.ranking, case.always),
        target=target,
        predicted=case.predicted,
    )
    found = list(KeyTiming(job, Slot(0, lambda: device), Executables(request), RULE, rng).run())
    assert all(result.status == "ok" for result in found)
    batches = [batch.fingerprint for batch in case.workloads]
    seconds = math.fsum(
        count * case.latency[turn.blocks][batches[turn.workload]]
        for order in script.rounds
        for turn, count in order.items()
    )
    return Timing(case.key, tuple(asked), script.traces, script.calls, seconds, device.seconds)


# Compiles and the host's work, measured in a process of their own.


@contextlib.contextmanager
def measuring() -> Iterator[concurrent.futures.ProcessPoolExecutor]:
    """A process with the environment of one that compiles, and one thread for numpy's products."""
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        concurrent.futures.ProcessPoolExecutor(1, spawn, take_environment, (Path(folder),)) as pool,
    ):
        yield pool


def pool_seconds(target: str, problem: Problem) -> float:
    """CPU seconds of compiling the program that makes a pool."""
    total = inputs.pool_pages(problem, (), interpreted=False)
    shape = inputs.block_shape(problem, total)
    return cpu_seconds(target, functools.partial(inputs.repeated, total=total), shape, problem.kv_dtype)


def mark_seconds(target: str, section: int) -> float:
    """CPU seconds of compiling one mark."""
    from autotune.kernel.jax_rpa.call import named

    return cpu_seconds(target, named(lambda x: x + 1, mark_name(section)), (), "float32")


def cpu_seconds(target: str, function: Any, shape: tuple[int, ...], dtype: str) -> float:
    """CPU seconds of tracing, lowering and compiling a function of one array for one chip."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import SingleDeviceSharding

    device = warm(target)
    argument = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=SingleDeviceSharding(device))
    began = time.process_time()
    with jax.default_device(device):
        jax.jit(function).trace(argument).lower().compile()
    return time.process_time() - began


@functools.cache
def warm(target: str) -> Any:
    """The device to compile for; a first tiny program takes what only the first one does."""
    import jax
    from jax.sharding import SingleDeviceSharding

    device = target_device(generations.by_name(target))
    scalar = jax.ShapeDtypeStruct((), "float32", sharding=SingleDeviceSharding(device))
    with jax.default_device(device):
        jax.jit(lambda x: x - 1).trace(scalar).lower().compile()
    return device


class HostWork(NamedTuple):
    """CPU seconds of one core for one key; mismatch: of one output."""

    pool: float
    queries: float
    reference: float
    mismatch: float


def host_work(key: TableKey) -> HostWork:
    """What InputMaker, the reference and the comparison do on the host, without the pool itself."""
    problem = key.canonical_problem()
    workloads = [generate(name, problem) for name in GENERATORS]
    total = inputs.pool_pages(problem, workloads, interpreted=False)
    clock = [time.process_time()]
    block = inputs._normal(inputs.block_shape(problem, total), problem.kv_dtype, [0, 1])
    kept = block.astype("float32")
    clock.append(time.process_time())
    q = inputs._queries(problem, 0)
    batches = tuple(place(problem, workload, total, 0) for workload in workloads)
    made = inputs.Inputs(batches, (), q, kept)
    clock.append(time.process_time())
    expected = [
        inputs.expected(problem, workload, batch, made, NO_SETTINGS)
        for workload, batch in zip(workloads, batches, strict=True)
    ]
    clock.append(time.process_time())
    for want in expected:
        want.mismatch(q)  # of an output's shape and dtype
    clock.append(time.process_time())
    pool, queries, reference, mismatch = (b - a for a, b in itertools.pairwise(clock))
    return HostWork(pool, queries, reference, mismatch / len(expected))


class Measured(NamedTuple):
    """pools: CPU seconds by layout of the sample. keys: of the sample, by layout. marks: of all of them."""

    pools: dict[Layout, float]
    keys: Counter[Layout]
    marks: float
    host: HostWork


def measured(target: str, cases: Sequence[Case]) -> Measured:
    """The compiles and the host's work of a sample of keys."""
    problems = {pooled(case.problem): case.problem for case in cases}
    with measuring() as process:

        def run(function: Any, *arguments: Any) -> Any:
            return process.submit(function, *arguments).result()

        pools = {layout: run(pool_seconds, target, problem) for layout, problem in problems.items()}
        marks = sum(run(mark_seconds, target, section) for section in range(len(GENERATORS)))
        host = [run(host_work, case.key) for case in cases]
    return Measured(
        pools,
        Counter(pooled(case.problem) for case in cases),
        marks,
        HostWork(*map(mean, zip(*host, strict=True))),
    )


def pooled(problem: Problem) -> Layout:
    """The layout that a pool is of: the queries do not matter."""
    return dataclasses.replace(problem.layout, q_dtype=problem.kv_dtype, num_q_heads=problem.num_kv_heads)


# The account.


class Term(NamedTuple):
    """Something that the process with the chip does. seconds: for all keys. each_chip: every chip's process
    does all of it, not its share. why: how it is known."""

    name: str
    seconds: float
    why: str
    each_chip: bool = False

    def on(self, number: int) -> float:
        """Seconds of one of so many chips."""
        return self.seconds if self.each_chip else self.seconds / number


class Account(NamedTuple):
    """A sweep. executables: of each key, in the order of the sweep, seconds of one core for each executable
    that other processes compile. schedules: alike, of all programs."""

    terms: tuple[Term, ...]
    traces: int
    executables: tuple[tuple[float, ...], ...]
    schedules: tuple[float, ...]

    @property
    def keys(self) -> int:
        return len(self.executables)

    def chain(self, number: int, trace_seconds: float) -> float:
        """Seconds of the process with the chip, of so many."""
        return sum(term.on(number) for term in self.terms) + self.traces * trace_seconds / number

    def rows(self, number: int, costs: Sequence[float]) -> dict[str, float]:
        """Seconds of one of so many chips, by what they go to, then all of them."""
        rows = {term.name: term.on(number) for term in self.terms}
        rows |= {f"traces at {cost:g} s": self.traces * cost / number for cost in costs}
        return rows | {f"all, traces at {cost:g} s": self.chain(number, cost) for cost in costs}

    def compiling(self) -> float:
        """Seconds of one core for all that other processes compile."""
        return sum(self.schedules) + sum(map(sum, self.executables))

    def start(self, cores: int) -> float:
        """Seconds until keys are timed: libtpu's starts, and all schedules, as if none were timed before."""
        return START_SECONDS + sum(self.schedules) / cores

    def sweep(self, number: int, cores: int, trace_seconds: float) -> float:
        """Seconds of the whole; the longest program's schedule and executable come one after the other."""
        a_key = self.chain(number, trace_seconds) * number / self.keys
        timed = pipelined(self.executables, a_key, number, cores)
        return max(self.start(cores) + timed, START_SECONDS + 2 * max(self.schedules))


def pipelined(executables: Sequence[Sequence[float]], a_key: float, number: int, cores: int) -> float:
    """Seconds until all keys are timed, in their order, by so many chips, each taking `a_key` seconds.

    As DeviceSweep and ChipThreads do it: a key's executables are compiled, those of the keys before it first,
    once it is given out, which is so many keys ahead; a chip waits for all executables of its next key.
    """
    window = number + max(LEAST_JOBS_AHEAD, cores // WORKERS_PER_JOB_AHEAD)
    free, idle = [0.0] * cores, [0.0] * number  # from when on, of each core and each chip
    done: list[float] = []
    for nth, programs in enumerate(executables):
        given = sorted(done)[nth - window] if nth >= window else 0.0
        ready = 0.0
        for seconds in programs:
            compiled = max(heapq.heappop(free), given) + seconds
            heapq.heappush(free, compiled)
            ready = max(ready, compiled)
        done.append(max(heapq.heappop(idle), ready) + a_key)
        heapq.heappush(idle, done[-1])
    return max(done)


def account(preset: Preset, timings: Sequence[Timing], found: Measured) -> Account:
    """The terms, and what else is compiled."""
    pools = len({pooled(case.problem) for case in preset.cases})
    host, keys = found.host, len(preset.cases)
    outputs = len(GENERATORS) * sum(len(timing.asked) for timing in timings)
    compiled = pools * mean(found.pools.values()) + found.marks
    terms = (
        Term(
            "compiles: pool, queries, marks",
            compiled,
            f"measured: {pools} pools, kept on disk; 3 marks",
            each_chip=True,
        ),
        Term("values of the pool, host", host.pool * keys, "measured; once a key, if layouts alternate"),
        Term("queries and page tables, host", host.queries * keys, "measured"),
        Term("reference, host", host.reference * keys, "measured, one core"),
        Term("comparing outputs, host", host.mismatch * outputs, "measured"),
        Term("reading profiles", math.fsum(t.reading_seconds for t in timings), "measured, scripted profile"),
        *of_the_chip(preset, timings),
    )
    cases = {case.key: case for case in preset.cases}
    return Account(
        terms,
        sum(timing.traces for timing in timings),
        tuple(tuple(cases[t.key].compile_seconds[blocks] for blocks in t.asked) for t in timings),
        preset.schedules,
    )


def of_the_chip(preset: Preset, timings: Sequence[Timing]) -> tuple[Term, ...]:
    """The terms that a TPU decides."""
    cases = {case.key: case for case in preset.cases}
    candidates = sum(len(timing.asked) for timing in timings)
    first = math.fsum(
        seconds for t in timings for blocks in t.asked for seconds in cases[t.key].latency[blocks].values()
    )
    fetched = sum(len(t.asked) * len(GENERATORS) * query_bytes(cases[t.key].problem) for t in timings)
    put = sum(query_bytes(case.problem) + (32 << 20) for case in preset.cases)
    calls = sum(timing.calls for timing in timings)
    return (
        Term("loading executables", LOAD_SECONDS * candidates, f"assumed: {LOAD_SECONDS} s each"),
        Term("first runs", first, "modelled latency"),
        Term("copies to and from the chip", (put + fetched) / HOST_BYTES_PER_SECOND, "assumed: 5 GB/s"),
        Term("timed calls, device", math.fsum(t.device_seconds for t in timings), "modelled latency"),
        Term("timed calls, host", DISPATCH_SECONDS * calls, "assumed: 0.3 ms a call"),
    )


def query_bytes(problem: Problem) -> int:
    """Bytes of the queries, and of the output."""
    values = problem.max_num_batched_tokens * problem.num_q_heads * problem.head_dim
    return values * DTYPE_BITS[problem.q_dtype] // 8


# What is printed.


def table(now: Account, number: int, costs: Sequence[float]) -> Iterator[str]:
    """The terms, seconds of one of so many chips; their shares at the middle one of the costs of a trace."""
    cost = costs[len(costs) // 2]
    whole = now.chain(number, cost)
    yield f"| the process with the chip | s a key | min | share at {cost:g} s |"
    yield "| --- | ---: | ---: | ---: |"
    for name, seconds in now.rows(number, costs).items():
        share = "" if "traces at" in name and f"at {cost:g} s" not in name else f"{seconds / whole:.1%}"
        yield f"| {' | '.join([name, *amounts(seconds, now.keys / number), share])} |"


def amounts(seconds: float, keys: float) -> list[str]:
    """Seconds a key, and minutes."""
    return [f"{seconds / keys:.3f}", f"{seconds / 60:.1f}"]


def lengths(now: Account, number: int, cores: int, costs: Sequence[float]) -> Iterator[str]:
    """The whole sweep, by what a trace costs."""
    yield "| minutes, a trace at | start | chip | chip waits | compiles | sweep |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    for cost in costs:
        start, chip, sweep = now.start(cores), now.chain(number, cost), now.sweep(number, cores, cost)
        values = [start, chip, sweep - start - chip, now.compiling() / cores, sweep]
        yield f"| {cost:g} s | {' | '.join(f'{value / 60:.1f}' for value in values)} |"


def assumptions(now: Account, cores: int) -> Iterator[str]:
    """How each figure is known."""
    yield "How each is known:"
    for term in now.terms:
        yield f"- {term.name}: {term.why}"
    yield "- traces: counted; each costs what the option says, start and stop"
    yield f"- start: {START_SECONDS:g} s for two starts of libtpu (assumed, an upper bound), then all"
    yield f"  schedules: {sum(now.schedules):.0f} s of one core, the longest {max(now.schedules):.0f} s"
    yield f"- compiles: {now.compiling() / 3600:.1f} h of one idle core, estimated; {cores} cores, as fast;"
    yield "  at a key's own shape a program takes what it took at its compile shape"
    yield "- sweep: start, chip and the chip's waits for executables, which are simulated: keys in the"
    yield "  preset's order, a key's executables begun when it is given out, all awaited; those that"
    yield "  come late cost no further trace here"


def report(preset: Preset, found: Measured, timings: Sequence[Timing], options: argparse.Namespace) -> str:
    """All that is printed."""
    now = account(preset, timings, found)
    number, cores, costs = options.chips, options.cores, options.trace_seconds
    traces = [timing.traces for timing in timings]
    pools = [
        f"| {layout.num_kv_heads} | {layout.head_dim} | {layout.page_size} | {layout.kv_dtype} "
        f"| {inputs.POOL_BYTES // (layout.page_size * layout.kv_bytes_per_token)} | {seconds:.2f} "
        f"| {found.keys[layout]} |"
        for layout, seconds in found.pools.items()
    ]
    return "\n".join(
        [
            f"# {preset.target}: {now.keys} published keys, chips: {number}, cores: {cores}",
            "",
            f"Compiled by the process with the chip, {found.keys.total()} keys, seed {options.seed}:",
            "",
            "| kv heads | dim | page | dtype | pages of the pool | CPU s | keys |",
            "| --- | --- | --- | --- | ---: | ---: | ---: |",
            *pools,
            "",
            f"A pool {mean(found.pools.values()):.2f} s on average; {len(GENERATORS)} marks together "
            f"{found.marks:.2f} s, once a process.",
            "Copies to and from the chip, the reference and the comparison compile nothing.",
            "",
            f"Traces a key: mean {mean(traces):.2f}, worst {max(traces)}.",
            f"Candidates a key {mean(len(t.asked) for t in timings):.2f}, calls a key "
            f"{mean(t.calls for t in timings):.0f} ({MARKS} marks a section included), "
            f"device s a key {mean(t.device_seconds for t in timings):.3f}.",
            "",
            *table(now, number, costs),
            "",
            *lengths(now, number, cores, costs),
            "",
            *assumptions(now, cores),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="v6e", choices=sorted(p.name for p in ROWS.iterdir()))
    parser.add_argument("--chips", type=int, default=1)
    parser.add_argument("--keys", type=int, default=20, help="keys whose programs are compiled (20)")
    parser.add_argument("--seed", type=int, default=0, help="of their sample")
    parser.add_argument("--cores", type=int, help=f"of the host ({CORES_PER_CHIP} a chip)")
    parser.add_argument(
        "--trace-seconds", type=float, action="append", help="of starting and stopping a trace (0.1, 0.3, 1)"
    )
    options = parser.parse_args()
    options.cores = options.cores or CORES_PER_CHIP * options.chips
    options.trace_seconds = options.trace_seconds or list(TRACE_SECONDS)
    preset = published(options.target)
    settings = Settings(**preset.settings)
    timings = [timed(case, settings, options.target) for case in preset.cases]
    found = measured(options.target, sample(preset.cases, options.keys, options.seed))
    print(report(preset, found, timings, options))


if __name__ == "__main__":
    main()
