"""Keys to time: each becomes a job for a device once all its schedules are there, the executables first.

The chips' threads time the jobs one after the other, while the executables of the next jobs are compiled.
Everything here happens in the thread of the sweep, one event at a time.
"""

from __future__ import annotations

import heapq
import itertools
import queue
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from autotune.compile.schedules import Schedules
from autotune.errors import MachineError
from autotune.kernel.jax_rpa.inputs import pool_pages
from autotune.kernel.jax_rpa.interpret import cut
from autotune.kernel.problem import BlockSizes, Problem, Program, TableKey
from autotune.kernel.workload import Workload
from autotune.search.plan import Plan, Request, workload_of
from autotune.timing.chip_threads import Came, ChipThreads, Finished, Retired, Stopped
from autotune.timing.devices import Devices
from autotune.timing.history import Known
from autotune.timing.key_timing import Executables, Job, Result
from autotune.timing.shortlist import Shortlist, geometric_mean
from autotune.timing.slot import ChipLost
from autotune.tpu.compiler import Compiled
from autotune.tpu.executable import Call, Executable

# Jobs, beyond those that a device is timing, whose executables are compiled already: a key takes some five,
# and while one compiles for minutes the other workers need something to do.
LEAST_JOBS_AHEAD = 2
WORKERS_PER_JOB_AHEAD = 2


class Progress(Protocol):
    """Told of each candidate's timing or failure, of keys that are done, and of devices that are lost."""

    def timed(self, key: TableKey, result: Result) -> None: ...

    def keys_timed(self, done: int, total: int) -> None: ...

    def note(self, said: str) -> None: ...


class Asked(NamedTuple):
    """Candidates of a job are to be compiled, the first of them first."""

    job: Job
    store: Executables
    wanted: Sequence[BlockSizes]


class ChipJobs:
    """events: where this and the chips' threads put what happens, to be handed to `handle`. record: told of
    each result. jobs: compiles at once."""

    def __init__(
        self,
        request: Request,
        plan: Plan,
        schedules: Schedules,
        known: Known,
        devices: Devices,
        events: queue.SimpleQueue[NamedTuple],
        record: Callable[[Job, Result], None],
        progress: Progress,
        jobs: int,
    ) -> None:
        self._request = request
        self._plan = plan
        self._schedules = schedules
        self._known = known
        self._timing = devices.timing
        self._events = events
        self._record = record
        self._progress = progress
        self._ahead = max(LEAST_JOBS_AHEAD, jobs // WORKERS_PER_JOB_AHEAD)
        self._chips = ChipThreads(devices, request.seed, events)
        self._number = {key: number for number, key in enumerate(request.keys)}
        self._ready: list[TableKey] = []  # all schedules are there
        self._beyond: dict[TableKey, set[BlockSizes]] = {}  # candidates that the clock's best led to
        self._open = 0  # jobs given out and not finished
        self._done = 0
        self._urgent: list[tuple[int, int, int, Call, Executables]] = []  # executables to compile, a heap
        self._calls = itertools.count()

    @property
    def left(self) -> int:
        """Keys that are not timed."""
        return len(self._number) - self._done

    @property
    def refused(self) -> str | None:
        """Why a device takes no executables that others compiled, where one does not."""
        return next(iter(self._chips.refused), None)

    def start(self) -> None:
        if self._number:
            self._progress.keys_timed(0, len(self._number))
        self._chips.start()

    def close(self) -> None:
        """Give the chips back. What a device is timing is broken off."""
        self._chips.close()

    def ready(self, keys: Sequence[TableKey]) -> None:
        """Keys whose schedules are all there; give out as many jobs as are wanted ahead."""
        self._ready += keys
        while self._ready and self._open < len(self._chips) + self._ahead:
            self._open += 1
            self._give(self._ready.pop(0))

    def next_call(self) -> tuple[Call, Executables] | None:
        """The executable that is to be compiled before any schedule; None if there is none."""
        while self._urgent:
            *_, call, store = heapq.heappop(self._urgent)
            if self._chips.loads(call.device):
                return call, store
            store.add(call.blocks, Executable(verdict=Compiled(status="ok")))  # the device compiles it itself
        return None

    def handle(self, event: NamedTuple) -> BaseException | None:
        """Act on an event; returns what ends the sweep, if it does."""
        if isinstance(event, Came):
            self._record(event.job, event.result)
            self._progress.timed(event.job.key, event.result)
        elif isinstance(event, Asked):
            self._put(event)
        elif isinstance(event, Finished):
            self._open -= 1
            if not self._goes_on(event.key):
                self._done += 1
                self._progress.keys_timed(self._done, len(self._number))
        elif isinstance(event, Retired):
            return self._retire(event)
        elif isinstance(event, Stopped):
            return event.error
        return None

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

    def _goes_on(self, key: TableKey) -> bool:
        """Whether a timed key has its best, by the clock, on an edge: then what lies beyond is timed too."""
        if self._timing.interpreted:  # the interpreter's order says nothing
            return False
        batches = {batch.fingerprint for batch in self._workloads(key)}
        timed = {
            blocks: geometric_mean(list(medians.values())).median
            for blocks, medians in self._known.timed(key, batches)[1].items()
            if batches <= set(medians)
        }
        if not timed:
            return False
        best = min(timed, key=lambda blocks: (timed[blocks], blocks))
        more = self._schedules.widen({key: best}).get(key)
        if not more:
            return False
        self._beyond.setdefault(key, set()).update(more)
        return True

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

    def _give(self, key: TableKey) -> None:
        job = self._make_job(key)
        store = Executables(lambda store, wanted: self._events.put(Asked(job, store, wanted)))
        self._chips.give(job, store)
        store.ask(job.first())  # the very candidates that the timing will ask for: it finds them under way

    def _make_job(self, key: TableKey) -> Job:
        request, timing = self._request, self._timing
        problem = key.canonical_problem(request.max_num_seqs)
        workloads = self._workloads(key)
        ranking = self._known.ranking(key, {batch.fingerprint for batch in workloads})
        if timing.interpreted:
            workloads = tuple(dict.fromkeys(cut(batch, problem) for batch in workloads))
        clock, timed = self._known.timed(key, {batch.fingerprint for batch in workloads})
        always = (*filter(None, self._plan.incumbents[key]), *sorted(self._beyond.get(key, ())))
        return Job(
            key=key,
            problem=problem,
            settings=request.settings,
            workloads=workloads,
            # An interpreter's order of times is no judge of a prediction for a TPU.
            shortlist=Shortlist(
                ranking,
                tuple(b for b in always if self._may_run(problem, b, ranking)),
                timing.top,
                timing.exhaustive,
                widens=not timing.interpreted,
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

    def _workloads(self, key: TableKey) -> tuple[Workload, ...]:
        request = self._request
        problem = key.canonical_problem(request.max_num_seqs)
        return tuple(workload_of(w, key, problem, request.seed) for w in request.workloads)

    def _may_run(self, problem: Problem, blocks: BlockSizes, ranking: tuple[BlockSizes, ...]) -> bool:
        """Whether a candidate compiled, or was left out as the model gives it no chance."""
        program = Program(layout=problem.layout, blocks=blocks, settings=self._request.settings)
        return blocks in ranking or self._schedules.waits(program)
