"""Compiles in worker processes, which may crash or hang without hurting anything but their own task."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Future
from multiprocessing import resource_tracker
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pebble

from autotune.errors import MachineError, first_line
from autotune.files import FULL, scratch_folder
from autotune.pool import Pool, Task
from autotune.tpu import chips
from autotune.tpu.compiler import Compiled, clear, compile_program, take_environment
from autotune.tpu.compiler import failed as verdict_of
from autotune.tpu.executable import Call, Executable, compile_ahead

ATTEMPTS = 2
MAX_LOG_TAIL = 1 << 16
MAX_LAST_WORDS = 4096
ROOM_BYTES = 1 << 16
# Lines of the trace that libtpu writes after the reason of its end.
_TRACE = re.compile(r"https://symbolize|\*\*\* |@ |=== |third_party/|file/|\)")


class NoRoom(Exception):
    """A disk is full, or a limit on files reached, where the compiler writes; the message says which."""


class CompilePool(Pool):
    """Worker processes of this machine that compile programs.

    jobs: how many compile at once. timeout: seconds that one compile may take.
    """

    def __init__(self, jobs: int, timeout: float) -> None:
        self.jobs = jobs
        self._timeout = timeout

    def __enter__(self) -> Self:
        # Ctrl-C reaches the whole terminal, and the parent decides. Workers inherit the mask of the thread
        # that starts them, and pebble's threads that of this one: so none is interrupted, however early.
        _start_resource_tracker()  # once started from such a thread, it would lift the mask again
        self._others = set(multiprocessing.active_children())
        with _ctrl_c_kept() as kept:
            self._folder, self._in_use = scratch_folder("autotune-compile-")
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            # Spawned, not forked: the parent may hold threads, and a worker sets its environment before jax.
            self._pool = pebble.ProcessPool(
                max_workers=self.jobs,
                context=multiprocessing.get_context("spawn"),
                initializer=_start_worker,
                initargs=(str(self._folder), os.getpid()),
            )
            try:
                _ = self._pool.active  # starts the pool
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if kept:
            interrupt = KeyboardInterrupt()
            self.__exit__(KeyboardInterrupt, interrupt, None)
            raise interrupt
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Wait for the workers, or stop them at once when leaving on an error or an interrupt."""
        # A Ctrl-C in here would leave workers and files behind: it waits for the end of it.
        with _ctrl_c_kept() as kept:
            if kind is None:
                self._pool.close()
            else:
                self._pool.stop()
                # pebble first takes away what a worker that is just starting opens, and it would complain.
                for worker in set(multiprocessing.active_children()) - self._others:
                    worker.kill()
            self._pool.join()
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._in_use)
        if kept and kind is None:
            raise KeyboardInterrupt

    def submit(self, task: Task, then: Callable[[Compiled], None]) -> None:
        self._start(_compile, task, then, lambda verdict: verdict)

    def submit_ahead(self, call: Call, then: Callable[[Executable], None]) -> None:
        self._start(_compile_ahead, call, then, lambda verdict: Executable(verdict=verdict))

    def _start(
        self,
        work: Callable[[Any], Any],
        task: Any,
        then: Callable[[Any], None],
        failed: Callable[[Compiled], Any],
        attempt: int = 1,
    ) -> None:
        def finished(future: Future[Any]) -> None:
            if future.cancelled():  # the pool was stopped
                return
            try:
                result = future.result()
            except TimeoutError:
                verdict = Compiled(
                    status="timeout",
                    error=f"the compile took more than --compile-timeout {self._timeout:g} s",
                    seconds=self._timeout,
                )
                result = failed(verdict)
            except pebble.ProcessExpired as expired:
                if full := self._no_room(expired.pid):
                    then(failed(self._break(full)))
                    return
                if attempt < ATTEMPTS:
                    self._start(work, task, then, failed, attempt + 1)
                    return
                result = failed(Compiled(status="crashed", error=self._last_words(expired)))
            except BrokenExecutor as error:
                result = failed(self._break(error))
            except Exception as error:  # what a worker could not turn into a verdict
                result = failed(dataclasses.replace(verdict_of(error, 0.0), seconds=None))
            then(result)

        try:
            future = self._pool.schedule(work, args=[task], timeout=self._timeout)
        except RuntimeError as error:  # what pebble raises of a pool that is broken
            then(failed(self._break(error)))
        else:
            future.add_done_callback(finished)

    def _break(self, error: Exception) -> Compiled:
        """Note that no more can be compiled; the verdict is for nobody to record."""
        full = error if isinstance(error, NoRoom) else self._no_room(None)
        if full:
            self.broken = MachineError(
                f"the compiler has no room for its files in {str(self._folder.parent)!r} ({full}); what is "
                "recorded so far is kept: make room there, or name another folder in TMPDIR, then run the "
                "same command again"
            )
        else:
            self.broken = MachineError(
                f"the compiling processes cannot be kept running ({first_line(error)}); what is recorded so "
                "far is kept: free some memory or lower --jobs, then run the same command again"
            )
        return Compiled(status="crashed", error=first_line(error))

    def _no_room(self, pid: int | None) -> NoRoom | None:
        """Whether a worker died for want of room for its files, and not of its program.

        libtpu aborts where it cannot write a listing, and says why, if there is room for that.
        """
        said = self._log_tail(pid) if pid else ""
        for code in FULL:
            if os.strerror(code) in said:
                return NoRoom(os.strerror(code))
        try:
            with (self._folder / "room").open("wb") as file:
                file.write(bytes(ROOM_BYTES))
        except OSError as error:
            if error.errno in FULL:
                return NoRoom(os.strerror(error.errno))
        return None

    def _log_tail(self, pid: int) -> str:
        """The end of what a worker or libtpu wrote."""
        with contextlib.suppress(OSError), (self._folder / f"{pid}.log").open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - MAX_LOG_TAIL))
            return log.read(MAX_LOG_TAIL).decode(errors="replace")
        return ""

    def _last_words(self, expired: pebble.ProcessExpired) -> str:
        """How a worker ended, with the last line that it or libtpu wrote."""
        code = expired.exitcode or 0
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        text = f"the compiling process ended {how}, {ATTEMPTS} times"
        lines = [line.strip() for line in self._log_tail(expired.pid)[-MAX_LAST_WORDS:].split("\n")]
        if said := [line for line in lines if line and line.isprintable() and not _TRACE.match(line)]:
            text += f": {said[-1][:200]}"
        return text


def _start_resource_tracker() -> None:
    """Start the process that removes semaphores if this one is killed, without its warning that it did."""
    before = os.environ.get("PYTHONWARNINGS")
    quiet = "ignore:resource_tracker:UserWarning"
    os.environ["PYTHONWARNINGS"] = f"{before},{quiet}" if before else quiet
    try:
        resource_tracker.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONWARNINGS"]
        else:
            os.environ["PYTHONWARNINGS"] = before


@contextlib.contextmanager
def _ctrl_c_kept() -> Iterator[list[int]]:
    """Note the Ctrl-Cs that come meanwhile, and a SIGTERM that is answered in the same way; only the main
    thread may, and only it is interrupted by them."""
    kept: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield kept
        return
    numbers = [
        n for n in (signal.SIGINT, signal.SIGTERM) if n == signal.SIGINT or callable(signal.getsignal(n))
    ]
    before = {number: signal.signal(number, lambda signum, frame: kept.append(signum)) for number in numbers}
    try:
        yield kept
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _start_worker(folder: str, parent: int) -> None:
    """Prepare a worker, before it imports jax."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the parent decides
    mine = Path(folder) / str(os.getpid())
    mine.mkdir(parents=True)
    take_environment(mine)
    # What libtpu prints belongs to a row that failed, not on the user's screen.
    log = os.open(Path(folder) / f"{os.getpid()}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    threading.Thread(target=_leave_with_parent, args=(folder, parent), daemon=True).start()


def _leave_with_parent(folder: str, parent: int) -> None:
    """End this worker soon after its parent was killed, and take the temporary files along."""
    while os.getppid() == parent:
        time.sleep(0.5)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _compile(task: Task) -> Compiled:
    """The verdict on a program; of a failure also what libtpu logged meanwhile."""
    logged = os.fstat(2).st_size
    verdict = compile_program(chips.by_name(task.target), task.program, _dump_folder())
    if verdict.status == "ok":
        return verdict
    with _dump_folder().with_suffix(".log").open("rb") as log:
        log.seek(logged)
        lines = log.read(MAX_LOG_TAIL).decode(errors="replace")
    return dataclasses.replace(verdict, said=f"{verdict.said or verdict.error}\n{lines}".strip())


def _compile_ahead(call: Call) -> Executable:
    try:
        return compile_ahead(call)
    finally:
        clear(_dump_folder())


def _dump_folder() -> Path:
    return Path(os.environ["LIBTPU_INIT_ARGS"].split("--xla_jf_dump_to=")[1].split()[0])
