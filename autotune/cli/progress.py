"""Progress of long work: a line that is written over in a terminal, one a minute elsewhere."""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, NamedTuple, Self

from autotune.cli.eta import seconds_left, seconds_of
from autotune.compile.pool import Task
from autotune.io.terminal import INTERRUPTS, columns, printable, say, watched
from autotune.kernel.problem import BlockSizes, Program, TableKey
from autotune.results import schema
from autotune.results.rows import key_of, pair_of
from autotune.search.space import expected_compile_seconds
from autotune.search.strategy import Outlook
from autotune.timing.key_timing import Result
from autotune.tpu.compiler import Compiled

LOG_EVERY_SECONDS = 60.0
FIRST_SECONDS, TICK_SECONDS = 0.1, 1.0
LEAST_BAR = 6  # columns; in a terminal too narrow for one there is none


class Part(NamedTuple):
    """A part of the line. In a narrow terminal the highest rank goes first; what has rank 0 stays."""

    text: str
    rank: int


# Where nobody watches a bar, a wait that is longer than this is explained.
NOTICE_SECONDS = 2.0


def of_batch(outlook: Outlook, jobs: int) -> CompileProgress:
    """Of some programs that a command wants to know of."""
    return CompileProgress(outlook, jobs, notice=NOTICE_SECONDS)


class CompileProgress:
    """Follows the compiles of a sweep on standard error; a context manager, to be left before the pool is.

    candidates: what the programs are compiled for, to say how many of them need no compile; None for no word
    of it. notice: where nobody watches, seconds after which a line says what is being waited for; None for
    none. verbose: say of each failure what the compiler said.

    The estimate weighs programs by how long each is expected to compile, and is scaled by how long those
    before it took. Where keys are timed as well, that takes the longer, and keys are counted: how long one
    takes is known when the first is done. While there is no estimate, as when the time has passed, the
    compile that has been under way for longest is named.
    """

    def __init__(
        self,
        outlook: Outlook,
        jobs: int,
        *,
        candidates: int | None = None,
        notice: float | None = None,
        verbose: bool = False,
    ) -> None:
        self._jobs = jobs
        self._candidates = candidates
        self._notice = notice
        self._verbose = verbose
        self._done = 0.0  # expected seconds of the programs that are compiled
        self._left = 0.0  # and of those that may still be
        self._count = self._programs = self._timings = 0
        self._keys: tuple[int, int] | None = None  # timed, and all
        self._statuses: Counter[str] = Counter()
        self._best = Best()
        self._under_way = UnderWay(jobs)
        self._start = self._logged = self._told = time.monotonic()
        # Seconds from when it was last told something.
        self._estimate: float | None = seconds_left(0.0, 0.0, outlook.seconds, jobs)
        self._lock = threading.RLock()  # between the thread that is told and the one that ticks
        self._ended = threading.Event()
        self._ticker = threading.Thread(target=self._tick, daemon=True, name="progress")
        self._line = _Line() if watched(sys.stderr) else None
        self._expect(outlook)

    def __enter__(self) -> Self:
        self._told = time.monotonic()
        try:
            self._ticker.start()
        except KeyboardInterrupt as interrupt:
            self.__exit__(KeyboardInterrupt, interrupt, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Clear the line. After a Ctrl-C, say so at once: workers take some seconds to end."""
        self._ended.set()
        with self._lock:
            if self._line:
                self._line.clear()
                self._line = None
        if kind is KeyboardInterrupt:
            say("stopping ...")
        if self._ticker.is_alive():
            self._ticker.join(TICK_SECONDS)  # a thread that outlives the interpreter may crash it

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds until the end; None while nothing can be said, or where they have passed."""
        if self._estimate is None:
            return None
        left = self._estimate - (time.monotonic() - self._told)
        return left if left > 0 else None

    def compiling(self, task: Task) -> None:
        """One more program is given to the pool."""
        with self._lock:
            self._under_way.add(task)

    def advance(self, task: Task, verdict: Compiled, outlook: Outlook) -> None:
        """One more program has its verdict; outlook: what is left after it."""
        with self._lock:
            self._count += 1
            self._under_way.remove(task)
            expected = expected_compile_seconds(task.program)
            self._done += seconds_of(expected, verdict.status == "ok", verdict.seconds)
            self._statuses[verdict.status] += 1
            self._expect(outlook)
            if self._verbose and verdict.status != "ok":
                blocks = task.program.blocks
                self._say(
                    f"{blocks[0]},{blocks[1]} of {task.program.layout}: {verdict.status}",
                    verdict.said or verdict.error,
                )
            self._told_something()

    def timed(self, key: TableKey, result: Result) -> None:
        """One more candidate has its timing on a workload, or will have none."""
        with self._lock:
            self._timings += 1
            if self._verbose and result.status != "ok":
                where = f"({', '.join(map(str, key))}) at {result.blocks[0]},{result.blocks[1]}"
                self._say(f"{where}: {result.status}", result.error)
            self._told_something()

    def keys_timed(self, done: int, total: int) -> None:
        """So many of the keys to time are timed."""
        with self._lock:
            self._keys = done, total
            self._told_something()

    def note(self, said: str) -> None:
        """Something that whoever watches should know now."""
        with self._lock:
            if self._line:
                self._line.clear()
            say(said)

    def recorded(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """These rows are new."""
        with self._lock:
            for row in rows:
                self._best.add(row)

    def _expect(self, outlook: Outlook) -> None:
        self._programs = self._count + outlook.programs
        self._left = outlook.seconds

    def _told_something(self) -> None:
        self._told = time.monotonic()
        elapsed = self._told - self._start
        if self._keys:
            done, total = self._keys
            self._estimate = elapsed * (total - done) / done if done else None
        elif self._done > 0:
            self._estimate = seconds_left(elapsed, self._done, self._left, self._jobs)
        self._show()

    def _tick(self) -> None:
        """The clock's thread: the line changes while a single compile takes minutes."""
        signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTS)  # the main thread's affair
        pause = FIRST_SECONDS
        while not self._ended.wait(pause):
            pause = TICK_SECONDS
            with contextlib.suppress(OSError, ValueError):  # the terminal is gone; the work goes on
                self._show()

    def _show(self) -> None:
        with self._lock:
            if self._ended.is_set() or not self._ticker.is_alive():  # not entered yet: none would clear it
                return
            if self._line:
                self._line.show(self._parts(), self._times(), self._share())
                return
            now = time.monotonic()
            if now - self._logged >= LOG_EVERY_SECONDS:
                self._logged = now
                say(", ".join([*(part.text for part in self._parts()), self._times()]))
            elif self._notice is not None and now - self._start >= self._notice:
                self._notice = None
                left = self.seconds_left
                say(
                    f"compiling, {self._count}/{self._programs} done"
                    + (f", about {duration(left)} left" if left else "")
                )

    def _parts(self) -> list[Part]:
        failed = self._count - self._statuses["ok"]
        compiled = f"{self._count}/{self._programs} compiled" if self._programs else "nothing to compile"
        parts = [Part(compiled, 0)]
        if self.seconds_left is None and (longest := self._under_way.longest()):
            pair, seconds = longest
            parts.append(Part(f"compiling {pair[0]},{pair[1]} for {duration(seconds)}", 2))
        if failed:
            parts.append(Part(f"{failed} failed", 2))
        if self._programs and self._candidates is not None and self._candidates > self._programs:
            parts.append(Part(f"{self._candidates - self._programs} need no compile", 4))
        if self._keys:
            parts.append(Part(f"{self._timings} timings", 5))
            parts.append(Part(f"{self._keys[0]}/{self._keys[1]} keys timed", 1))
        if best := self._best.pair:
            whose = "latest key's best" if self._best.several else "best"
            parts.append(Part(f"{whose} {best[0]},{best[1]}", 3))
            parts.append(Part(self._best.latency, 6))
            if self._best.several:
                parts.append(Part(self._best.key, 7))
        return parts

    def _times(self) -> str:
        seconds = self.seconds_left
        left = "" if seconds is None else f", {duration(seconds)} left"
        return clock(time.monotonic() - self._start) + left

    def _share(self) -> float:
        """How much is done, from 0 to 1."""
        done, total = self._keys or (self._count, self._programs)
        return done / total if total else 0.0

    def _say(self, what: str, said: str | None) -> None:
        """Lines above the line of progress."""
        self.note(what)
        for line in (said or "").split("\n"):
            print(f"  {printable(line)}", file=sys.stderr, flush=True)


class Best:
    """The best pair so far of the key that was recorded last."""

    def __init__(self) -> None:
        self._latencies: dict[tuple[TableKey, str], dict[BlockSizes, dict[str, float]]] = {}
        self.pair: BlockSizes | None = None
        self.latency = ""  # with where it comes from
        self.key = ""  # what tells one key from another in most sweeps

    @property
    def several(self) -> bool:
        """Whether more than one key was recorded."""
        return len({key for key, _ in self._latencies}) > 1

    def add(self, row: Mapping[str, Any]) -> None:
        """An interpreter's row says nothing of what is best."""
        if row["latency_us"] is None or row["source"] == schema.INTERPRETED:
            return
        key = key_of(row)
        if row["source"] == schema.MODELLED and (key, schema.MEASURED) in self._latencies:
            return
        blocks = pair_of(row)
        pairs = self._latencies.setdefault((key, row["source"]), {})
        pairs.setdefault(blocks, {})[row["workload_fingerprint"]] = row["latency_us"]
        # Those with a latency on fewer workloads than others cannot be compared yet.
        most = max(map(len, pairs.values()))
        means = {
            blocks: math.exp(sum(map(math.log, by_workload.values())) / most)
            for blocks, by_workload in pairs.items()
            if len(by_workload) == most and min(by_workload.values()) > 0
        }
        if means:
            self.pair = min(means, key=lambda blocks: (means[blocks], blocks))
            self.latency = f"{row['source']} {means[self.pair]:.4g} us"
            heads = f"{key.num_q_heads_per_blk}/{key.num_kv_heads_per_blk}"
            self.key = (
                f"q/kv {heads} page {key.page_size} tokens {key.max_num_batched_tokens} "
                f"length {key.max_model_len}"
            )


class UnderWay:
    """The programs that are given to a pool and not compiled; as many as it has jobs are being compiled."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._since: dict[Program, float | None] = {}  # in their order; None: waits for a worker

    def add(self, task: Task) -> None:
        self._since[task.program] = None
        self._start()

    def remove(self, task: Task) -> None:
        self._since.pop(task.program, None)  # one that another sweep compiled was never here
        self._start()

    def _start(self) -> None:
        for program in list(self._since)[: self._jobs]:
            if self._since[program] is None:
                self._since[program] = time.monotonic()

    def longest(self) -> tuple[BlockSizes, float] | None:
        """The block sizes of the one that has been compiled for longest, and for how many seconds."""
        for program, since in self._since.items():
            if since is not None:
                return program.blocks, time.monotonic() - since
        return None


class _Line:
    """One line of a terminal, written over again and again, never wider than the terminal is just now."""

    def __init__(self) -> None:
        self._width = 0

    def show(self, parts: list[Part], times: str, share: float) -> None:
        from tqdm import tqdm

        width = columns(sys.stderr)
        if not self._width or width < self._width:
            self._write = tqdm.status_printer(sys.stderr)  # one that was used pads up to the former width
        self._width = width
        text, bar = fitted(parts, times, width)
        form = f"{text} |{{bar:{bar}}}| {times}" if bar else f"{text} {times}"
        self._write(tqdm.format_meter(share, 1.0, 0.0, ncols=width, bar_format=form, ascii=" #"))

    def clear(self) -> None:
        if self._width:
            # To the end of the line, where a Ctrl-C was echoed.
            sys.stderr.write(f"\r{' ' * (columns(sys.stderr) - 1)}\r")
            sys.stderr.flush()


def fitted(parts: list[Part], times: str, width: int) -> tuple[str, int]:
    """What of the parts fits beside the times, and the columns that are left for a bar, 0 for none."""
    parts = list(parts)

    def text() -> str:
        return ", ".join(part.text for part in parts)

    def left() -> int:
        return width - len(text()) - len(times) - len(" || ")

    while left() < LEAST_BAR and (last := max(parts, key=lambda part: part.rank)).rank:
        parts.remove(last)
    return text(), min(18, left()) if left() >= LEAST_BAR else 0


def clock(seconds: float) -> str:
    """Seconds as a clock shows them: 0:07, 12:30, 1:02:03."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def between(seconds: float) -> str:
    """Half of an estimate to twice of it: before a compile, the speed of the machine is not known."""
    least, most = duration(seconds / 2), duration(2 * seconds)
    if least.split()[1:] == most.split()[1:]:
        least = least.split()[0]
    return f"{least} to {most}"


def duration(seconds: float) -> str:
    """Seconds as a person says them: 8 s, 3 min, 1 h 20 min."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"
