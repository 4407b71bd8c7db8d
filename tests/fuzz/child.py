"""The process in which inputs run, and which may die of one.

As a program: python -m tests.fuzz.child NAME SEED FIRST END DIR MODULE.

It writes to DIR: `at`, the number of the input that runs (8 bytes); `finds`, a line of JSON for each find;
and whatever a reader writes, below `scratch`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import mmap
import os
import resource
import signal
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tests.fuzz.targets import Target, named

MEMORY_BYTES = 2 << 30  # beyond what the process has once every library is loaded
WARM_UP = 40  # inputs before the memory is bound and code is watched: they load what is loaded when needed


class Hang(BaseException):
    """An input took longer than its target may; no Exception, so that no reader takes it for its own."""


class Executed(BaseException):
    """An input made its reader do what no reader does."""


def _alarm(signum: int, frame: FrameType | None) -> None:
    raise Hang("too much processor time")


class Watch:
    """Raises where code that came with an input would run, or anything be touched outside of the folder."""

    FORBIDDEN = frozenset(
        {
            *(
                "os.system",
                "os.exec",
                "os.posix_spawn",
                "os.fork",
                "os.forkpty",
                "subprocess.Popen",
                "pty.spawn",
            ),
            *("socket.connect", "socket.bind", "socket.getaddrinfo", "urllib.Request", "pickle.find_class"),
            *(
                "marshal.loads",
                "code.__new__",
                "shutil.rmtree",
                "os.remove",
                "os.rename",
                "os.mkdir",
                "os.chmod",
            ),
        }
    )

    def __init__(self, folder: Path) -> None:
        self._folder = os.fspath(folder)
        self.armed = False
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.armed:
            return
        if event in self.FORBIDDEN:
            if event.startswith(("os.", "shutil.")) and self._inside(arguments[:1]):
                return
            if event in ("marshal.loads", "code.__new__") and _importing():
                return
            self._raise(event, arguments)
        if event in ("exec", "compile"):
            code = arguments[0] if event == "exec" else arguments[1]
            name = code.co_filename if isinstance(code, CodeType) else str(code)
            if not _importing() and not Path(name).is_file():
                self._raise(event, (name,))
        if event == "open" and self._writes(arguments) and not _importing():
            self._raise(event, arguments)

    def _writes(self, arguments: tuple[Any, ...]) -> bool:
        """Whether a file is opened to be written, outside of the folder."""
        name, _, flags = arguments
        writing = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        return bool(writing) and name != os.devnull and not self._inside((name,))

    def _inside(self, arguments: tuple[Any, ...]) -> bool:
        name = arguments[0] if arguments else None
        if not isinstance(name, str | os.PathLike):
            return False
        path = os.path.abspath(name)  # noqa: PTH100
        return path == self._folder or path.startswith(self._folder + os.sep)

    def _raise(self, event: str, arguments: tuple[Any, ...]) -> None:
        self.armed = False
        raise Executed(f"{event} {arguments!r}"[:300])


def _importing() -> bool:
    """Whether a module is being loaded, which compiles and runs the code of installed files."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def main(name: str, seed: int, first: int, end: int, out: Path, module: str) -> None:
    target: Target = importlib.import_module(module).TARGETS[name]
    make = target.inputs()
    folder = out / "scratch"
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    with (out / "at").open("r+b") as file:
        at = mmap.mmap(file.fileno(), 8)
        for number in range(WARM_UP):
            with contextlib.suppress(Exception):
                target.check(make(seed, number), folder)
        watch = Watch(folder)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, resource.RLIM_INFINITY))
        with (out / "finds").open("a") as finds:
            for number in range(first, end):
                at[:] = struct.pack("<q", number)
                found = one(target, make(seed, number), folder, watch)
                if found is not None:
                    finds.write(json.dumps([number, found]) + "\n")
                    finds.flush()


def one(target: Target, data: bytes, folder: Path, watch: Watch | None) -> str | None:
    """What an input found, None if its reader answered as it should."""
    try:
        with _bounded(watch, target.seconds):
            target.check(data, folder)
    except Hang as hang:
        return named("hang:", hang)
    except Executed as executed:
        return named("executed:", executed)
    except Exception as error:
        return named("raised:", error)
    return None


@contextlib.contextmanager
def _bounded(watch: Watch | None, seconds: float) -> Iterator[None]:
    signal.signal(signal.SIGPROF, _alarm)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    if watch is not None:
        watch.armed = True
    try:
        yield
    finally:
        if watch is not None:
            watch.armed = False
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]), Path(sys.argv[5]), sys.argv[6])  # type: ignore[arg-type]
