"""A sweep: compile, predict and, on a device, time. Rows are all that it makes.

One queue of compiles feeds everything: a program's schedule, from which rows are predicted, and executables
for the chips. The thread that calls `sweep` alone decides and writes rows, one event at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import queue
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from autotune.compile.batch import require_compiler
from autotune.compile.cache import Store
from autotune.compile.local_pool import CompilePool
from autotune.compile.pool import Pool, StartPool, Task
from autotune.compile.schedules import Schedules
from autotune.io.folders import Folder
from autotune.kernel.problem import BlockSizes, Program, TableKey
from autotune.model.calibrate import current
from autotune.model.cost import Calibration, latency_seconds
from autotune.results import dataset, schema
from autotune.results.spool import Outbox
from autotune.search import shard, space
from autotune.search.plan import Plan, Planner, Request, Trial
from autotune.search.shard import Shard
from autotune.search.strategy import Contenders, Exhaustive, Outlook, Search
from autotune.timing import chip_jobs
from autotune.timing.chip_jobs import ChipJobs
from autotune.timing.devices import Devices, Timing
from autotune.timing.history import Known
from autotune.timing.key_timing import Executables, Job, Result, drained
from autotune.tpu.compiler import Compiled
from autotune.tpu.executable import Executable
from autotune.tpu.generations import Generation


@dataclasses.dataclass
class Summary:
    """What a sweep did.

    statuses: candidates newly recorded, by status. compiled: programs compiled. shared: compiles saved, as
    other keys have the same program. implied: candidates that overflow as a smaller one does. left_out:
    candidates of programs that could not win a key.

    Of a sweep on a device: timings, candidates newly timed, by status and once a workload; clocks, what timed
    them; compiled_here, those whose executable did not load; refused, why the first of those did not.
    """

    statuses: Counter[str] = dataclasses.field(default_factory=Counter)
    compiled: int = 0
    shared: int = 0
    implied: int = 0
    left_out: int = 0
    timings: Counter[str] = dataclasses.field(default_factory=Counter)
    clocks: Counter[str] = dataclasses.field(default_factory=Counter)
    compiled_here: int = 0
    refused: str | None = None


class Progress(contextlib.AbstractContextManager["Progress"], chip_jobs.Progress, Protocol):
    """Told of each program that is to be compiled, of each that has its verdict, with what is left after it,
    of new rows, and of each candidate's timing or failure."""

    def compiling(self, task: Task) -> None: ...

    def advance(self, task: Task, verdict: Compiled, outlook: Outlook) -> None: ...

    def recorded(self, rows: Iterable[Mapping[str, Any]]) -> None: ...

    def timed(self, key: TableKey, result: Result) -> None: ...


class Prepared(NamedTuple):
    """What a sweep has to do, and how it goes through it."""

    plan: Plan
    search: Search


def prepare(request: Request, folder: Folder, store: Store | None, part: Shard | None = None) -> Prepared:
    """The plan of a sweep into a folder, which need not exist yet.

    store: verdicts of earlier sweeps. part: only the programs of this shard.
    """
    frame = dataset.read(folder) if dataset.names(folder) or folder.is_dir() else None
    tools = schema.Tools.installed()

    def kept(programs: list[Program]) -> dict[Program, Compiled]:
        return store.get(request.generation.name, tools, programs) if store else {}

    mine = shard.programs(request, part) if part else None
    plan = Planner(request, frame, tools, current(request.generation).version, kept).plan(mine)
    return Prepared(plan, search_for(request, plan))


def search_for(request: Request, plan: Plan) -> Search:
    """How the programs of a plan are gone through.

    All of them where the user named block sizes or asked for all; else those that could still win a key.
    """
    if request.named:
        return Exhaustive(plan.waiting)

    calibration = current(request.generation)

    def latency(trial: Trial, cycles: tuple[int, ...]) -> float:
        blocks = trial.program.blocks
        return statistics.geometric_mean(
            latency_seconds(request.generation, trial.problem, blocks, batch, cycles, calibration)
            for batch in trial.workloads
        )

    if request.exhaustive:
        return Exhaustive(plan.waiting, plan.known, latency)
    wanted = [
        program
        for program, trials in plan.waiting.items()
        if any(program.blocks in plan.incumbents[trial.key] for trial in trials)
    ]
    return Contenders(plan.waiting, plan.known, latency, wanted)


class _Recorder:
    """Makes the rows of a sweep and writes them; whatever is told of rows is told here."""

    def __init__(self, request: Request, outbox: Outbox, progress: Progress, timing: Timing | None) -> None:
        self._request = request
        self._outbox = outbox
        self._progress = progress
        self._timing = timing
        self._tools = schema.Tools.installed()
        self._calibration = current(request.generation)
        source = timing.source if timing else schema.MODELLED
        self.known = Known(request, source, self._tools, self._calibration.version)
        self.summary = Summary()
        self._rows: list[dict[str, Any]] = []

    def models(self, settled: Iterable[tuple[Trial, Compiled]]) -> None:
        """Rows of trials that have their verdict."""
        for trial, verdict in settled:
            made = list(model_rows(self._request.generation, trial, verdict, self._tools, self._calibration))
            self.summary.statuses[made[0]["status"]] += 1
            self._take(made)

    def timed(self, job: Job, result: Result) -> None:
        """The row of a timing, or of why there is none."""
        assert self._timing
        program = self.known.program(job.key, result.blocks)
        self._take([timed_row(self._request, self._timing, job, result, self._tools, program)])
        self._progress.timed(job.key, result)
        self.summary.timings[result.status] += 1
        if result.timer:
            self.summary.clocks[result.timer] += 1
        self.summary.compiled_here += result.compiled_here

    def _take(self, rows: list[dict[str, Any]]) -> None:
        self._rows += rows
        if self._timing:
            for row in rows:
                self.known.add(row)

    def flush(self) -> None:
        """Have what was made on disk."""
        rows, self._rows = self._rows, []
        self._outbox.append(rows)
        self._progress.recorded(rows)


class _Sweep:
    """One run, once; all happens in the thread that calls `run`, to which others `post` what there is to do.

    chips: None where nothing is timed.
    """

    def __init__(
        self,
        schedules: Schedules,
        recorder: _Recorder,
        progress: Progress,
        pool: Pool,
        jobs: int,
    ) -> None:
        self._schedules = schedules
        self._recorder = recorder
        self._progress = progress
        self._pool = pool
        self._events = queue.SimpleQueue[Callable[[], None]]()
        self.chips: ChipJobs | None = None
        # One more than there are workers, so that none waits while this thread writes rows.
        self._most = self._free = jobs + 1

    def run(self) -> None:
        """Raises MachineError when nothing can be compiled any more, or no chip be taken."""
        # The progress ends before the chips and the pool do, which take their time.
        with contextlib.ExitStack() as stack:
            if self.chips:
                stack.callback(self.chips.close)
                self.chips.start()
            stack.enter_context(self._progress)
            while self._feed():
                self._handle([self._events.get(), *drained(self._events)])

    def _feed(self) -> bool:
        """Hand out what can be done now; whether there is more to come."""
        complete = self._schedules.complete()
        self._recorder.flush()
        if self.chips:
            self.chips.ready(complete)
            if not self._events.empty():
                return True  # such as an executable that was just asked for: more urgent than a schedule
        while self._free:
            if self.chips and (wanted := self.chips.next_call()):
                call, store = wanted
                self._pool.submit(call, functools.partial(self._compiled, call.blocks, store))
            elif task := self._schedules.next():
                self._progress.compiling(task)
                self._pool.submit(task, functools.partial(self.post, self._modelled, task))
            else:
                break
            self._free -= 1
        return self.chips.left > 0 if self.chips else self._free < self._most

    def _handle(self, events: Iterable[Callable[[], None]]) -> None:
        """All of the events; then what one of them raised."""
        stopped: Exception | None = None
        for event in events:
            try:
                event()
            except Exception as error:
                stopped = stopped or error
            self._recorder.flush()
        if stopped:
            raise stopped

    def _compiled(self, blocks: BlockSizes, store: Executables, executable: Executable) -> None:
        """In a thread of the pool."""
        if not self._pool.broken:  # else it says nothing of the candidate
            store.add(blocks, executable)
        self._events.put(self._one_free)

    def post(self, work: Callable[..., None], *arguments: Any) -> None:
        self._events.put(functools.partial(work, *arguments))

    def _modelled(self, task: Task, verdict: Compiled) -> None:
        self._one_free()
        self._schedules.tell(task, verdict)
        self._progress.advance(task, verdict, self._schedules.outlook())

    def _one_free(self) -> None:
        self._free += 1
        if self._pool.broken:
            raise self._pool.broken


def sweep(
    request: Request,
    folder: Folder,
    progress: Progress,
    *,
    prepared: Prepared | None = None,
    store: Store | None = None,
    devices: Devices | None = None,
    jobs: int = 1,
    timeout: float = 300.0,
    start_pool: StartPool = CompilePool,
) -> Summary:
    """Fill a results folder with the rows of a request; each is on disk before the next thing is looked at.

    prepared: what `prepare` said of the same request and folder. store: of compile results of other sweeps.
    devices: what to time on; None for predictions alone. jobs: compiles at once. timeout: seconds that one
    may take. start_pool: where they run.

    Raises:
      MachineError: there is something to compile, and no compiler; or no device can be taken.
      UsageError: the folder cannot be written.
    """
    plan, search = prepared or prepare(request, folder, store)
    dataset.remove_abandoned(folder)
    with Outbox(folder, plan.replaced) as outbox:
        recorder = _Recorder(request, outbox, progress, devices.timing if devices else None)
        summary = recorder.summary
        if devices and plan.frame is not None:
            recorder.known.read(plan.frame)
        schedules = Schedules(request, plan, search, store, recorder.models)
        recorder.models(plan.settled)
        if not devices:
            schedules.complete()
        recorder.flush()
        if devices or search.prospects():
            require_compiler()
            with start_pool(jobs, timeout) as pool:
                run = _Sweep(schedules, recorder, progress, pool, jobs)
                if devices:
                    run.chips = ChipJobs(
                        request,
                        plan,
                        schedules,
                        recorder.known,
                        devices,
                        run.post,
                        recorder.timed,
                        progress,
                        jobs,
                    )
                run.run()
                summary.refused = run.chips.refused if run.chips else None
    summary.compiled, summary.shared = schedules.compiled, schedules.shared
    summary.implied, summary.left_out = schedules.implied, schedules.left_out
    return summary


def model_rows(
    generation: Generation,
    trial: Trial,
    verdict: Compiled,
    tools: schema.Tools,
    calibration: Calibration,
) -> Iterator[dict[str, Any]]:
    """The modelled rows of one candidate of one key, a row a workload."""
    compiled = verdict.schedule
    if compiled:
        overflow = space.smem_overflow(generation, trial.problem, trial.program, compiled.smem_bytes)
        if overflow:
            verdict = dataclasses.replace(overflow, schedule=compiled, seconds=verdict.seconds)
    for batch in trial.missing:
        latency_us = None
        if verdict.status == "ok" and compiled:
            blocks = trial.program.blocks
            latency_us = 1e6 * latency_seconds(
                generation, trial.problem, blocks, batch, compiled.cycles, calibration
            )
        yield schema.row(
            target=generation.name,
            device_kind=generation.device_kinds[0],
            key=trial.key,
            problem=trial.problem,
            program=trial.program,
            workload=batch,
            source=schema.MODELLED,
            model=calibration.version,
            status=verdict.status,
            tools=tools,
            latency_us=latency_us,
            cycles=compiled.cycles if compiled else None,
            vmem_used_bytes=compiled.vmem_bytes if compiled else None,
            smem_used_bytes=compiled.smem_bytes if compiled else None,
            needed_bytes=verdict.needed_bytes,
            limit_bytes=verdict.limit_bytes,
            compile_seconds=verdict.seconds,
            error=verdict.error,
        )


def timed_row(
    request: Request,
    timing: Timing,
    job: Job,
    result: Result,
    tools: schema.Tools,
    program: Mapping[str, Any],
) -> dict[str, Any]:
    """The row of one candidate of a key on one workload. program: the columns that its schedule fills."""
    found = result.found
    return schema.row(
        target=request.generation.name,
        device_kind=timing.device_kind,
        key=job.key,
        problem=job.problem,
        program=Program(layout=job.problem.layout, blocks=result.blocks, settings=job.settings),
        workload=result.workload,
        source=timing.source,
        status=result.status,
        tools=tools,
        latency_us=found.median * 1e6 if found else None,
        latency_low_us=found.low * 1e6 if found else None,
        latency_high_us=found.high * 1e6 if found else None,
        samples_us=[seconds * 1e6 for seconds in result.seconds] or None,
        timer=result.timer,
        chip=result.chip,
        **({"host": result.host} if result.host else {}),
        needed_bytes=result.needed_bytes,
        limit_bytes=result.limit_bytes,
        compile_seconds=result.compile_seconds,
        error=result.error,
        **program,
    )
