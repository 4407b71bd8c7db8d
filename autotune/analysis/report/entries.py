"""Rows gathered by key, by what made them, and by pair of block sizes."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from autotune.analysis.overview import Line, Rival
from autotune.kernel.jax_rpa.call import published_table
from autotune.kernel.problem import BlockSizes, TableKey
from autotune.results import schema, winners
from autotune.results.baselines import incumbent
from autotune.results.rows import blocks_of, key_of, pair_of, rows_of
from autotune.tpu.generations import GENERATIONS

if TYPE_CHECKING:
    import pandas as pd

_TRUST = {name: rank for rank, name in enumerate(schema.SOURCES)}
_AT_ONCE = 50_000  # rows
_FAILURE = ("status", "needed_bytes", "limit_bytes", "error")


class Cell(NamedTuple):
    """One pair of a run.

    score, us: over all workloads, 1.0 being the best, and microseconds; None where a pair is not ok on every
    workload, or nothing is timed. values: a workload each, in microseconds; -1 - i for failure number i, 0
    for ok without a latency, None without a row. intervals: (low, high) in microseconds, a workload each.
    """

    pages: int
    queries: int
    vmem_bytes: int | None
    score: float | None
    us: float | None
    values: list[float | None]
    intervals: list[tuple[float, float] | None] | None


class Run(NamedTuple):
    """What one source with one set of tools (by number) says of a key."""

    source: str
    tools: int
    workloads: list[str]
    cells: list[Cell]


@dataclasses.dataclass
class Entry:
    """A key on a generation under one setting (by number) of the kernel.

    runs: the one that decides first, then by how far they are trusted. winner: None where nothing is ok. us:
    the winner's latency, microseconds.
    """

    target: str
    key: TableKey
    setting: int
    default: Rival
    published: Rival | None
    runs: list[Run] = dataclasses.field(default_factory=list)
    winner: BlockSizes | None = None
    us: float | None = None
    tied: int = 0

    @property
    def today(self) -> BlockSizes:
        """What JAX's look-up hands out: the published pair, else the default."""
        return (self.published or self.default).blocks


class _Numbers(dict[tuple[Any, ...], int]):
    """Numbers things from 0, in the order in which they are first asked for."""

    def __missing__(self, thing: tuple[Any, ...]) -> int:
        self[thing] = len(self)
        return self[thing]


class Gathered(NamedTuple):
    """Entries, and what numbers in them stand for.

    numbers: of the entries, by the columns of winners.ENTRY. settings: values of results.SETTING_COLUMNS.
    tools: values of winners.TOOLS. failures: (status, needed_bytes, limit_bytes, error).
    """

    entries: list[Entry]
    numbers: Mapping[tuple[Any, ...], int]
    settings: list[tuple[Any, ...]]
    tools: list[tuple[Any, ...]]
    failures: list[tuple[Any, ...]]


def gather(frame: pd.DataFrame) -> Gathered:
    """All keys of some rows, with every run; nothing is decided yet.

    frame: rows as `results.read` gives them.
    """
    published = published_table()
    numbers, settings, tools, failures = _Numbers(), _Numbers(), _Numbers(), _Numbers()
    entries: list[Entry] = []
    places = []  # (entry, tools) of each row
    made: dict[tuple[int, int], list[_Row]] = {}
    for line in _lines(frame):
        entry = tuple(line[name] for name in winners.ENTRY)
        place = numbers[entry], tools[tuple(line[name] for name in winners.TOOLS)]
        if place[0] == len(entries):
            key = key_of(line)
            setting = settings[tuple(line[name] for name in schema.SETTING_COLUMNS)]
            now = incumbent(GENERATIONS[line["target"]], key, published)
            listed = Rival(now.published) if now.published else None
            entries.append(Entry(line["target"], key, setting, Rival(now.default), listed))
        places.append(place)
        made.setdefault(place, []).append(_row(line, failures))
    scores = _scores(frame, places)
    kits = list(tools)
    for place, rows in made.items():
        source = kits[place[1]][winners.TOOLS.index("source")]
        entries[place[0]].runs.append(_run(rows, source, place[1], scores[place]))
    for one in entries:
        one.runs.sort(key=lambda run: _TRUST[run.source])
    return Gathered(entries, numbers, list(settings), list(tools), list(failures))


def decide(gathered: Gathered, lines: Sequence[Line]) -> None:
    """Put winners, as `overview.judge` has them, into their entries."""
    tools = {kit: number for number, kit in enumerate(gathered.tools)}
    for line in lines:
        entry, kit = (tuple(line.won[name] for name in names) for names in (winners.ENTRY, winners.TOOLS))
        one = gathered.entries[gathered.numbers[entry]]
        one.winner, one.us, one.tied = line.blocks, line.latency_us, line.won["tied"]
        one.default, one.published = line.default, line.published
        first = next(i for i, run in enumerate(one.runs) if run.tools == tools[kit])
        one.runs.insert(0, one.runs.pop(first))


def _scores(
    frame: pd.DataFrame, places: Sequence[tuple[int, int]]
) -> dict[tuple[int, int], dict[BlockSizes, tuple[float, float]]]:
    """(score, microseconds) of each pair, by entry and tools; places: a row each.

    `winners.scores` judges one run of an entry, so each run goes in as an entry of its own.
    """
    runs = {place: str(number) for number, place in enumerate(dict.fromkeys(places))}
    apart = frame.assign(target=[runs[place] for place in places])
    scored = winners.scores(apart[frame["source"] != schema.INTERPRETED])
    by_run: dict[str, dict[BlockSizes, tuple[float, float]]] = {run: {} for run in runs.values()}
    for run, blocks, score, us in zip(
        scored["target"], blocks_of(scored), scored["score"], scored["latency_us"], strict=True
    ):
        by_run[run][blocks] = float(score), float(us)
    return {place: by_run[run] for place, run in runs.items()}


class _Row(NamedTuple):
    """What a cell needs of a row; value as in Cell."""

    blocks: BlockSizes
    workload: str
    fingerprint: str
    vmem_bytes: int
    value: float
    interval: tuple[float, float] | None


def _lines(frame: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """The rows, some at a time: a million of them as Python's own values are gigabytes."""
    for start in range(0, len(frame), _AT_ONCE):
        yield from rows_of(frame.iloc[start : start + _AT_ONCE])


def _row(line: Mapping[str, Any], failures: _Numbers) -> _Row:
    timed = line["source"] != schema.INTERPRETED
    value = (line["latency_us"] or 0.0) if timed else 0.0
    if line["status"] != "ok":
        value = -1.0 - failures[tuple(line[name] for name in _FAILURE)]
    low, high = line["latency_low_us"], line["latency_high_us"]
    return _Row(
        pair_of(line),
        sys.intern(line["workload"]),
        sys.intern(line["workload_fingerprint"]),
        line["vmem_used_bytes"] or 0,
        value,
        (low, high) if timed and low is not None and high is not None else None,
    )


def _run(
    rows: Sequence[_Row], source: str, tools: int, scores: Mapping[BlockSizes, tuple[float, float]]
) -> Run:
    names = {row.fingerprint: row.workload for row in rows}
    several = len(set(names.values())) < len(names)  # one name for different batches
    labels = {
        fingerprint: f"{name} {fingerprint[:8]}" if several else name
        for fingerprint, name in sorted(names.items(), key=lambda item: item[::-1])
    }
    pairs: dict[BlockSizes, dict[str, _Row]] = {}
    for row in rows:
        pairs.setdefault(row.blocks, {})[row.fingerprint] = row
    cells = []
    for blocks, by_workload in sorted(pairs.items()):
        own = [by_workload.get(fingerprint) for fingerprint in labels]
        intervals = [row and row.interval for row in own]
        vmem = max(row.vmem_bytes for row in by_workload.values())
        score, us = scores.get(blocks, (None, None))
        values = [row and row.value for row in own]
        cells.append(Cell(*blocks, vmem or None, score, us, values, intervals if any(intervals) else None))
    return Run(source, tools, list(labels.values()), cells)
