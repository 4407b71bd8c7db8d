"""Progress of long work: a bar with an estimate in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections import Counter
from types import TracebackType
from typing import Self

from autotune.kernel.problem import TableKey
from autotune.measure import Result
from autotune.pool import Task
from autotune.search import Outlook
from autotune.space import expected_compile_seconds
from autotune.tpu.compiler import Compiled

LOG_EVERY_SECONDS = 30.0


class CompileProgress:
    """Follows the compiles of a sweep on standard error; use as a context manager.

    The estimate weighs programs by how long each is expected to compile, and is scaled by how long those
    before it took. Where keys are timed as well, that takes the longer, and keys are counted: how long one
    takes is known when the first is done.
    """

    def __init__(self, outlook: Outlook, jobs: int) -> None:
        from tqdm import tqdm

        self._jobs = jobs
        self._done = 0.0  # expected seconds of the programs that are compiled
        self._left = 0.0  # and of those that may still be
        self._count = self._programs = self._timings = 0
        self._keys: tuple[int, int] | None = None  # timed, and all
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
    def seconds_left(self) -> float | None:
        """Estimated seconds until the end; None while nothing can be said."""
        elapsed = time.monotonic() - self._start
        if self._keys:
            done, total = self._keys
            return elapsed * (total - done) / done if done else None
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

    def keys_timed(self, done: int, total: int) -> None:
        """So many of the keys to time are timed."""
        self._keys = done, total
        self._show()

    def _show(self) -> None:
        failed = self._count - self._statuses["ok"]
        text = f"{self._count}/{self._programs} compiled" + (
            f", {failed} do not fit or fail" if failed else ""
        )
        if self._keys:
            text += f", {self._timings} timings, {self._keys[0]}/{self._keys[1]} keys timed"
        seconds = self.seconds_left
        left = "" if seconds is None else f"about {duration(seconds)} left"
        if not self._bar.disable:
            self._bar.set_description_str(text, refresh=False)
            self._bar.set_postfix_str(left, refresh=False)
            self._bar.n = round(self._share(), 3)
            self._bar.refresh()
        elif (self._count or self._timings) and time.monotonic() - self._logged >= LOG_EVERY_SECONDS:
            self._logged = time.monotonic()
            print(", ".join(filter(None, (text, left))), file=sys.stderr, flush=True)

    def _share(self) -> float:
        """How much is done, from 0 to 1."""
        if self._keys:
            return self._keys[0] / self._keys[1]
        return self._done / (self._done + self._left) if self._count else 0.0


def duration(seconds: float) -> str:
    """Seconds as a person says them: 8 s, 3 min, 1 h 20 min."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"
