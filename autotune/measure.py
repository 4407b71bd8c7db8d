"""Time the shortlist of one key on one device, whatever the device does meanwhile.

Candidates join as their executables come in, and are timed in rounds, in random order, until each is known
well enough. A device that dies is replaced; the candidate that was running gets one more chance, compiled on
the device itself, and then counts as crashed.
"""

from __future__ import annotations

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
from autotune.owner import Device, DeviceDied, PrepareFailed
from autotune.shortlist import Shortlist, geometric_mean
from autotune.tpu.attached import blamed
from autotune.tpu.executable import Executable
from autotune.tpu.statistics import Median, StoppingRule, interleaved, median

T = TypeVar("T")

START_ATTEMPTS = 3
RUN_ATTEMPTS = 2
# A profile of a round stays short: one of 30 s and more may come back empty (jax issue 23446).
ROUND_SECONDS = 0.3
MAX_REPEATS = 12
# Without a single timing after this many times --max-seconds, there will be none.
PATIENCE = 3.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A key to time.

    target: name of the generation that the device is of; None for the CPU, interpreted. timed: what earlier
    runs know, by candidate and by the workload's fingerprint; it is not timed again. failed: candidates that
    earlier runs gave up.
    """

    key: TableKey
    problem: Problem
    settings: Settings
    workloads: tuple[Workload, ...]
    shortlist: Shortlist
    target: str | None
    seed: int = 0
    timed: Mapping[BlockSizes, Mapping[str, Median]] = dataclasses.field(default_factory=dict)
    failed: frozenset[BlockSizes] = frozenset()

    def untimed(self, blocks: BlockSizes) -> list[int]:
        """The workloads, by their place, that a candidate has no timing for."""
        known = self.timed.get(blocks, {})
        return [i for i, batch in enumerate(self.workloads) if batch.fingerprint not in known]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What came of a candidate on one workload.

    seconds: every timing; of them, `found` is the median. compiled_here: its executable did not load, and the
    process that holds the chip compiled one itself.
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

    def take(self, *, wait: bool) -> list[tuple[BlockSizes, Executable]]:
        """Those that have come since the last call; with `wait`, at least one."""
        return [*([self._ready.get()] if wait else []), *drained(self._ready)]


class Slot:
    """The place of one chip: a device, started when it is needed, and anew when it has died.

    chip: its number on its host. host: the host's name; None for this one. start: gives a device that holds
    the chip, or raises DeviceDied.
    """

    host: str | None = None

    def __init__(self, chip: int, start: Callable[[], Device]) -> None:
        self.chip = chip
        self._start = start
        self._device: Device | None = None
        self._closed = False

    def device(self) -> Device:
        """The device.

        Raises:
          MachineError: it died three times in a row before it held the chip.
        """
        said = ""
        for _ in range(START_ATTEMPTS):
            if self._closed:
                raise MachineError(f"chip {self.chip} was given back")
            if self._device is not None:
                return self._device
            try:
                self._device = self._start()
            except DeviceDied as died:
                said = died.said
        if self._device is None:
            variable = blamed(said)
            cure = f"unset {variable}" if variable else "see what else uses the TPU"
            raise MachineError(
                f"the device could not be taken, {START_ATTEMPTS} times in a row: {said}; what is recorded "
                f"so far is kept: {cure}, then run the same command again"
            )
        return self._device

    def drop(self) -> None:
        """Forget a device that has died."""
        self._device = None

    def idle(self) -> None:
        """There is nothing to time at the moment; a chip that others wait for is given back."""

    def close(self) -> None:
        """Free the chip, for good."""
        self._closed = True
        if self._device is not None:
            self._device.close()
            self._device = None


@dataclasses.dataclass
class _Entry:
    """A candidate on its way: what it still has to be timed on, and what is known so far."""

    executable: Executable
    remaining: list[int]
    samples: dict[int, list[float]] = dataclasses.field(default_factory=dict)
    spent: dict[int, float] = dataclasses.field(default_factory=dict)
    timer: str | None = None
    loaded: bool = False
    compiled_here: bool = False


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
        self._active: dict[BlockSizes, _Entry] = {}
        self._strikes: Counter[BlockSizes] = Counter()
        self._medians: dict[BlockSizes, dict[str, Median]] = {b: dict(m) for b, m in job.timed.items()}
        self._tried = {*job.failed, *(blocks for blocks in job.timed if not job.untimed(blocks))}
        self._prepared = False
        self._place: tuple[str | None, int] | None = None
        self._deaths = 0  # with no candidate to blame

    def run(self) -> Iterator[Result]:
        """What comes of each candidate on each workload, as soon as it is known.

        Raises:
          MachineError: the device cannot be taken any more.
        """
        waiting = self._ask(self._job.shortlist.first())
        while waiting or self._active or (waiting := self._ask(self._wider())):
            try:
                self._prepare()  # while the first executables are still being compiled
                for blocks, executable in self._executables.take(wait=not self._active):
                    waiting.discard(blocks)
                    yield from self._take_in(blocks, executable)
                yield from self._advance()
            except DeviceDied as died:
                yield from self._bury(died)
            except PrepareFailed as failed:
                yield from self._give_up_all(f"the inputs cannot be made on the device: {failed}", waiting)
                return

    def _prepare(self) -> None:
        if not self._prepared:
            job, device = self._job, self._slot.device()
            if (place := (self._slot.host, self._slot.chip)) != self._place:
                for entry in self._active.values():  # of another chip: the two are never mixed
                    entry.samples.clear()
                    entry.spent.clear()
                self._place = place
            device.prepare(job.problem, job.workloads, job.settings, job.seed, job.target)
            self._prepared = True

    def _take_in(self, blocks: BlockSizes, executable: Executable) -> Iterator[Result]:
        entry = _Entry(executable, self._job.untimed(blocks))
        verdict = executable.verdict
        if verdict.status == "ok":
            self._active[blocks] = entry
        else:  # it compiled at the shape that tells its schedule, and does not at this key's
            yield from self._give_up(blocks, entry, verdict.status, verdict.error)

    def _ask(self, wanted: Sequence[BlockSizes]) -> set[BlockSizes]:
        new = [b for b in wanted if b not in self._tried and self._job.untimed(b)]
        self._tried.update(wanted)
        self._executables.ask(new)
        return set(new)

    def _wider(self) -> list[BlockSizes]:
        complete = {
            blocks: geometric_mean(list(known.values()))
            for blocks, known in self._medians.items()
            if len(known) == len(self._job.workloads)
        }
        return self._job.shortlist.wider(self._tried, complete)

    def _advance(self) -> Iterator[Result]:
        """Load new candidates, and time one round of every workload."""
        device = self._slot.device()
        for blocks, entry in list(self._active.items()):
            if not entry.loaded:
                loaded = device.load(blocks, entry.executable.payload)
                if loaded.status != "ok":
                    del self._active[blocks]
                    yield from self._give_up(blocks, entry, loaded.status, loaded.error)
                entry.loaded, entry.compiled_here = True, loaded.compiled
        for workload in range(len(self._job.workloads)):
            names = [blocks for blocks, entry in self._active.items() if workload in entry.remaining]
            if names:
                self._round(device, workload, names)
                yield from self._settle(workload, names)

    def _round(self, device: Device, workload: int, names: list[BlockSizes]) -> None:
        order = interleaved(names, self._repeats(workload, names), self._rng)
        start = time.monotonic()
        timed = device.time(workload, order)
        share = (time.monotonic() - start) / len(names)
        for blocks in names:
            entry = self._active[blocks]
            entry.spent[workload] = entry.spent.get(workload, 0.0) + share
            if samples := timed.seconds.get(blocks):
                if entry.timer not in (None, timed.timer):
                    entry.samples.clear()  # a new device times in another way: the two are never mixed
                entry.timer = timed.timer
                entry.samples.setdefault(workload, []).extend(samples)
        self._deaths = 0

    def _repeats(self, workload: int, names: list[BlockSizes]) -> int:
        """How often to name each candidate in a round that lasts about ROUND_SECONDS."""
        known = [self._active[b].samples.get(workload, []) for b in names]
        seconds = sum(max(0.0, median(samples).median) for samples in known if samples)
        counted = sum(map(bool, known))
        if not counted or seconds <= 0:
            return 2
        return max(1, min(MAX_REPEATS, math.floor(ROUND_SECONDS / (seconds * len(names) / counted))))

    def _settle(self, workload: int, names: list[BlockSizes]) -> Iterator[Result]:
        """Hand out what is known well enough, or will not be known better."""
        for blocks in names:
            entry = self._active[blocks]
            samples, spent = entry.samples.get(workload, []), entry.spent[workload]
            positive = bool(samples) and median(samples).median > 0
            if positive and self._rule.done(samples, spent):
                entry.remaining.remove(workload)
                yield self._timed(blocks, entry, workload)
            elif not positive and spent > PATIENCE * self._rule.max_seconds:
                entry.remaining.remove(workload)
                said = f"no timing in {spent:.0f} s: the device left no event, or the clock cannot resolve it"
                yield self._result(blocks, workload, "timeout", error=said)
            if not entry.remaining:
                del self._active[blocks]

    def _timed(self, blocks: BlockSizes, entry: _Entry, workload: int) -> Result:
        samples = tuple(entry.samples[workload])
        found = median(samples)
        self._medians.setdefault(blocks, {})[self._job.workloads[workload].fingerprint] = found
        seconds = entry.executable.verdict.seconds
        return self._result(
            blocks,
            workload,
            "ok",
            seconds=samples,
            found=found,
            timer=entry.timer,
            compiled_here=entry.compiled_here,
            compile_seconds=seconds,
        )

    def _result(self, blocks: BlockSizes, workload: int, status: str, **values: Any) -> Result:
        batch, slot = self._job.workloads[workload], self._slot
        return Result(blocks=blocks, workload=batch, status=status, chip=slot.chip, host=slot.host, **values)

    def _give_up(self, blocks: BlockSizes, entry: _Entry, status: str, error: str | None) -> Iterator[Result]:
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

    def _give_up_all(self, error: str, waiting: set[BlockSizes]) -> Iterator[Result]:
        """Nothing of this key can be run; executables that are still to come are of no use."""
        for blocks, entry in self._active.items():
            yield from self._give_up(blocks, entry, "crashed", error)
        for blocks in waiting:
            for workload in self._job.untimed(blocks):
                yield self._result(blocks, workload, "crashed", error=error)
        self._active.clear()

    def _bury(self, died: DeviceDied) -> Iterator[Result]:
        """A device is gone: blame its candidate, and have the others loaded into the next one."""
        self._slot.drop()
        self._prepared = False
        for entry in self._active.values():
            entry.loaded = False
        blamed = self._active.get(died.blocks) if died.blocks else None
        if died.blocks is None or blamed is None:
            self._deaths += 1
            if self._deaths >= START_ATTEMPTS:
                raise MachineError(
                    f"the device died {self._deaths} times with no candidate running: {died.said}; what is "
                    "recorded so far is kept"
                )
            return
        self._strikes[died.blocks] += 1
        if self._strikes[died.blocks] >= RUN_ATTEMPTS:
            del self._active[died.blocks]
            yield from self._give_up(died.blocks, blamed, died.status, f"{died.said}, {RUN_ATTEMPTS} times")
        else:
            # It may have been the executable from another process: this time the device compiles its own.
            blamed.executable = dataclasses.replace(blamed.executable, payload=None)
