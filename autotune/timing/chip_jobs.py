"""Keys to time: each becomes a job for a device once all its schedules are there, the executables first.

A thread a device times one job after the other, while the executables of the next jobs are compiled. All else
happens in the thread of the sweep, to which the devices' threads hand what there is to do, by `post`.
"""

from __future__ import annotations

import heapq
import itertools
import queue
import random
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from autotune.compile.schedules import Schedules
from autotune.errors import MachineError
from autotune.kernel.jax_rpa.inputs import pool_pages
from autotune.kernel.jax_rpa.interpret import cut
from autotune.kernel.problem import BlockSizes, Problem, Program, TableKey
from autotune.kernel.workload import Workload
from autotune.search.plan import Plan, Request, workload_of
from autotune.timing.devices import Devices
from autotune.timing.history import Known
from autotune.timing.key_timing import Executables, Job, KeyTiming, Result, drained
from autotune.timing.shortlist import Shortlist, geometric_mean
from autotune.timing.slot import ChipLost, Slot
from autotune.tpu.compiler import Compiled
from autotune.tpu.executable import Call, Executable

# Jobs, beyond those that a device is timing, whose executables are compiled already: a key takes some five,
# and while one compiles for minutes the other workers need something to do.
LEAST_JOBS_AHEAD = 2
WORKERS_PER_JOB_AHEAD = 2
IDLE_SECONDS = 1.0


class Progress(Protocol):
    """Told of keys that are done, and of devices that are lost."""

    def keys_timed(self, done: int, total: int) -> None: ...

    def note(self, said: str) -> None: ...


class ChipJobs:
    """post: has the sweep's thread call something with arguments; what it raises ends the sweep.
    record: told of each result. jobs: compiles at once.

    A job is of a device's index among its chip's, as its executables are; slots of that index share a queue.
    """

    def __init__(
        self,
        request: Request,
        plan: Plan,
        schedules: Schedules,
        known: Known,
        devices: Devices,
        post: Callable[..., None],
        record: Callable[[Job, Result], None],
        progress: Progress,
        jobs: int,
    ) -> None:
        self._request = request
        self._plan = plan
        self._schedules = schedules
        self._known = known
        self._timing = devices.timing
        self._slots = list(devices.slots)
        self._post = post
        self._record = record
        self._progress = progress
        self._ahead = max(LEAST_JOBS_AHEAD, jobs // WORKERS_PER_JOB_AHEAD)
        self._jobs: dict[int, queue.SimpleQueue[tuple[Job, Executables] | None]] = {
            index: queue.SimpleQueue() for index in sorted({slot.index for slot in self._slots})
        }
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
        return next((slot.refused for slot in self._slots if slot.refused), None)

    def start(self) -> None:
        if self._number:
            self._progress.keys_timed(0, len(self._number))
        for slot in self._slots:
            threading.Thread(target=self._work, args=(slot,), daemon=True, name=f"chip {slot.chip}").start()

    def close(self) -> None:
        """Give the chips back. What a device is timing is broken off."""
        for slot in self._slots:
            self._jobs[slot.index].put(None)
            slot.close()

    def ready(self, keys: Sequence[TableKey]) -> None:
        """Keys whose schedules are all there; give out as many jobs as are wanted ahead."""
        self._ready += keys
        while self._ready and self._open < len(self._slots) + self._ahead:
            self._open += 1
            self._give(self._ready.pop(0))

    def next_call(self) -> tuple[Call, Executables] | None:
        """The executable that is to be compiled before any schedule; None if there is none."""
        while self._urgent:
            *_, call, store = heapq.heappop(self._urgent)
            if any(slot.index == call.device and not slot.refused for slot in self._slots):
                return call, store
            store.add(call.blocks, Executable(verdict=Compiled(status="ok")))  # the device compiles it itself
        return None

    def _work(self, slot: Slot) -> None:
        """A device's thread."""
        jobs = self._jobs[slot.index]
        key = None
        try:
            while True:
                try:
                    given = jobs.get(timeout=IDLE_SECONDS)
                except queue.Empty:
                    slot.idle()
                    continue
                if given is None:
                    return
                job, store = given
                key = job.key
                rng = random.Random(f"{self._request.seed} {key}")
                for result in KeyTiming(job, slot, store, self._timing.rule, rng).run():
                    self._post(self._record, job, result)
                self._post(self._finished, key)
                key = None
        except MachineError as error:
            self._post(self._retire, slot, key, error)
        except BaseException as error:
            self._post(_throw, error)

    def _finished(self, key: TableKey) -> None:
        self._open -= 1
        if not self._goes_on(key):
            self._done += 1
            self._progress.keys_timed(self._done, len(self._number))

    def _retire(self, slot: Slot, key: TableKey | None, error: MachineError) -> None:
        """Go on without a device, and have the others do its jobs; raises the error if it was the last.

        key: of the job that it was to do, if it had one.
        """
        self._slots.remove(slot)
        if not self._slots:
            raise error
        said = error.said if isinstance(error, ChipLost) else error
        self._progress.note(f"{said}; the sweep goes on with {len(self._slots)} other devices")
        left = [key] if key else []
        if not any(other.index == slot.index for other in self._slots):
            left += [given[0].key for given in drained(self._jobs[slot.index]) if given]
        for key in left:
            self._give(key)

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

    def _asked(self, job: Job, store: Executables, wanted: Sequence[BlockSizes]) -> None:
        """Candidates of a job are to be compiled, the first of them first: before schedules, and before those
        of the jobs after it."""
        pages = pool_pages(job.problem, job.workloads, interpreted=self._timing.interpreted)
        for rank, blocks in enumerate(wanted):
            call = Call(
                target=job.target,
                problem=job.problem,
                total_num_pages=pages,
                blocks=blocks,
                settings=job.settings,
                device=job.index,
            )
            heapq.heappush(self._urgent, (self._number[job.key], rank, next(self._calls), call, store))

    def _give(self, key: TableKey) -> None:
        job = self._make_job(key)
        store = Executables(lambda store, wanted: self._post(self._asked, job, store, wanted))
        self._jobs[job.index].put((job, store))
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
            index=self._shortest_queue(),
            # A prediction for a TPU says nothing of how long the interpreter takes.
            predicted={} if timing.interpreted else self._known.predictions(key),
            timed=timed,
            clock=clock,
            failed=self._known.failed(key),
        )

    def _shortest_queue(self) -> int:
        """The index of devices whose queue is the shortest for their number."""
        indices = [slot.index for slot in self._slots]
        return min(indices, key=lambda index: self._jobs[index].qsize() / indices.count(index))

    def _workloads(self, key: TableKey) -> tuple[Workload, ...]:
        request = self._request
        problem = key.canonical_problem(request.max_num_seqs)
        return tuple(workload_of(w, key, problem, request.seed) for w in request.workloads)

    def _may_run(self, problem: Problem, blocks: BlockSizes, ranking: tuple[BlockSizes, ...]) -> bool:
        """Whether a candidate compiled, or was left out as the model gives it no chance."""
        program = Program(layout=problem.layout, blocks=blocks, settings=self._request.settings)
        return blocks in ranking or self._schedules.waits(program)


def _throw(error: BaseException) -> None:
    raise error
