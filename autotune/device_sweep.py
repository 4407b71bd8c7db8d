"""A sweep on a device: the schedule of every candidate, and the clock for the best of them, side by side.

One queue of compiles feeds both. A key whose candidates all have their schedule becomes a job; the chips'
threads time the jobs, one after the other, while the executables of the next jobs and then the schedules of
the keys after them are compiled. The thread that calls `run` alone writes rows.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import queue
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from autotune import results
from autotune.calibrate import current
from autotune.chip_threads import Came, ChipThreads, Finished, Retired, Stopped
from autotune.claims import Claims
from autotune.devices import Devices
from autotune.errors import MachineError
from autotune.folders import Folder
from autotune.kernel.inputs import pool_pages
from autotune.kernel.interpret import cut
from autotune.kernel.problem import BlockSizes, Problem, Program, TableKey
from autotune.known import Known
from autotune.measure import Executables, Job, Result, drained
from autotune.outbox import Outbox
from autotune.plan import Plan, Request, Trial, workload_of
from autotune.pool import Pool, StartPool, Task
from autotune.search import Search
from autotune.sharing import POLL_SECONDS, Sharing
from autotune.shortlist import Shortlist
from autotune.slot import ChipLost
from autotune.store import Store
from autotune.sweep import Progress as SweepProgress
from autotune.sweep import Summary, model_rows, require_compiler
from autotune.tpu.compiler import Compiled
from autotune.tpu.executable import Call, Executable
from autotune.workers import CompilePool

# Jobs, beyond those that a device is timing, whose executables are compiled already: a key takes some five,
# and while one compiles for minutes the other workers need something to do.
LEAST_JOBS_AHEAD = 2
WORKERS_PER_JOB_AHEAD = 2


class Progress(SweepProgress, Protocol):
    """Told of each candidate's timing or failure too."""

    def timed(self, key: TableKey, result: Result) -> None: ...

    def keys_timed(self, done: int, total: int) -> None: ...

    def note(self, said: str) -> None: ...


class Modelled(NamedTuple):
    """A program has its schedule."""

    task: Task
    verdict: Compiled


class Asked(NamedTuple):
    """Candidates of a job are to be compiled, the first of them first."""

    job: Job
    store: Executables
    wanted: Sequence[BlockSizes]


class Ahead(NamedTuple):
    """An executable has been compiled, and is in its store."""


class DeviceSweep:
    """One run; use `run` once. All happens in the thread that calls it, one event at a time."""

    def __init__(
        self,
        request: Request,
        plan: Plan,
        search: Search,
        store: Store | None,
        known: Known,
        folder: Folder,
        devices: Devices,
        progress: Progress,
        outbox: Outbox,
        claims: Claims,
    ) -> None:
        self._request = request
        self._plan = plan
        self._search = search
        self._store = store
        self._calibration = current(request.generation)
        self._known = known
        self._outbox = outbox
        self._sharing = Sharing(
            request, plan, search, folder, claims, self._calibration.version, on_rows=known.read
        )
        self._timing = devices.timing
        self._progress = progress
        self._tools = results.Tools.installed()
        self._summary = Summary()
        self._events: queue.SimpleQueue[NamedTuple] = queue.SimpleQueue()
        self._chips = ChipThreads(devices, request.seed, self._events)
        self._number = {key: number for number, key in enumerate(request.keys)}
        self._without_job = list(self._number)  # keys whose candidates lack schedules
        self._programs: dict[TableKey, set[Program]] = {key: set() for key in self._number}
        for program, trials in plan.waiting.items():
            for trial in trials:
                self._programs[trial.key].add(program)
        self._ready: list[TableKey] = []  # all schedules are there
        self._elsewhere: set[TableKey] = set()  # those of them that another sweep times
        self._open = 0  # jobs given out and not finished
        self._left = len(self._number)
        if self._left:
            self._progress.keys_timed(0, self._left)
        self._urgent: list[tuple[int, int, int, Call, Executables]] = []  # executables to compile, a heap
        self._calls = itertools.count()

    def run(self, pool: Pool, jobs: int) -> Summary:
        """Raises MachineError when no chip can be taken any more."""
        self._pool = pool
        self._ahead = max(LEAST_JOBS_AHEAD, jobs // WORKERS_PER_JOB_AHEAD)
        # One more than there are workers, so that none waits while this thread writes rows.
        self._free = jobs + 1
        self._record_models(self._plan.settled)
        self._chips.start()
        try:
            with self._progress:  # it ends before the chips and the pool do, which take their time
                while self._left:
                    self._next()
                    self._handle(self._come())
        finally:
            self._chips.close()
        self._summary.refused = next(iter(self._chips.refused), None)
        self._summary.left_out = sum(map(len, self._search.waiting.values()))
        return self._summary

    def _handle(self, events: Iterable[NamedTuple]) -> None:
        rows: list[dict[str, Any]] = []
        finished: list[TableKey] = []
        stopped: BaseException | None = None
        for event in events:
            if isinstance(event, Came):
                rows.append(self._row(event.job, event.result))
                self._known.add(rows[-1])
                self._summary.timings[event.result.status] += 1
                if event.result.timer:
                    self._summary.clocks[event.result.timer] += 1
                self._summary.compiled_here += event.result.compiled_here
                self._progress.timed(event.job.key, event.result)
            elif self._pool.broken:
                stopped = self._pool.broken
            elif isinstance(event, Modelled):
                self._free += 1
                self._compiled_here(event.task, event.verdict)
            elif isinstance(event, Ahead):
                self._free += 1
            elif isinstance(event, Asked):
                self._put(event)
            elif isinstance(event, Finished):
                finished.append(event.key)
                self._left -= 1
                self._progress.keys_timed(len(self._number) - self._left, len(self._number))
                self._open -= 1
            elif isinstance(event, Retired):
                stopped = self._retire(event) or stopped
            elif isinstance(event, Stopped):
                stopped = event.error
        self._sharing.wrote(self._outbox.append(rows))
        self._progress.recorded(rows)
        for key in finished:
            self._sharing.key_done(key, self._timing.source)
        if stopped:
            raise stopped

    def _retire(self, event: Retired) -> MachineError | None:
        """Go on without a device, and have the others do its jobs; why not, if it was the last."""
        left = self._chips.retire(event.slot)
        if not len(self._chips):
            return event.error
        said = event.error.said if isinstance(event.error, ChipLost) else event.error
        self._progress.note(f"{said}; the sweep goes on with {len(self._chips)} other devices")
        for key in [*left, *([event.key] if event.key else [])]:
            self._give(key)
        return None

    def _come(self) -> list[NamedTuple]:
        """The next events; none if it is time to look what other sweeps did."""
        waiting = self._sharing.elsewhere or self._elsewhere
        try:
            return [self._events.get(timeout=POLL_SECONDS if waiting else None), *drained(self._events)]
        except queue.Empty:
            return []

    # Compiles.

    def _next(self) -> None:
        """Make jobs of the keys that are ready, give them out, and keep the workers busy."""
        for program, verdict, trials in self._sharing.news():
            self._summary.learned += len(trials)
            self._summary.elsewhere += len(self._plan.waiting[program]) - len(trials)
            self._learn(Task(self._request.generation.name, program), verdict, trials)
        if self._without_job:
            # What the search will not compile, as it stands, no key waits for.
            wanted = self._search.prospects()
            for key in [key for key in self._without_job if not self._programs[key] & wanted]:
                self._without_job.remove(key)
                self._ready.append(key)
        for key in list(self._ready):
            if self._open >= len(self._chips) + self._ahead:
                break
            if not self._sharing.claim_key(key, self._timing.source):
                self._elsewhere.add(key)
                continue
            self._ready.remove(key)
            self._elsewhere.discard(key)
            self._open += 1
            self._give(key)
        if not self._events.empty():
            return  # such as what was just asked for, which is more urgent than a schedule
        while self._free:
            if self._urgent:
                *_, call, store = heapq.heappop(self._urgent)
                if not self._chips.loads(call.device):  # the device will compile it itself
                    store.add(call.blocks, Executable(verdict=Compiled(status="ok")))
                    continue
                self._pool.submit_ahead(call, functools.partial(self._compiled, call.blocks, store))
            elif found := self._sharing.next():
                task = Task(self._request.generation.name, found)
                self._progress.compiling(task)
                self._pool.submit(task, functools.partial(self._modelled, task))
            else:
                break
            self._free -= 1

    def _modelled(self, task: Task, verdict: Compiled) -> None:
        self._events.put(Modelled(task, verdict))

    def _compiled(self, blocks: BlockSizes, store: Executables, executable: Executable) -> None:
        if not self._pool.broken:  # else it says nothing of the candidate
            store.add(blocks, executable)
        self._events.put(Ahead())

    def _put(self, asked: Asked) -> None:
        """Executables come before schedules, and those of a job before those of the jobs after it."""
        job = asked.job
        pages = pool_pages(job.problem, job.workloads, interpreted=self._timing.interpreted)
        for rank, blocks in enumerate(asked.wanted):
            call = Call(
                target=job.target,
                problem=job.problem,
                total_num_pages=pages,
                blocks=blocks,
                settings=job.settings,
                device=job.index,
            )
            entry = (self._number[job.key], rank, next(self._calls), call, asked.store)
            heapq.heappush(self._urgent, entry)

    def _compiled_here(self, task: Task, verdict: Compiled) -> None:
        trials = self._plan.waiting[task.program]
        if self._store:
            self._store.put(self._request.generation.name, self._tools, task.program, verdict)
        self._summary.compiled += 1
        self._summary.shared += len(trials) - 1
        self._learn(task, verdict, trials)

    def _learn(self, task: Task, verdict: Compiled, trials: list[Trial]) -> None:
        self._record_models((trial, verdict) for trial in trials)
        for program, implied in self._search.tell(task.program, verdict).items():
            self._record_models((trial, implied) for trial in self._plan.waiting[program])
            self._summary.implied += len(self._plan.waiting[program])
        self._sharing.done(task.program)
        self._progress.advance(task, verdict, self._search.outlook())

    def _record_models(self, settled: Iterable[tuple[Trial, Compiled]]) -> None:
        rows: list[dict[str, Any]] = []
        for trial, verdict in settled:
            made = list(model_rows(self._request.generation, trial, verdict, self._tools, self._calibration))
            self._summary.statuses[made[0]["status"]] += 1
            rows += made
        for row in rows:
            self._known.add(row)
        self._sharing.wrote(self._outbox.append(rows))
        self._progress.recorded(rows)

    # Jobs.

    def _give(self, key: TableKey) -> None:
        job, store = self._make_job(key)
        self._chips.give(job, store)
        store.ask(job.first())  # the very candidates that the timing will ask for: it finds them under way

    def _make_job(self, key: TableKey) -> tuple[Job, Executables]:
        request, timing = self._request, self._timing
        problem = key.canonical_problem(request.max_num_seqs)
        workloads = tuple(workload_of(w, key, problem, request.seed) for w in request.workloads)
        ranking = self._known.ranking(key, {batch.fingerprint for batch in workloads})
        if timing.interpreted:
            workloads = tuple(dict.fromkeys(cut(batch, problem) for batch in workloads))
        batches = {batch.fingerprint for batch in workloads}
        clock, timed = self._known.timed(key, batches)
        incumbents = tuple(b for b in self._plan.incumbents[key] if b and self._may_run(problem, b, ranking))
        job = Job(
            key=key,
            problem=problem,
            settings=request.settings,
            workloads=workloads,
            # An interpreter's order of times is no judge of a prediction for a TPU.
            shortlist=Shortlist(
                ranking, incumbents, timing.top, timing.exhaustive, widens=not timing.interpreted
            ),
            target=None if timing.interpreted else request.generation.name,
            seed=request.seed,
            index=self._chips.index(),
            # A prediction for a TPU says nothing of how long the interpreter takes.
            predicted={} if timing.interpreted else self._known.predictions(key),
            timed=timed,
            clock=clock,
            failed=self._known.failed(key),
        )
        store = Executables(lambda store, wanted: self._events.put(Asked(job, store, wanted)))
        return job, store

    def _may_run(self, problem: Problem, blocks: BlockSizes, ranking: tuple[BlockSizes, ...]) -> bool:
        """Whether a candidate compiled, or was left out as the model gives it no chance."""
        program = Program(layout=problem.layout, blocks=blocks, settings=self._request.settings)
        return blocks in ranking or program in self._search.waiting

    def _row(self, job: Job, result: Result) -> dict[str, Any]:
        found = result.found
        return results.row(
            target=self._request.generation.name,
            device_kind=self._timing.device_kind,
            key=job.key,
            problem=job.problem,
            program=Program(layout=job.problem.layout, blocks=result.blocks, settings=job.settings),
            workload=result.workload,
            source=self._timing.source,
            status=result.status,
            tools=self._tools,
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
            **self._known.program(job.key, result.blocks),
        )


def run(
    request: Request,
    plan: Plan,
    search: Search,
    store: Store | None,
    folder: Folder,
    jobs: int,
    timeout: float,
    devices: Devices,
    progress: Progress,
    start_pool: StartPool = CompilePool,
) -> Summary:
    """Carry out a plan on devices, a slot a chip; every result is on disk before the next is looked at.

    Raises:
      MachineError: a device cannot be taken, or there is no compiler.
      UsageError: the folder cannot be written.
    """
    require_compiler()
    known = Known(
        request, devices.timing.source, results.Tools.installed(), current(request.generation).version
    )
    if folder.is_dir():
        known.read(results.read(folder))
    results.remove_abandoned(folder)
    with (
        Outbox(folder, plan.replaced) as outbox,
        Claims(folder) as claims,
        start_pool(jobs, timeout) as pool,
    ):
        sweep = DeviceSweep(request, plan, search, store, known, folder, devices, progress, outbox, claims)
        return sweep.run(pool, jobs)
