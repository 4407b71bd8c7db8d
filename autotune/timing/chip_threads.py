"""A thread a device: it times one job after the other, and tells of what came in one queue of events."""

from __future__ import annotations

import queue
import random
import threading
from typing import NamedTuple

from autotune.errors import MachineError
from autotune.kernel.problem import TableKey
from autotune.timing.devices import Devices
from autotune.timing.key_timing import Executables, Job, KeyTiming, Result, drained
from autotune.timing.slot import Slot

IDLE_SECONDS = 1.0


class Came(NamedTuple):
    """A result of a job."""

    job: Job
    result: Result


class Finished(NamedTuple):
    """A key's job is done."""

    key: TableKey


class Retired(NamedTuple):
    """A device cannot be taken any more; the job that it was to do, if it had one, is not done."""

    slot: Slot
    key: TableKey | None
    error: MachineError


class Stopped(NamedTuple):
    """A thread has failed."""

    error: BaseException


_Given = tuple[Job, Executables]


class ChipThreads:
    """Jobs go in by `give`; Came, Finished, Retired and Stopped come out as events, from the threads.

    A job is of a device's index among its chip's, as its executables are; slots of that index share a queue.
    """

    def __init__(self, devices: Devices, seed: int, events: queue.SimpleQueue[NamedTuple]) -> None:
        self._slots = list(devices.slots)
        self._rule = devices.timing.rule
        self._seed = seed
        self._events = events
        self._jobs: dict[int, queue.SimpleQueue[_Given | None]] = {
            index: queue.SimpleQueue() for index in sorted({slot.index for slot in self._slots})
        }

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def refused(self) -> list[str]:
        """Why devices take no executables that others compiled, of those that do not."""
        return [slot.refused for slot in self._slots if slot.refused]

    def loads(self, index: int) -> bool:
        """Whether a device of this index takes executables that others compiled."""
        return any(slot.index == index and not slot.refused for slot in self._slots)

    def start(self) -> None:
        for slot in self._slots:
            threading.Thread(target=self._work, args=(slot,), daemon=True, name=f"chip {slot.chip}").start()

    def index(self) -> int:
        """The index of devices whose queue is the shortest for their number."""
        indices = [slot.index for slot in self._slots]
        return min(indices, key=lambda index: self._jobs[index].qsize() / indices.count(index))

    def give(self, job: Job, store: Executables) -> None:
        self._jobs[job.index].put((job, store))

    def retire(self, slot: Slot) -> list[TableKey]:
        """Do without a slot; the keys of jobs that now no slot can do."""
        self._slots.remove(slot)
        if any(other.index == slot.index for other in self._slots):
            return []
        return [given[0].key for given in drained(self._jobs[slot.index]) if given]

    def close(self) -> None:
        """Give the chips back. What a device is timing is broken off."""
        for slot in self._slots:
            self._jobs[slot.index].put(None)
            slot.close()

    def _work(self, slot: Slot) -> None:
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
                rng = random.Random(f"{self._seed} {job.key}")
                for result in KeyTiming(job, slot, store, self._rule, rng).run():
                    self._events.put(Came(job, result))
                self._events.put(Finished(job.key))
                key = None
        except MachineError as error:
            self._events.put(Retired(slot, key, error))
        except BaseException as error:
            self._events.put(Stopped(error))
