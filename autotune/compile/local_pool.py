"""Compiles in worker processes, which may crash or hang without hurting anything but their own task."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import pickle
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from autotune.compile.pool import Pool, Task, Work, failed
from autotune.errors import MachineError, first_line
from autotune.io.files import FULL, scratch_folder
from autotune.io.patience import Patience
from autotune.io.terminal import FROM_TERMINAL, INTERRUPTS
from autotune.tpu import environment as chip_process
from autotune.tpu import generations
from autotune.tpu.compiler import (
    Compiled,
    MachineFault,
    clear,
    compile_program,
    environment,
)
from autotune.tpu.executable import Call, Executable, compile_ahead

ATTEMPTS = 2
START_SECONDS = 120.0  # a worker takes 0.2 s; a cold disk or a network one takes longer
MAX_LOG_TAIL = 1 << 16
MAX_LAST_WORDS = 4096
ROOM_BYTES = 1 << 16
# Lines of the trace that libtpu writes after the reason of its end.
_TRACE = re.compile(r"https://symbolize|\*\*\* |@ |=== |third_party/|file/|\)")
_CHILD = "from autotune.compile.local_pool import serve; serve()"


class _Died(Exception):
    """A worker is gone; the message says how it ended."""


class _Hangs(Exception):
    """A worker did not answer within its time."""

    def __str__(self) -> str:
        return "did not answer"


class CompilePool(Pool):
    """Worker processes of this machine that compile programs.

    jobs: how many compile at once. timeout: seconds that one compile may take.
    """

    def __init__(self, jobs: int, timeout: float) -> None:
        self.jobs = jobs
        self._timeout = timeout
        self._items: queue.SimpleQueue[tuple[Work, Callable[[Any], None]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._workers: set[_Worker] = set()
        self._numbers = itertools.count()
        self._leaving = False

    def __enter__(self) -> Self:
        with _ctrl_c_kept() as kept:
            try:
                self._folder, self._in_use = scratch_folder("autotune-compile-")
            except OSError as error:
                raise _refusal(error) from None
            self._threads = [
                threading.Thread(target=self._work, daemon=True, name=f"compile {number}")
                for number in range(self.jobs)
            ]
            for thread in self._threads:
                thread.start()
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
            if kind is not None:
                with self._lock:
                    self._leaving = True
                    for worker in self._workers:
                        worker.kill()
            for _ in self._threads:
                self._items.put(None)
            for thread in self._threads:
                thread.join()
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._in_use)
        if kept and kind is None:
            raise KeyboardInterrupt

    def submit(self, work: Work, then: Callable[[Any], None]) -> None:
        self._items.put((work, then))

    def _work(self) -> None:
        """A thread's: a worker, and another when it has died; an item at a time."""
        worker: _Worker | None = None
        while (item := self._items.get()) and not self._leaving:
            work, then = item
            for attempt in range(1, ATTEMPTS + 1):
                result, worker = self._attempt(work, worker, last=attempt == ATTEMPTS)
                if self._leaving:
                    break
                if result is not None:
                    then(result)
                    break
        if worker:
            self._end(worker)

    def _attempt(self, work: Work, worker: _Worker | None, last: bool) -> tuple[Any, _Worker | None]:
        """What came of some work, None if it is to be tried again; and the worker, if it lives."""
        try:
            if self.broken:
                raise self.broken
            worker = worker or self._start()
            result = worker.ask(work, self._timeout)
            if isinstance(result, Exception):
                raise result
            return result, worker
        except _Hangs:
            verdict = Compiled(
                status="timeout",
                error=f"the compile took more than --compile-timeout {self._timeout:g} s",
                seconds=self._timeout,
            )
        except _Died as died:
            assert worker
            if fault := self._fault(worker):
                verdict = self._break(fault)
            elif last:
                error = f"the compiling process {died}, {ATTEMPTS} times{worker.last_words()}"
                verdict = Compiled(status="crashed", error=error)
            else:
                self._end(worker)
                return None, None
        except Exception as error:  # whatever it is, it is not the program's
            verdict = self._break(error)
        if worker:
            self._end(worker)
        return failed(work, verdict), None

    def _start(self) -> _Worker:
        """A new worker; raises MachineFault or OSError where none can be started."""
        fault: Exception = MachineFault("they are being stopped")
        for _ in range(ATTEMPTS):
            with self._lock:
                if self._leaving:
                    break
                worker = _Worker(self._folder, next(self._numbers))
                self._workers.add(worker)
            try:
                worker.wait_until_ready()
                return worker
            except (_Died, _Hangs) as error:
                fault = self._fault(worker) or MachineFault(f"a new one {error}{worker.last_words()}")
            self._end(worker)
        raise fault

    def _end(self, worker: _Worker) -> None:
        with self._lock:
            self._workers.discard(worker)
        worker.end()

    def _break(self, error: Exception) -> Compiled:
        """Note that no more can be compiled; the verdict is for nobody to record."""
        self.broken = self.broken or _refusal(error)
        return Compiled(status="crashed", error=first_line(error))

    @staticmethod
    def _fault(worker: _Worker) -> OSError | None:
        """Why a worker died if it was for its files, such as for want of room, and not of its program.

        libtpu aborts where it cannot write a listing, and says why, if there is room for that.
        """
        said = worker.log_tail()
        for code in FULL:
            if os.strerror(code) in said:
                return OSError(code, os.strerror(code))
        try:
            with (worker.folder / "room").open("wb") as file:
                file.write(bytes(ROOM_BYTES))
        except OSError as error:
            return error
        return None


def _refusal(error: Exception) -> MachineError:
    """Why nothing can be compiled on this machine."""
    kept = "what is recorded so far is kept"
    if isinstance(error, MachineError):
        return error
    if isinstance(error, OSError) and error.errno in FULL:
        return MachineError(
            f"the compiler has no room for its files in {tempfile.gettempdir()!r} ({error.strerror}); "
            f"{kept}: make room there, or name another folder in TMPDIR, then run the same command again"
        )
    if isinstance(error, OSError) and error.filename:
        return MachineError(
            f"the compiler cannot use {os.fsdecode(error.filename)!r} ({error.strerror}); {kept}: see that "
            "the folder stays, or name another one in TMPDIR, then run the same command again"
        )
    return MachineError(
        f"the compiling processes cannot be kept running ({first_line(error)}); {kept}: see `autotune "
        "doctor`, free some memory or lower --jobs, then run the same command again"
    )


class _Worker:
    """A process that compiles what it is told over a socket, in a folder of its own.

    It is started in that folder, and so the compiler is told to write to ".": libtpu would split any other
    path where it has white space.
    """

    def __init__(self, folder: Path, number: int) -> None:
        self.folder = folder / f"worker-{number}"
        self.folder.mkdir()
        self._log = self.folder.with_suffix(".log")
        ours, theirs = socket.socketpair()
        with theirs, self._log.open("wb") as log:
            try:
                self._process = subprocess.Popen(
                    chip_process.python(_CHILD, str(theirs.fileno()), str(os.getpid()), str(self.folder)),
                    pass_fds=[theirs.fileno()],
                    cwd=self.folder,
                    env={**chip_process.passed_on(os.environ), **environment(Path())},
                    stdin=subprocess.DEVNULL,
                    # What libtpu prints belongs to a row that failed, not on the user's screen.
                    stdout=log,
                    stderr=log,
                )
            except BaseException:
                ours.close()
                raise
        self._connection = Connection(ours.detach())

    def wait_until_ready(self) -> None:
        self._answer(START_SECONDS)

    def ask(self, work: Work, timeout: float) -> Any:
        """Its result, or a MachineFault; raises _Died or _Hangs."""
        try:
            self._connection.send(work)
        except OSError:
            raise self._died() from None
        return self._answer(timeout)

    def _answer(self, timeout: float) -> Any:
        try:
            if not Patience(timeout).waits(self._connection.poll):
                raise _Hangs
            return self._connection.recv()
        except (EOFError, OSError, pickle.UnpicklingError):
            raise self._died() from None

    def _died(self) -> _Died:
        return _Died(chip_process.how_ended(self._process))

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        """End the process, and remove its files; its log stays."""
        self._process.kill()
        self._process.wait()
        self._connection.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def log_tail(self) -> str:
        """The end of what it or libtpu wrote."""
        with contextlib.suppress(OSError), self._log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - MAX_LOG_TAIL))
            return log.read(MAX_LOG_TAIL).decode(errors="replace")
        return ""

    def last_words(self) -> str:
        """': ' and the last telling line that it or libtpu wrote; empty if there is none."""
        lines = [line.strip() for line in self.log_tail()[-MAX_LAST_WORDS:].split("\n")]
        said = [line for line in lines if line and line.isprintable() and not _TRACE.match(line)]
        return f": {said[-1][:200]}" if said else ""


@contextlib.contextmanager
def _ctrl_c_kept() -> Iterator[list[int]]:
    """Note the Ctrl-Cs that come meanwhile, and other signals that are answered in the same way; only the
    main thread may, and only it is interrupted by them."""
    kept: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield kept
        return
    numbers = [n for n in INTERRUPTS if n == signal.SIGINT or callable(signal.getsignal(n))]
    before = {number: signal.signal(number, lambda signum, frame: kept.append(signum)) for number in numbers}
    try:
        yield kept
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def serve() -> None:
    """A worker's side: compile what the socket tells, until it is closed or the parent is gone.

    Its arguments are the number of the socket, the parent's process and the worker's folder.
    """
    for signum in FROM_TERMINAL:  # Ctrl-C reaches all processes of a terminal; the parent decides
        signal.signal(signum, signal.SIG_IGN)
    number, parent, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    threading.Thread(target=_leave_with_parent, args=(folder.parent, parent), daemon=True).start()
    connection = Connection(number)
    connection.send("ready")
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            connection.send(_answer(connection.recv(), folder))
    os._exit(0)


def _answer(work: Work, folder: Path) -> Any:
    """The result, or why there is none that would say something about the work."""
    try:
        if isinstance(work, Task):
            return _compile(work, folder)
        return _compile_ahead(work, folder) if isinstance(work, Call) else work.run(folder)
    except (MachineFault, OSError) as fault:
        return fault
    except Exception as error:
        return MachineFault(first_line(error))


def _leave_with_parent(folder: Path, parent: int) -> None:
    """End this worker soon after its parent was killed, and take the temporary files along."""
    while os.getppid() == parent:
        time.sleep(0.5)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _compile(task: Task, folder: Path) -> Compiled:
    """The verdict on a program; of a failure also what libtpu logged meanwhile."""
    logged = os.fstat(2).st_size
    verdict = compile_program(generations.by_name(task.target), task.program, folder)
    if verdict.status == "ok":
        return verdict
    with folder.with_suffix(".log").open("rb") as log:
        log.seek(logged)
        lines = log.read(MAX_LOG_TAIL).decode(errors="replace")
    return dataclasses.replace(verdict, said=f"{verdict.said or verdict.error}\n{lines}".strip())


def _compile_ahead(call: Call, folder: Path) -> Executable:
    try:
        return compile_ahead(call)
    finally:
        clear(folder)
