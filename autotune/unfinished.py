"""Which sweeps into a folder have begun and not ended, for those who look at its rows meanwhile.

Rows alone cannot tell: a candidate without one was left out, or is yet to come. So a sweep leaves a note in
its folder, in a file that is no part of the data set, and takes it away when it is done. A note that a kill
left is taken away by the sweep that goes on. There are none in buckets.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from autotune.files import whole
from autotune.folders import Folder
from autotune.kernel.problem import TableKey
from autotune.tpu.chips import GENERATIONS

MAX_BYTES = 8 << 20  # some 100,000 keys; notes may come from others


class Begun(NamedTuple):
    """A sweep that has begun; time is UTC, as ISO 8601 writes it, to the minute."""

    target: str
    time: str
    keys: tuple[TableKey, ...]


@contextlib.contextmanager
def noted(folder: Folder, target: str, keys: tuple[TableKey, ...], asked: Any) -> Iterator[None]:
    """Keep a note while a sweep is under way; it stays where the sweep does not come to its end.

    asked: what was asked of each key, as a value whose repr tells it from others.
    """
    if not isinstance(folder, Path):
        yield
        return
    kind = hashlib.sha256(repr((target, asked)).encode()).hexdigest()[:16]
    path = folder / f".sweep-{kind}-{hashlib.sha256(repr(keys).encode()).hexdigest()[:16]}.json"
    now = datetime.datetime.now(datetime.UTC).isoformat(" ", "minutes").partition("+")[0]
    with whole(path) as file:
        file.write(json.dumps({"target": target, "time": now, "keys": keys}).encode())
    try:
        yield
    except BaseException:
        if not any(folder.glob("*.parquet")):  # nothing was begun
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise
    for other in folder.glob(f".sweep-{kind}-*.json"):
        # The same of fewer keys is done with this.
        if other == path or ((note := _read(other)) and set(note.keys) <= set(keys)):
            other.unlink(missing_ok=True)


def read(folder: Folder) -> list[Begun]:
    """The sweeps into a folder that have begun and not ended, oldest first; what is no note is ignored."""
    if not isinstance(folder, Path):
        return []
    found = (_read(path) for path in folder.glob(".sweep-*.json"))
    return sorted((note for note in found if note), key=lambda note: note.time)


def _read(path: Path) -> Begun | None:
    try:
        if path.stat().st_size > MAX_BYTES or not path.is_file():
            return None
        note = json.loads(path.read_bytes())
        time = datetime.datetime.fromisoformat(note["time"]).isoformat(" ", "minutes")
        keys = tuple(TableKey(str(key[0]), str(key[1]), *map(int, key[2:])) for key in note["keys"])
        target = str(note["target"])
    except (OSError, ValueError, TypeError, LookupError, OverflowError, RecursionError):
        return None
    return Begun(target, time, keys) if target in GENERATIONS else None
