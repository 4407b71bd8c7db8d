"""Progress of long work: a bar with an estimate in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections import Counter
from types import TracebackType
from typing import Self

from autotune.kernel.problem import TableKey
from autotune.measure import Result
from autotune.search import Outlook
from autotune.space import expected_compile_seconds
from autotune.tpu.compiler import Compiled
from autotune.workers import Task

LOG_EVERY_SECONDS = 30.0


class CompileProgress:
    """Follows the compiles of a sweep on standard error; use as a context manager.

    The estimate weighs programs by how long each is expected to compile, and is scaled by how long those
    before it took.
    """

    def __init__(self, outlook: Outlook, jobs: int) -> None:
        from tqdm import tqdm

        self._jobs = jobs
        self._done = 0.0  # expected seconds of the programs that are compiled
        self._left = 0.0  # and of those that may still be
        self._count = self._programs = self._timings = 0
        self._statuses: Counter[str] = Counter()
        self._start = self._logged = time.monotonic()
        self._bar = tqdm(
            total=1.0,
            bar_format="{desc} |{bar:18}| {postfix}",
            file=sys.stderr,
            disable=not sys.stderr.isatty(),
            dynamic_ncols=True,
            leave=False,
        )
        self._expect(outlook)
        self._show()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.close()

    @property
    def seconds_left(self) -> float:
        """Estimated seconds until the last compile ends."""
        elapsed = time.monotonic() - self._start
        if self._done <= 0:
            return self._left / self._jobs
        return elapsed * self._left / self._done

    def advance(self, task: Task, verdict: Compiled, outlook: Outlook) -> None:
        """One more program has its verdict; outlook: what is left after it."""
        self._count += 1
        self._done += expected_compile_seconds(task.program)
        self._statuses[verdict.status] += 1
        self._expect(outlook)
        self._show()

    def _expect(self, outlook: Outlook) -> None:
        self._programs = self._count + outlook.programs
        self._left = outlook.seconds

    def timed(self, key: TableKey, result: Result) -> None:
        """One more candidate has its timing on a workload, or will have none."""
        self._timings += 1
        self._show()

    def _show(self) -> None:
        failed = self._count - self._statuses["ok"]
        text = f"{self._count}/{self._programs} compiled" + (
            f", {failed} do not fit or fail" if failed else ""
        )
        if self._timings:
            text += f", {self._timings} timings"
        left = f"about {duration(self.seconds_left)} left"
        if not self._bar.disable:
            self._bar.set_description_str(text, refresh=False)
            self._bar.set_postfix_str(left, refresh=False)
            self._bar.n = round(self._done / (self._done + self._left), 3) if self._count else 0
            self._bar.refresh()
        elif (self._count or self._timings) and time.monotonic() - self._logged >= LOG_EVERY_SECONDS:
            self._logged = time.monotonic()
            print(f"{text}, {left}", file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """Seconds as a person says them: 8 s, 3 min, 1 h 20 min."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"
