"""A sweep's rows on their way to its folder: of those that a bucket does not take, none is lost.

Rows for a bucket that cannot be written are kept in a folder of this machine, at once, as the process may be
killed, and are sent with later ones when the bucket answers again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from autotune.errors import MachineError
from autotune.io import folders
from autotune.io.files import user_folder
from autotune.io.folders import Folder
from autotune.io.terminal import shown, typed
from autotune.results import dataset

# Seconds between attempts, doubling up to the last: each can take half a minute to fail.
FIRST_PAUSE, LONGEST_PAUSE = 15.0, 240.0


class Outbox:
    """Where a sweep puts its rows; use as a context manager.

    replaced: when rows were made that this sweep's are to replace.
    kept: the local folder with rows that are not sent, while there are any.
    """

    def __init__(self, folder: Folder, replaced: dataset.Replaced | None = None) -> None:
        self._folder = folder
        self._replaced = replaced or {}
        self._pause = FIRST_PAUSE
        self._next_try = 0.0
        self._waiting: list[str] = []  # names of files in `_spill`
        self._reason = ""
        told = hashlib.sha256(os.fsencode(str(folder))).hexdigest()[:8]
        self._spill = user_folder("XDG_CACHE_HOME", ".cache") / "unsent" / f"{told}-{uuid.uuid4().hex[:8]}"

    def __enter__(self) -> Self:
        """Raises MachineError where the rows to come could not be read back: see `results.require_clock`."""
        dataset.require_clock()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Send what is left. Raises MachineError, with what to type, where that fails: the rows are kept."""
        if self._waiting:
            self._send(last=True)
        if self._waiting and (kind is None or not issubclass(kind, MachineError)):
            raise MachineError(self.unsent) from None

    @property
    def kept(self) -> Path | None:
        return self._spill if self._waiting else None

    @property
    def unsent(self) -> str:
        """Which rows were not sent and why, where they are, and what to type to send them."""
        command = typed("autotune", "results", "merge", self._spill, "-o", self._folder)
        return (
            f"{self._reason}. Rows that were not sent are kept in {shown(self._spill)}; when it can be "
            f"written again, type: {command}"
        )

    def append(self, rows: Iterable[Mapping[str, Any]]) -> list[str]:
        """Add rows to the folder; returns the names of the files that it has now from here.

        Raises:
          UsageError: the folder, or the one for what cannot be sent, is local and cannot be written.
        """
        rows = dataset.newer(rows, self._replaced)
        if not rows:
            return []
        if isinstance(self._folder, Path):
            name = dataset.append(self._folder, rows)
            return [name] if name else []
        if self._waiting:
            self._keep(rows)
            return self._send()
        try:
            name = dataset.append(self._folder, rows)
            return [name] if name else []
        except MachineError as error:
            self._failed(error)
            self._keep(rows)
            return []

    def _keep(self, rows: Iterable[Mapping[str, Any]]) -> None:
        name = dataset.append(self._spill, rows)
        if name:
            self._waiting.append(name)

    def _failed(self, error: MachineError) -> None:
        self._reason = str(error)
        self._next_try = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def _send(self, last: bool = False) -> list[str]:
        sent: list[str] = []
        if time.monotonic() < self._next_try and not last:
            return sent
        try:
            while self._waiting:
                # By the same name: whoever sends them again, by a merge or after a kill, changes nothing.
                name = self._waiting[0]
                folders.publish(self._folder, name, folders.read(self._spill, name))
                folders.delete(self._spill, name)
                sent.append(self._waiting.pop(0))
        except MachineError as error:
            self._failed(error)
            return sent
        self._pause = FIRST_PAUSE
        with contextlib.suppress(OSError):
            self._spill.rmdir()
        return sent
