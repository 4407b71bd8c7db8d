"""What compiles for a sweep, seen from the sweep: tasks go in, verdicts come out, whatever happens to them.

`local_pool` does it with processes of this machine, `ray_pool` with those of a Ray cluster.
"""

from __future__ import annotations

import functools
import queue
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

from autotune.errors import MachineError
from autotune.kernel.problem import Program
from autotune.tpu.compiler import Compiled
from autotune.tpu.executable import Call, Executable


class Task(NamedTuple):
    """One program to compile for one target."""

    target: str
    program: Program


class Job(Protocol):
    """Anything else that a compiling process can answer."""

    def run(self, listings: Path) -> Any:
        """The answer. listings: an empty folder, to which the compiler writes.

        Raises:
          MachineFault, OSError: what they say is not about the program.
        """


Work = Task | Call | Job


def failed(work: Work, verdict: Compiled) -> Compiled | Executable:
    """The result of work of which there is only a verdict."""
    return Executable(verdict=verdict) if isinstance(work, Call) else verdict


class Pool(ABC):
    """Compiles programs in processes that may die; use as a context manager.

    jobs: how many compile at once. broken: why nothing can be compiled any more, once that is so.
    """

    jobs: int
    broken: MachineError | None = None

    @abstractmethod
    def __enter__(self) -> Self: ...

    @abstractmethod
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave no process and no file behind; on an error or an interrupt, at once."""

    @abstractmethod
    def submit(self, work: Work, then: Callable[[Any], None]) -> None:
        """Do some work after what was submitted before; `then` is called with its result, in a thread.

        The result of a Task is its verdict, of a Call the Executable, of a Job its answer; a verdict in place
        of an answer where the Job's process hung or died.
        """

    def run(self, next_task: Callable[[], Task | None]) -> Iterator[tuple[Task, Compiled]]:
        """Compile tasks over the workers; verdicts come as they are ready.

        next_task: the task to start when a worker is free; None if there is none now. It is asked again
        after each verdict, and the run ends when nothing is under way and there is none.

        A compile beyond the time limit is `timeout`; one whose worker died twice is `crashed`.

        Raises:
          MachineError: workers cannot be started any more; also in `broken` from then on.
        """
        done: queue.SimpleQueue[tuple[Task, Compiled]] = queue.SimpleQueue()
        pending = 0
        while True:
            # One more than there are workers, so that none waits while the parent writes rows.
            while pending <= self.jobs and (task := next_task()):
                self.submit(task, functools.partial(_put, done, task))
                pending += 1
            if not pending:
                return
            verdict = done.get()
            if self.broken:
                raise self.broken
            pending -= 1
            yield verdict


# Makes a pool of so many jobs, with so many seconds for one compile.
StartPool = Callable[[int, float], Pool]


def _put(done: queue.SimpleQueue[tuple[Task, Compiled]], task: Task, verdict: Compiled) -> None:
    done.put((task, verdict))
