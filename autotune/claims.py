"""What a sweep has under way, for other sweeps into the same folder to see and leave alone.

A claim is a file `.claims/OWNER.THING` beside the rows. No two owners take one thing: each writes its claim
first and looks then, and goes on only if it sees no other's; of two that see one another the one whose name
comes first stays. This needs no clock and no conditional write, only a listing that shows what was written
before: local disks, S3 and Google Cloud Storage give that.

An owner is alive while its file `OWNER.json` keeps changing, which a thread sees to. Whoever meets a claim
counts by its own monotonic clock how long that file stays as it is; times of other hosts are never compared.
A process that is gone from this very machine is known to be at once. A claim saves work, no more: one that is
lost or wrongly given up costs a second compile of the same program, never a row.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import uuid
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from autotune import files, folders
from autotune.errors import AutotuneError
from autotune.folders import Folder

PLACE = ".claims"
# Seconds without a sign of life after which an owner is given up; it gives four of them in that time.
LEASE_SECONDS = 90.0
# How long the first of two owners waits for the other to see it and withdraw, and how often it looks.
YIELD_SECONDS, LOOKS = 0.1, 5
MOST_BYTES = 4096
# Seconds for which a folder that failed is left alone: a bucket that hangs takes half a minute to fail.
REST_SECONDS = 60.0


class _Seen(NamedTuple):
    """An owner's sign of life, and when, by this process's monotonic clock, it was first seen."""

    sign: int
    since: float


class _Process(NamedTuple):
    """An owner's process, on this machine: its number, and when it was started."""

    pid: int
    started: str


class Claims:
    """The claims of one sweep in one folder; use as a context manager.

    broken: why there are none, if they cannot be written: then, for a while, everything is free to take.
    """

    def __init__(self, folder: Folder, lease: float = LEASE_SECONDS) -> None:
        self._folder = folder
        self._place = folder / PLACE
        self._lease = lease
        self._owner = uuid.uuid4().hex[:16]
        self._held: set[str] = set()
        self._seen: dict[str, _Seen] = {}
        self._processes: dict[str, _Process | None] = {}
        self._rest_until = 0.0
        self._present = False  # whether anything of it may be in the folder
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._live, daemon=True, name="claims")
        self.broken: str | None = None

    def __enter__(self) -> Self:
        """Remove what sweeps left that were killed on this machine, wherever it can be told."""
        if isinstance(self._place, Path) and self._place.is_dir():
            files.remove_abandoned(self._place, files.HIDDEN)
            self.taken()
            with contextlib.suppress(OSError):
                self._place.rmdir()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        if not self._present:
            return
        if self._thread.ident:
            self._thread.join()
        with contextlib.suppress(AutotuneError, OSError):
            # What is there, and not what is noted to be: an interrupt may have come in between.
            mine = {e.name for e in folders.entries(self._place) if e.name.startswith(f"{self._owner}.")}
            # The sign of life last: claims without one would be waited for.
            sign = f"{self._owner}.json"
            for name in [*(mine - {sign}), sign]:
                folders.delete(self._place, name)
            if isinstance(self._place, Path):
                self._place.rmdir()

    def take(self, thing: str) -> bool:
        """Claim a thing; False if another has it. thing: a name without dots that a file may have."""
        if time.monotonic() < self._rest_until:
            return True
        try:
            if not self._thread.ident:
                self._present = True
                self._sign()
                self._thread.start()
            if thing in self._others():
                return False
            name = f"{self._owner}.{thing}"
            folders.publish(self._place, name, b"")
            for look in range(LOOKS):
                rivals = self._others().get(thing, set())
                if not rivals:
                    self._held.add(thing)
                    return True
                if min(rivals) < self._owner:
                    break
                if look < LOOKS - 1:
                    time.sleep(YIELD_SECONDS)
            folders.delete(self._place, name)
            return False
        except (AutotuneError, OSError) as error:
            self._failed(error)
            return True

    def release(self, thing: str) -> None:
        """Give a claim back, after what came of it is published."""
        if thing not in self._held or time.monotonic() < self._rest_until:
            return  # the end of the sweep will see to it
        try:
            folders.delete(self._place, f"{self._owner}.{thing}")
            self._held.discard(thing)
        except (AutotuneError, OSError) as error:
            self._failed(error)

    def taken(self) -> set[str]:
        """The things that others have under way."""
        if time.monotonic() < self._rest_until:
            return set()
        try:
            return set(self._others())
        except (AutotuneError, OSError) as error:
            self._failed(error)
            return set()

    def _failed(self, error: Exception) -> None:
        self.broken = str(error)
        self._rest_until = time.monotonic() + REST_SECONDS

    def _others(self) -> dict[str, set[str]]:
        """The living others' claims: thing to owners."""
        signs: dict[str, int] = {}
        things: dict[str, set[str]] = {}
        for entry in folders.entries(self._place):
            owner, _, thing = entry.name.partition(".")
            if owner == self._owner:
                continue
            if thing == "json":
                signs[owner] = entry.written
            else:
                signs.setdefault(owner, 0)
                things.setdefault(thing, set()).add(owner)
        dead = {owner for owner, sign in signs.items() if not self._lives(owner, sign)}
        if dead:
            self._bury(dead, things)
        living = {thing: owners - dead for thing, owners in things.items()}
        return {thing: owners for thing, owners in living.items() if owners}

    def _lives(self, owner: str, sign: int) -> bool:
        now = time.monotonic()
        seen = self._seen.get(owner)
        if seen is None or seen.sign != sign:
            self._seen[owner] = seen = _Seen(sign, now)
        return now - seen.since < self._lease and not self._gone(owner)

    def _gone(self, owner: str) -> bool:
        """Whether an owner was a process of this machine, and is no more."""
        if owner not in self._processes:
            self._processes[owner] = self._process(owner)
        process = self._processes[owner]
        return process is not None and _started(process.pid) != process.started

    def _process(self, owner: str) -> _Process | None:
        """An owner's process if it is of this machine, and as far as can be told."""
        try:
            said = json.loads(folders.read(self._place, f"{owner}.json")[:MOST_BYTES])
            if said["machine"] != _machine() or _machine() is None:
                return None
            return _Process(int(said["pid"]), str(said["started"]))
        except (OSError, AutotuneError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None

    def _bury(self, dead: set[str], things: dict[str, set[str]]) -> None:
        for thing, owners in things.items():
            for owner in owners & dead:
                folders.delete(self._place, f"{owner}.{thing}")
        for owner in dead:
            folders.delete(self._place, f"{owner}.json")

    def _sign(self) -> None:
        pid = os.getpid()
        said = {"machine": _machine(), "pid": pid, "started": _started(pid), "sign": uuid.uuid4().hex}
        folders.publish(self._place, f"{self._owner}.json", json.dumps(said).encode())

    def _live(self) -> None:
        while not self._stop.wait(self._lease / 4):
            with contextlib.suppress(AutotuneError, OSError):  # the next may go well
                self._sign()


def _machine() -> str | None:
    """What tells this machine, and in it this container, from all others, whatever they call themselves."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return None


def _started(pid: int) -> str | None:
    """When a process of this machine was started, in the kernel's ticks; None if there is none such."""
    try:
        # The second field is the program's name in brackets, which may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    except (OSError, IndexError):
        return None
