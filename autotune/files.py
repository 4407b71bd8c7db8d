"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from autotune.errors import UsageError


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

    Its folder is made. Until then its name begins with a dot, which readers of folders pass over. A link is
    followed; a device or a pipe, such as /dev/stdout, is written to as it is.

    Raises:
      UsageError: the file or its folder cannot be written.
    """
    if path.exists() and not path.is_file():
        try:
            with path.open("wb") as file:
                yield file
        except OSError as error:
            raise UsageError(f"{str(path)!r} cannot be written: {error.strerror or error}") from None
        return
    path = path.resolve()
    hidden = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with hidden.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        hidden.replace(path)
    except OSError as error:
        raise UsageError(f"{str(path)!r} cannot be written: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):
            hidden.unlink()
