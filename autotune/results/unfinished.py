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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from autotune.io.files import whole
from autotune.io.folders import Folder
from autotune.io.terminal import counted
from autotune.kernel.problem import TableKey
from autotune.tpu.generations import GENERATIONS

MAX_BYTES = 8 << 20  # some 100,000 keys; notes may come from others
MAX_COMMAND = 2000  # characters; a longer one is no line to copy


class Begun(NamedTuple):
    """A sweep that has begun; time is UTC, as ISO 8601 writes it, to the minute.

    command: the arguments of `autotune` that began it and go on with it, empty if unknown.
    """

    target: str
    time: str
    keys: tuple[TableKey, ...]
    command: tuple[str, ...] = ()

    def __str__(self) -> str:
        return (
            f"a sweep of {counted(len(self.keys), 'key')} for {self.target}, begun {self.time} UTC, has not "
            "come to its end"
        )


@contextlib.contextmanager
def noted(
    folder: Folder, target: str, keys: tuple[TableKey, ...], asked: Any, command: Sequence[str] = ()
) -> Iterator[None]:
    """Keep a note while a sweep is under way; it stays where the sweep does not come to its end.

    asked: what was asked of each key, as a value whose repr tells it from others. command: see `Begun`.
    """
    if not isinstance(folder, Path):
        yield
        return
    kind = hashlib.sha256(repr((target, asked)).encode()).hexdigest()[:16]
    path = folder / f".sweep-{kind}-{hashlib.sha256(repr(keys).encode()).hexdigest()[:16]}.json"
    now = datetime.datetime.now(datetime.UTC).isoformat(" ", "minutes").partition("+")[0]
    with whole(path) as file:
        note = {"target": target, "time": now, "keys": keys, "command": list(command)}
        file.write(json.dumps(note).encode())
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
        if other == path or ((done := _read(other)) and set(done.keys) <= set(keys)):
            other.unlink(missing_ok=True)


def read(folder: Folder, target: str | None = None) -> list[Begun]:
    """The sweeps into a folder that have begun and not ended, oldest first; what is no note is ignored.

    target: only those for this generation.
    """
    if not isinstance(folder, Path):
        return []
    found = (_read(path) for path in folder.glob(".sweep-*.json"))
    notes = (note for note in found if note and target in (None, note.target))
    return sorted(notes, key=lambda note: note.time)


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
    return Begun(target, time, keys, _command(note)) if target in GENERATIONS else None


def _command(note: dict[str, Any]) -> tuple[str, ...]:
    """The arguments of a sweep, for a person to copy: nothing else than that may get to a screen."""
    command = note.get("command")
    if not isinstance(command, list) or command[:1] != ["sweep"]:
        return ()
    if not all(isinstance(word, str) and word.isprintable() for word in command):
        return ()
    return tuple(command) if sum(map(len, command)) <= MAX_COMMAND else ()
