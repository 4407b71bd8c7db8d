"""A thread a chip: it times one job after the other, and tells of what came in one queue of events."""

from __future__ import annotations

import queue
import random
import threading
from typing import NamedTuple

from autotune.devices import Devices
from autotune.kernel.problem import TableKey
from autotune.measure import Executables, Job, KeyTiming, Result, Slot

IDLE_SECONDS = 1.0


class Came(NamedTuple):
    """A result of a job."""

    job: Job
    result: Result


class Finished(NamedTuple):
    """A key's job is done."""

    key: TableKey


class Stopped(NamedTuple):
    """A chip's thread cannot go on."""

    error: BaseException


class ChipThreads:
    """Jobs go in by `give`; Came, Finished and Stopped come out as events, from the threads."""

    def __init__(self, devices: Devices, seed: int, events: queue.SimpleQueue[NamedTuple]) -> None:
        self._devices = devices
        self._seed = seed
        self._events = events
        self._jobs: queue.SimpleQueue[tuple[Job, Executables] | None] = queue.SimpleQueue()

    def __len__(self) -> int:
        return len(self._devices.slots)

    def start(self) -> None:
        for slot in self._devices.slots:
            threading.Thread(target=self._work, args=(slot,), daemon=True, name=f"chip {slot.chip}").start()

    def give(self, job: Job, store: Executables) -> None:
        self._jobs.put((job, store))

    def close(self) -> None:
        """Give the chips back. What a chip is timing is broken off."""
        for slot in self._devices.slots:
            self._jobs.put(None)
            slot.close()

    def _work(self, slot: Slot) -> None:
        try:
            while True:
                try:
                    given = self._jobs.get(timeout=IDLE_SECONDS)
                except queue.Empty:
                    slot.idle()
                    continue
                if given is None:
                    return
                job, store = given
                rng = random.Random(f"{self._seed} {job.key}")
                for result in KeyTiming(job, slot, store, self._devices.timing.rule, rng).run():
                    self._events.put(Came(job, result))
                self._events.put(Finished(job.key))
        except BaseException as error:
            self._events.put(Stopped(error))
