"""Time the shortlist of one key on one device, whatever the device does meanwhile.

Candidates are timed in rounds, all workloads in each, in random order, until each is known well enough. One
whose executable comes late joins the next round. A device that dies is replaced; the candidate that was
running gets one more chance, compiled on the device itself, and then counts as crashed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import queue
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from autotune.errors import MachineError
from autotune.kernel.problem import BlockSizes, Problem, Settings, TableKey
from autotune.kernel.workload import Workload
from autotune.timing.device_process import Device, DeviceDied, PrepareFailed
from autotune.timing.device_worker import Timed, Turn
from autotune.timing.shortlist import Shortlist, geometric_mean
from autotune.timing.slot import Slot
from autotune.timing.statistics import Median, StoppingRule, interleaved, median
from autotune.tpu.executable import Executable

T = TypeVar("T")

RUN_ATTEMPTS = 2
# Deaths with no candidate at work, and processes in which the inputs cannot be made.
PREPARE_ATTEMPTS = 3
REFUSALS = 2
# How long to wait for the other candidates' executables once one is there: they are best timed together.
GATHER_SECONDS = 10.0
# A profile of a round stays short: one of 30 s and more may come back empty (jax issue 23446). Starting and
# stopping one may cost more than what it holds, so the first has enough samples for 1% at 1% of noise.
ROUND_SECONDS = 0.5
FIRST_REPEATS = 24
MAX_REPEATS = 48
# Without a single timing after this many times --max-seconds, there will be none.
PATIENCE = 3.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A key to time.

    target: name of the generation that the device is of; None for the CPU, interpreted. index: of the device
    among its chip's. predicted: seconds, by candidate and by the workload's fingerprint. timed: what earlier
    runs know, alike; it is not timed again, unless the clock is not `clock` any more. failed: candidates that
    earlier runs gave up.
    """

    key: TableKey
    problem: Problem
    settings: Settings
    workloads: tuple[Workload, ...]
    shortlist: Shortlist
    target: str | None
    seed: int = 0
    index: int = 0
    predicted: Mapping[BlockSizes, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    timed: Mapping[BlockSizes, Mapping[str, Median]] = dataclasses.field(default_factory=dict)
    clock: str | None = None
    failed: frozenset[BlockSizes] = frozenset()

    def first(self) -> list[BlockSizes]:
        """The candidates to compile and time at first."""
        wanted = [blocks for blocks in self.shortlist.first() if blocks not in self.failed]
        return [blocks for blocks in wanted if len(self.timed.get(blocks, {})) < len(self.workloads)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What came of a candidate on one workload.

    seconds: every timing; of them, `found` is the median. compiled_here: its executable did not load, and the
    process that holds the chip compiled one itself. note: what the last profile lacked, if any lacked it.
    """

    blocks: BlockSizes
    workload: Workload
    status: str
    chip: int
    host: str | None = None
    error: str | None = None
    seconds: tuple[float, ...] = ()
    found: Median | None = None
    timer: str | None = None
    note: str | None = None
    compiled_here: bool = False
    needed_bytes: int | None = None
    limit_bytes: int | None = None
    compile_seconds: float | None = None


def drained(events: queue.SimpleQueue[T]) -> Iterator[T]:
    """What is in a queue already."""
    while True:
        try:
            yield events.get_nowait()
        except queue.Empty:
            return


class Executables:
    """The executables of one key: asked for in order, taken as they come.

    request: starts a compile; it calls `add` when that is done, from whatever thread.
    """

    def __init__(self, request: Callable[[Executables, Sequence[BlockSizes]], None]) -> None:
        self._request = request
        self._ready: queue.SimpleQueue[tuple[BlockSizes, Executable]] = queue.SimpleQueue()
        self._asked: set[BlockSizes] = set()

    def ask(self, wanted: Sequence[BlockSizes]) -> None:
        """Have these compiled, in this order; those asked for before are under way already."""
        new = [blocks for blocks in wanted if blocks not in self._asked]
        self._asked.update(new)
        if new:
            self._request(self, new)

    def add(self, blocks: BlockSizes, executable: Executable) -> None:
        self._ready.put((blocks, executable))

    def take(self, seconds: float | None) -> list[tuple[BlockSizes, Executable]]:
        """Those that have come since the last call; if none have, wait for one. None: without limit."""
        came = list(drained(self._ready))
        if not came and seconds != 0:
            with contextlib.suppress(queue.Empty):
                came.append(self._ready.get(timeout=seconds))
        return came


@dataclasses.dataclass
class _Entry:
    """A candidate on its way: the workloads that it still has to be timed on, and what is known so far."""

    executable: Executable
    remaining: list[int]
    samples: dict[int, list[float]] = dataclasses.field(default_factory=dict)
    spent: dict[int, float] = dataclasses.field(default_factory=dict)
    loaded: bool = False
    compiled_here: bool = False

    def forget(self) -> None:
        self.samples.clear()
        self.spent.clear()


class KeyTiming:
    """Times one job on one slot; iterate over `run`."""

    def __init__(
        self, job: Job, slot: Slot, executables: Executables, rule: StoppingRule, rng: random.Random
    ) -> None:
        self._job = job
        self._slot = slot
        self._executables = executables
        self._rule = rule
        self._rng = rng
        self._clock = job.clock
        self._note: str | None = None
        self._known: dict[BlockSizes, dict[str, Median]] = {b: dict(m) for b, m in job.timed.items()}
        self._failed = set(job.failed)
        self._tried = {*job.failed, *(blocks for blocks in job.timed if not self._untimed(blocks))}
        self._waiting: set[BlockSizes] = set()  # their executables are being compiled
        self._taken: dict[BlockSizes, Executable] = {}
        self._active: dict[BlockSizes, _Entry] = {}
        self._strikes: Counter[BlockSizes] = Counter()
        self._prepared = False
        self._place: tuple[str | None, int] | None = None
        self._deaths = self._refusals = 0
        self._suspect: DeviceDied | None = None  # of a candidate's, while no new device has been taken

    def run(self) -> Iterator[Result]:
        """What comes of each candidate on each workload, as soon as it is known.

        Raises:
          MachineError: the device cannot be taken any more.
        """
        try:
            yield from self._run()
        except MachineError:
            if self._suspect:  # it took the chip with it, and would take the next one
                yield from self._accuse(self._suspect, "and the chip could not be taken after it")
            raise

    def _run(self) -> Iterator[Result]:
        self._ask(self._job.shortlist.first())
        while self._waiting or self._active or self._ask(self._wider()):
            try:
                self._prepare()  # while the first executables are still being compiled
                yield from self._gather()
                yield from self._advance()
            except DeviceDied as died:
                yield from self._bury(died)
                if self._deaths >= PREPARE_ATTEMPTS:
                    said = f"the device died {self._deaths} times with no candidate running: {died.said}"
                    yield from self._give_up_all(said)
                    return
            except PrepareFailed as failed:
                # A runtime that an earlier key has spoiled refuses all: a new process has the last word.
                self._slot.restart()
                self._refusals += 1
                if self._refusals >= REFUSALS:
                    yield from self._give_up_all(f"the inputs cannot be made on the device: {failed}")
                    return

    def _untimed(self, blocks: BlockSizes) -> list[int]:
        """The workloads, by their place, that a candidate has no timing for."""
        known = self._known.get(blocks, {})
        return [i for i, batch in enumerate(self._job.workloads) if batch.fingerprint not in known]

    def _prepare(self) -> None:
        if not self._prepared:
            job, device = self._job, self._slot.device()
            self._suspect = None
            if (place := (self._slot.host, self._slot.chip)) != self._place:
                for entry in self._active.values():  # of another chip: the two are never mixed
                    entry.forget()
                self._place = place
            device.prepare(job.problem, job.workloads, job.settings, job.seed, job.target)
            self._prepared = True

    # Candidates and their executables.

    def _ask(self, wanted: Sequence[BlockSizes]) -> bool:
        """Have candidates compiled that were not tried before; whether there are any."""
        new = [blocks for blocks in wanted if blocks not in self._tried and self._untimed(blocks)]
        self._tried.update(wanted)
        self._waiting.update(new)
        self._executables.ask(new)
        return bool(new)

    def _wider(self) -> list[BlockSizes]:
        complete = {
            blocks: geometric_mean(list(known.values()))
            for blocks, known in self._known.items()
            if not self._untimed(blocks)
        }
        return self._job.shortlist.wider(self._tried, complete)

    def _gather(self) -> Iterator[Result]:
        """Take executables in as they come; with nothing to time wait for one, and a little for the rest."""
        patience = 0.0 if self._active else None
        deadline = None
        while self._waiting and (came := self._executables.take(patience)):
            for blocks, executable in came:
                self._waiting.discard(blocks)
                yield from self._take_in(blocks, executable)
            if self._active and patience != 0.0:
                deadline = deadline or time.monotonic() + GATHER_SECONDS
                patience = max(0.0, deadline - time.monotonic())

    def _take_in(self, blocks: BlockSizes, executable: Executable) -> Iterator[Result]:
        entry = _Entry(executable, self._untimed(blocks))
        verdict = executable.verdict
        if verdict.status == "ok":
            self._taken[blocks] = executable
            self._active[blocks] = entry
        else:  # it compiled at the shape that tells its schedule, and does not at this key's
            yield from self._give_up(blocks, entry, verdict.status, verdict.error)

    def _load(self, device: Device) -> Iterator[Result]:
        for blocks, entry in list(self._active.items()):
            if entry.loaded:
                continue
            payload = None if self._slot.refused else entry.executable.payload
            loaded = device.load(blocks, payload)
            if loaded.refused:
                self._slot.refused = loaded.refused
            if loaded.status == "ok":
                entry.loaded, entry.compiled_here = True, loaded.compiled
            else:
                del self._active[blocks]
                yield from self._give_up(blocks, entry, loaded.status, loaded.error)

    # Rounds.

    def _advance(self) -> Iterator[Result]:
        """Load new candidates, and time one round of all workloads."""
        device = self._slot.device()
        yield from self._load(device)
        if order := self._order():
            start = time.monotonic()
            timed = device.time(order)
            self._take_samples(order, timed, time.monotonic() - start)
            if timed.seconds:
                self._deaths = 0
            yield from self._settle()

    def _order(self) -> list[Turn]:
        """The turns of a round: a section a workload, within it every candidate as often as any other."""
        sections = [
            (workload, names)
            for workload in range(len(self._job.workloads))
            if (names := [blocks for blocks, e in self._active.items() if workload in e.remaining])
        ]
        self._rng.shuffle(sections)
        wanted = {workload: self._wanted(workload, names) for workload, names in sections}
        expected = sum(
            wanted[w] * (self._expected(w, blocks) or 0.0) for w, names in sections for blocks in names
        )
        share = min(1.0, ROUND_SECONDS / expected) if expected else 1.0
        return [
            Turn(workload, blocks)
            for workload, names in sections
            for blocks in interleaved(names, max(1, math.floor(share * wanted[workload])), self._rng)
        ]

    def _wanted(self, workload: int, names: Sequence[BlockSizes]) -> int:
        """How often to time each candidate of a workload, if there is time: as often as before, once more."""
        if not any(self._expected(workload, blocks) for blocks in names):
            return 2  # nothing says how long one takes
        before = min(len(self._active[blocks].samples.get(workload, ())) for blocks in names)
        return min(MAX_REPEATS, max(FIRST_REPEATS, before))

    def _expected(self, workload: int, blocks: BlockSizes) -> float | None:
        """Seconds of one call: as measured, else as predicted."""
        if samples := self._active[blocks].samples.get(workload):
            return max(0.0, median(samples).median)
        batch = self._job.workloads[workload]
        return self._job.predicted.get(blocks, {}).get(batch.fingerprint)

    def _take_samples(self, order: Sequence[Turn], timed: Timed, seconds: float) -> None:
        self._note = timed.note or self._note
        if timed.timer is None:  # the first profiles; none of them says yet what the clock is
            return
        if timed.timer != self._clock:
            if self._clock:
                self._start_over()
            self._clock = timed.timer
        for turn, count in Counter(order).items():
            entry = self._active[turn.blocks]
            entry.spent[turn.workload] = entry.spent.get(turn.workload, 0.0) + seconds * count / len(order)
            entry.samples.setdefault(turn.workload, []).extend(timed.seconds.get(turn, ()))

    def _start_over(self) -> None:
        """The clock is another one: times of two clocks are not compared, so all are taken again."""
        self._known.clear()
        for entry in self._active.values():
            entry.forget()
            entry.remaining = list(range(len(self._job.workloads)))
        again = self._tried - self._failed - set(self._active) - self._waiting
        for blocks in sorted(again & set(self._taken)):
            self._active[blocks] = _Entry(self._taken[blocks], self._untimed(blocks))
        self._tried -= again - set(self._taken)
        self._ask(sorted(again - set(self._taken)))

    def _settle(self) -> Iterator[Result]:
        """Hand out what is known well enough, or will not be known better."""
        for blocks, entry in list(self._active.items()):
            for workload in [w for w in entry.remaining if w in entry.spent]:
                samples, spent = entry.samples[workload], entry.spent[workload]
                positive = bool(samples) and median(samples).median > 0
                if positive and self._rule.done(samples, spent):
                    entry.remaining.remove(workload)
                    yield self._timed(blocks, entry, workload)
                elif not positive and spent > PATIENCE * self._rule.max_seconds:
                    entry.remaining.remove(workload)
                    said = f"no timing in {spent:.0f} s: no event of the device, or too short for the clock"
                    yield self._result(blocks, workload, "timeout", error=said)
            if not entry.remaining:
                del self._active[blocks]

    # Results.

    def _timed(self, blocks: BlockSizes, entry: _Entry, workload: int) -> Result:
        samples = tuple(entry.samples[workload])
        found = median(samples)
        self._known.setdefault(blocks, {})[self._job.workloads[workload].fingerprint] = found
        return self._result(
            blocks,
            workload,
            "ok",
            seconds=samples,
            found=found,
            timer=self._clock,
            note=self._note,
            compiled_here=entry.compiled_here,
            compile_seconds=entry.executable.verdict.seconds,
        )

    def _result(self, blocks: BlockSizes, workload: int, status: str, **values: Any) -> Result:
        batch, slot = self._job.workloads[workload], self._slot
        return Result(blocks=blocks, workload=batch, status=status, chip=slot.chip, host=slot.host, **values)

    def _give_up(self, blocks: BlockSizes, entry: _Entry, status: str, error: str | None) -> Iterator[Result]:
        self._failed.add(blocks)
        verdict = entry.executable.verdict
        for workload in entry.remaining:
            yield self._result(
                blocks,
                workload,
                status,
                error=error,
                needed_bytes=verdict.needed_bytes,
                limit_bytes=verdict.limit_bytes,
                compile_seconds=verdict.seconds,
            )

    def _give_up_all(self, error: str) -> Iterator[Result]:
        """Nothing of this key can be run; executables that are still to come are of no use."""
        for blocks, entry in self._active.items():
            yield from self._give_up(blocks, entry, "crashed", error)
        for blocks in sorted(self._waiting):
            for workload in self._untimed(blocks):
                yield self._result(blocks, workload, "crashed", error=error)

    def _accuse(self, died: DeviceDied, how: str) -> Iterator[Result]:
        if died.blocks and (entry := self._active.pop(died.blocks, None)):
            yield from self._give_up(died.blocks, entry, died.status, f"{died.said}, {how}")

    def _bury(self, died: DeviceDied) -> Iterator[Result]:
        """A device is gone: blame its candidate, and have the others loaded into the next one."""
        self._slot.drop()
        self._prepared = False
        for entry in self._active.values():
            entry.loaded = False
        if died.bystander:
            return
        if died.loading:  # the executable is to blame, which another process compiled
            self._slot.refused = died.said
            return
        blamed = self._active.get(died.blocks) if died.blocks else None
        if died.blocks is None or blamed is None:
            self._deaths += 1
            return
        self._strikes[died.blocks] += 1
        self._suspect = died
        if self._strikes[died.blocks] >= RUN_ATTEMPTS:
            yield from self._accuse(died, f"{RUN_ATTEMPTS} times")
        else:
            # It may have been the executable from another process: this time the device compiles its own.
            blamed.executable = dataclasses.replace(blamed.executable, payload=None)
