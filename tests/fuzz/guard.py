"""Runs a reader within bounds: of time, of memory, and of what it may start, run and change."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

# Of processor time, as a busy machine is no find; the first of a process imports jax and compiles its code.
SECONDS = 20.0
MEMORY_BYTES = 8 << 30  # of addresses, beyond what the process has; allocators reserve far more than they use
# A message is one line for a person; several where each names a way out, as for heads that do not tile.
LONGEST_MESSAGE, MOST_LINES = 1000, 10

_STARTS = (
    *("os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "subprocess.Popen", "pty.spawn"),
    *("socket.connect", "socket.bind", "socket.getaddrinfo", "urllib.Request", "pickle.find_class"),
)
_CHANGES = ("shutil.rmtree", "os.remove", "os.rename", "os.mkdir", "os.chmod")
_LOADS = ("marshal.loads", "code.__new__")


class Wrong(AssertionError):
    """The reader took or refused an input in a way that it must not."""


class _Stopped(BaseException):
    """No Exception, so that no reader takes it for its own."""


class _Watch:
    """Raises where code that came with an input would run, or anything outside of a folder would change."""

    def __init__(self) -> None:
        self.folder: str | None = None  # while a reader runs
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder is None:
            return
        if (
            event in _STARTS
            or (event in _CHANGES and not self._inside(arguments[0]))
            or (event in _LOADS and not _importing())
            or (event in ("exec", "compile") and not _of_a_file(event, arguments) and not _importing())
            or (event == "open" and self._writes(*arguments) and not _importing())
        ):
            self.folder = None
            raise _Stopped(f"{event} {arguments!r}"[:300])

    def _writes(self, name: object, mode: object, flags: object) -> bool:
        writing = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        return bool(writing) and name != os.devnull and not self._inside(name)

    def _inside(self, name: object) -> bool:
        if self.folder is None or not isinstance(name, str | os.PathLike):
            return False
        path = os.path.abspath(name)  # noqa: PTH100
        return path == self.folder or path.startswith(self.folder + os.sep)


def _of_a_file(event: str, arguments: tuple[Any, ...]) -> bool:
    code = arguments[0] if event == "exec" else arguments[1]
    return Path(code.co_filename if isinstance(code, CodeType) else str(code)).is_file()


def _importing() -> bool:
    """Whether a module is being loaded, which compiles and runs the code of installed files."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


_watches: list[_Watch] = []  # one, from the first use on: a hook stays as long as the process


@contextlib.contextmanager
def bounded(folder: Path, seconds: float = SECONDS) -> Iterator[None]:
    """Raises Wrong for what a reader must not do; it may write to the folder."""
    if not _watches:
        _watches.append(_Watch())
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    # Not SIGPROF: libtpu's own profiler sends it, and ignores it in a way that Python cannot put back.
    handler = signal.signal(signal.SIGVTALRM, _too_long)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, limits[1]))
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    _watches[0].folder = os.fspath(folder)
    try:
        yield
    except _Stopped as stopped:
        raise Wrong(str(stopped)) from stopped
    finally:
        _watches[0].folder = None
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.signal(signal.SIGVTALRM, handler)


def _too_long(signum: int, frame: FrameType | None) -> None:
    if _watches[0].folder is not None:  # else it has ended meanwhile, and pytest's own code would be stopped
        raise _Stopped("too much processor time")


def answer(
    read: Callable[[bytes, Path], object],
    data: bytes,
    folder: Path,
    refusals: tuple[type[Exception], ...],
    seconds: float = SECONDS,
) -> bool:
    """Whether a reader takes an input; False if it refuses it in a few printable lines.

    Raises:
      Wrong: it answers in another way, or does what no reader does.
      Exception: what it raised and must not.
    """
    try:
        with bounded(folder, seconds):
            read(data, folder)
    except refusals as error:
        message = str(error)
        lines = message.split("\n")
        if len(lines) > MOST_LINES or not all(line.isprintable() for line in lines) or not message:
            raise Wrong(f"a refusal that is not a few printable lines: {message[:300]!r}") from error
        if len(message) > LONGEST_MESSAGE:
            raise Wrong(f"a refusal of {len(message)} characters: {message[:300]!r}") from error
        return False
    return True
