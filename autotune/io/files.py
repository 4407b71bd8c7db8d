"""Files that are there whole or not at all, and what killed processes leave of them."""

from __future__ import annotations

import atexit
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
from autotune.io.terminal import say, shown, typed

# A disk, a quota or a limit on files is full: no folder is the wrong one, and there is room to be made.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Names of files that `whole` is writing, as a pattern.
HIDDEN = f".*.{'[0-9a-f]' * 8}.tmp"
# How names of folders end that `remove_abandoned` may judge by their lock.
_LIVE = ".live"


def user_folder(variable: str, usual: str) -> Path:
    """The user's folder for this tool's files, below what a variable such as XDG_CACHE_HOME names.

    usual: its place below the home folder where the variable is not set. A user without a home, as in some
    containers, has one in the folder for temporary files, which nobody else may look into.

    What is read back from it is believed. So where it may be another user's work, a line says so, once, and
    an empty folder of this process alone stands in for it: nothing is kept for the next one.
    """
    folder, why = own_folder(variable, usual)
    return folder if why is None else _instead(folder, why)


def own_folder(variable: str, usual: str) -> tuple[Path, str | None]:
    """The same folder, and why it is not to be used; None if it may be."""
    if named := os.environ.get(variable):
        folder = Path(named) / "autotune"
        return folder, distrusted(folder)
    try:
        folder = Path.home() / usual / "autotune"
    except RuntimeError:
        folder = Path(tempfile.gettempdir()) / f"autotune-{os.getuid()}"
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700)  # before anybody else can
        return folder, distrusted(folder, private=True)
    return folder, distrusted(folder)


@functools.cache
def _instead(of: Path, why: str) -> Path:
    """A new folder of this process, gone at its end unless rows that could not be sent are kept in it."""
    say(f"{shown(of)} is not used, and nothing is kept for next time: {why}")
    folder = Path(tempfile.mkdtemp(prefix="autotune-own-"))

    def remove() -> None:
        if not (folder / "unsent").exists():
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def distrusted(path: Path, *, private: bool = False) -> str | None:
    """Why what is in a file or folder may be the work of another user than this one or root, and what to
    type; None if it cannot be, or is not there.

    private: nobody else may read it either, and it is no link.
    """
    try:
        found = path.lstat() if private else path.stat()
    except OSError:
        return None
    if private and not stat.S_ISDIR(found.st_mode):
        return "it is not a folder: remove it"
    if found.st_uid not in (os.getuid(), 0) or (private and found.st_uid != os.getuid()):
        return f"it belongs to the user with the number {found.st_uid}"
    # A group of one's own is what many systems give each user, with files that it may write.
    others = stat.S_IWOTH | (0 if found.st_gid == os.getgid() else stat.S_IWGRP)
    if found.st_mode & (0o077 if private else others):
        mode = "go=" if private else "go-w"
        return f"others may {'look into' if private else 'write'} it: chmod {mode} {typed(path)}"
    return None


@contextlib.contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which takes its name, on disk, when the block ends, and is gone if the block fails.

    Its folder is made. Until then its name is a HIDDEN one and begins with a dot, which readers of folders
    pass over. A link is followed; a device or a pipe, such as /dev/stdout, is written to as it is. A file
    that was there keeps its mode, its owner and its other names.

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
    named, path = path, Path(os.path.realpath(path))
    hidden = None
    try:
        if path.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        path.parent.mkdir(parents=True, exist_ok=True)
        new, hidden = _beside(path)
        with new:
            yield new
            new.flush()
            os.fsync(new.fileno())
            _take_place(hidden, path)
    except OSError as error:
        raise _refused(named, error) from None
    finally:
        if hidden:
            with contextlib.suppress(OSError):
                hidden.unlink()


def _take_place(new: Path, path: Path) -> None:
    """Give a file that is written the name of another, whose place it takes as an editor's would."""
    try:
        old = path.stat()
    except FileNotFoundError:
        new.replace(path)
        return
    made = new.stat()
    if old.st_nlink > 1 or (old.st_uid, old.st_gid) != (made.st_uid, made.st_gid):
        # A rename would part it from its other names, or from its owner. Its room is known to be there.
        with new.open("rb") as source, path.open("r+b") as file:
            shutil.copyfileobj(source, file)
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
        return
    new.chmod(stat.S_IMODE(old.st_mode) & 0o777)
    new.replace(path)


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
