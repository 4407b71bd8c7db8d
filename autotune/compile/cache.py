"""Verdicts of the compiler, kept across sweeps in the user's cache folder.

A verdict depends on the target, the program and the tools, and on nothing else: whoever sweeps the same
program into another folder need not compile it again. It is a cache: it may be deleted at any time, and a
store that cannot be used costs compiles, never a sweep.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from autotune.io.files import distrusted, user_folder
from autotune.io.terminal import printable
from autotune.kernel.jax_rpa import call
from autotune.kernel.problem import LOOP_DEPTHS, Program
from autotune.results.schema import Tools
from autotune.results.validate import MOST_CYCLES, MOST_SMEM_BYTES, MOST_VMEM_BYTES
from autotune.tpu.compiler import LASTING, Compiled
from autotune.tpu.schedule import Schedule

T = TypeVar("T")

# A change of what a verdict holds, or of how listings are read, asks for a new number.
VERSION = 2
BUSY_SECONDS = 10.0
_MOST, _MOST_SECONDS = 2**40, 1e9


def default_path() -> Path:
    """compiles.sqlite in `autotune` below XDG_CACHE_HOME, or below ~/.cache where that is not set."""
    return user_folder("XDG_CACHE_HOME", ".cache") / "compiles.sqlite"


class Line(NamedTuple):
    """What a store holds for one target and one set of tools."""

    target: str
    tools: str
    verdicts: int
    compile_seconds: float


class Store:
    """One store; any number of sweeps may use it at once. `broken` says why it is not used, if it is not."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.broken: str | None = None

    def _with_connection(self, work: Callable[[sqlite3.Connection], T], otherwise: T) -> T:
        """What the work returns, its changes committed; `otherwise` where the store cannot be used."""
        if self.broken:
            return otherwise
        if why := distrusted(self.path):
            self.broken = why
            return otherwise
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with (
                contextlib.closing(sqlite3.connect(self.path, timeout=BUSY_SECONDS)) as connection,
                connection,
            ):
                connection.execute(
                    "CREATE TABLE IF NOT EXISTS verdicts (id TEXT PRIMARY KEY, target TEXT, tools TEXT, "
                    "seconds REAL, verdict TEXT, time REAL)"
                )
                return work(connection)
        except (OSError, sqlite3.Error, ValueError) as error:  # a damaged schema's text is a ValueError
            self.broken = printable(str(error))
            return otherwise

    def get(self, target: str, tools: Tools, programs: Iterable[Program]) -> dict[Program, Compiled]:
        """The verdicts that are kept of these programs."""

        by_id = {program_id(target, tools, program): program for program in programs}
        decoded = {by_id[identity]: _decoded(text) for identity, text in self.texts(list(by_id)).items()}
        return {program: verdict for program, verdict in decoded.items() if verdict}

    def put(self, target: str, tools: Tools, program: Program, verdict: Compiled) -> None:
        """Keep a verdict, if it is one that lasts."""
        if verdict.status not in LASTING or verdict.seconds is None:
            return
        text = json.dumps({**dataclasses.asdict(verdict), "said": None})
        self.keep(program_id(target, tools, program), target, tools, verdict.seconds, text)

    def texts(self, ids: Sequence[str]) -> dict[str, str]:
        """What is kept under these ids, whatever it is of: for the reader to judge."""

        def look_up(connection: sqlite3.Connection) -> dict[str, str]:
            found = {}
            for identity in ids:
                cursor = connection.execute("SELECT verdict FROM verdicts WHERE id = ?", [identity])
                if line := cursor.fetchone():
                    found[identity] = line[0]
            return found

        return self._with_connection(look_up, {}) if self.path.exists() else {}

    def keep(self, identity: str, target: str, tools: Tools, seconds: float, text: str) -> None:
        """Keep a text under an id: a hash of all that it depends on. seconds: that making it took."""
        said = f"jax {tools.jax}, libtpu {tools.libtpu}, kernel {tools.kernel_fingerprint}"
        values = [identity, target, said, seconds, text, time.time()]
        statement = "INSERT OR REPLACE INTO verdicts VALUES (?, ?, ?, ?, ?, ?)"
        self._with_connection(lambda connection: connection.execute(statement, values), None)

    def lines(self) -> list[Line]:
        """What is kept, by target and tools; nothing, and no new file, where there is no store."""
        statement = "SELECT target, tools, count(*), total(seconds) FROM verdicts GROUP BY 1, 2 ORDER BY 1, 2"

        def read(connection: sqlite3.Connection) -> list[Line]:
            return [Line(*line) for line in connection.execute(statement)]

        return self._with_connection(read, []) if self.path.exists() else []

    def clear(self) -> None:
        """Forget everything: the file, and what sqlite keeps beside it, are deleted."""
        for suffix in ("", "-journal", "-wal", "-shm"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)


def program_id(target: str, tools: Tools, program: Program) -> str:
    """A hash of all that a verdict depends on."""
    compiled_at = call.compile_problem(program.layout, program.blocks)
    parts = [
        VERSION,
        target,
        dataclasses.asdict(tools),
        dataclasses.asdict(program),
        dataclasses.asdict(compiled_at),
        call.compile_total_pages(program.layout),
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _decoded(text: str) -> Compiled | None:
    """A verdict as `put` wrote it; None for anything else, so that a damaged line is a compile, no more."""
    try:
        fields = json.loads(text)
        if fields["schedule"] is not None:
            schedule = fields["schedule"]
            fields["schedule"] = Schedule(
                tuple(schedule["cycles"]), schedule["vmem_bytes"], schedule["smem_bytes"]
            )
        verdict = Compiled(**fields)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return verdict if _sound(verdict) else None


def _sound(verdict: Compiled) -> bool:
    """Whether every part of a verdict is of its kind, and the whole one that a row can hold."""
    schedule, needed, limit = verdict.schedule, verdict.needed_bytes, verdict.limit_bytes
    if (schedule is None) == (verdict.status == "ok"):
        return False
    if schedule is not None and not (
        len(schedule.cycles) == LOOP_DEPTHS
        and all(_is_count(cycles, MOST_CYCLES) for cycles in schedule.cycles)
        and _is_count(schedule.vmem_bytes, MOST_VMEM_BYTES, least=1)
        and _is_count(schedule.smem_bytes, MOST_SMEM_BYTES)
    ):
        return False
    if verdict.status not in ("vmem_oom", "smem_oom"):
        fits = needed is None and limit is None
    else:
        fits = _is_count(needed, _MOST) and _is_count(limit, needed or 0)
    return (
        fits
        and verdict.status in LASTING
        and (verdict.error is None or isinstance(verdict.error, str))
        and isinstance(verdict.seconds, int | float)
        and 0 <= verdict.seconds < _MOST_SECONDS
    )


def _is_count(value: object, most: int, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
