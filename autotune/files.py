"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from autotune.errors import UsageError


@contextlib.contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which takes its name, on disk, when the block ends, and is gone if the block fails.

    Its folder is made. Until then its name begins with a dot, which readers of folders pass over.

    Raises:
      UsageError: the file or its folder cannot be written.
    """
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
