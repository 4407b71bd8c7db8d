"""Files that are there whole or not at all, and what killed processes leave of them."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from autotune.errors import AutotuneError, MachineError, UsageError

# A disk, a quota or a limit on files is full: no folder is the wrong one, and there is room to be made.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Names of files that `whole` is writing, as a pattern.
HIDDEN = f".*.{'[0-9a-f]' * 8}.tmp"
# How names of folders end that `remove_abandoned` may judge by their lock.
_LIVE = ".live"


def user_folder(variable: str, usual: str) -> Path:
    """The user's folder for this tool's files, below what a variable such as XDG_CACHE_HOME names.

    usual: its place below the home folder where the variable is not set. A user without a home, as in some
    containers, has one in the folder for temporary files.
    """
    if named := os.environ.get(variable):
        return Path(named) / "autotune"
    try:
        return Path.home() / usual / "autotune"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"autotune-{os.getuid()}"


@contextlib.contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which takes its name, on disk, when the block ends, and is gone if the block fails.

    Its folder is made. Until then its name is a HIDDEN one and begins with a dot, which readers of folders
    pass over. A link is followed; a device or a pipe, such as /dev/stdout, is written to as it is.

    Raises:
      UsageError: the file or its folder cannot be written. MachineError: for want of room.
    """
    if path.exists() and not path.is_file():
        try:
            with path.open("wb") as file:
                yield file
        except OSError as error:
            raise _refused(path, error) from None
        return
    path = path.resolve()
    hidden = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new, hidden = _beside(path)
        with new:
            yield new
            new.flush()
            os.fsync(new.fileno())
            hidden.replace(path)
    except OSError as error:
        raise _refused(path, error) from None
    finally:
        if hidden:
            with contextlib.suppress(OSError):
                hidden.unlink()


def _beside(path: Path) -> tuple[BinaryIO, Path]:
    """A new file in the folder of another, with this process's lock where the file system has locks."""
    while True:
        hidden = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
        file = hidden.open("wb")
        if held(file.fileno()):
            return file, hidden
        file.close()


def scratch_folder(prefix: str) -> tuple[Path, int]:
    """A new folder for temporary files, and an open descriptor whose lock says that it is in use.

    Raises:
      OSError: it cannot be made.
    """
    tidy()
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, suffix=_LIVE))
        descriptor = os.open(folder, os.O_RDONLY)
        if held(descriptor):
            return folder, descriptor
        os.close(descriptor)


@contextlib.contextmanager
def scratch(prefix: str) -> Iterator[Path]:
    """A `scratch_folder` for a block of code."""
    folder, in_use = scratch_folder(prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(in_use)


@functools.cache
def tidy() -> None:
    """Remove the folders for temporary files that killed processes left, once a process."""
    remove_abandoned(Path(tempfile.gettempdir()), f"autotune-*{_LIVE}")


def _refused(path: Path, error: OSError) -> AutotuneError:
    said = f"{str(path)!r} cannot be written: {error.strerror or error}"
    if error.errno in FULL:
        return MachineError(f"{said}; make room, then type the same command again")
    return UsageError(said)


def held(descriptor: int) -> bool:
    """Take the lock of a file or folder just made, which goes with this process however it ends.

    Returns False where `remove_abandoned` was faster: it is about to be gone, or is already. Where a file
    system has no locks nothing is ever taken for abandoned, and all is well.
    """
    return _lock(descriptor) is not False and os.fstat(descriptor).st_nlink > 0


def _lock(descriptor: int) -> bool | None:
    """Whether the lock is taken now; None where there are no locks. It is never waited for."""
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return None
    return True


def remove_abandoned(folder: Path, pattern: str) -> None:
    """Remove files and folders of this user that a process left half done and no longer has the lock of."""
    for path in folder.glob(pattern):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                found = os.fstat(descriptor)
                if found.st_uid != os.getuid() or not _lock(descriptor):
                    continue
                if stat.S_ISDIR(found.st_mode):
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink()
            finally:
                os.close(descriptor)
