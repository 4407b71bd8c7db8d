"""What a device sweep knows of its keys' candidates, from rows old and new."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autotune.kernel.problem import BlockSizes, TableKey
from autotune.results import schema
from autotune.results.rows import key_of, pair_of, rows_of
from autotune.results.schema import CLOCKS
from autotune.search.plan import Request
from autotune.timing.shortlist import geometric_mean
from autotune.timing.statistics import Median
from autotune.tpu.compiler import LASTING

if TYPE_CHECKING:
    import pandas as pd

# Columns of a modelled row that are as true of the same program when it is timed.
PROGRAM_COLUMNS = ("cycles", "vmem_used_bytes", "smem_used_bytes")


@dataclasses.dataclass
class Candidate:
    """predicted: seconds by the workload's fingerprint. timed: by the clock, then alike. failed: an earlier
    run gave it up."""

    predicted: dict[str, Median] = dataclasses.field(default_factory=dict)
    timed: dict[str, dict[str, Median]] = dataclasses.field(default_factory=dict)
    program: dict[str, Any] = dataclasses.field(default_factory=dict)
    failed: bool = False


class Known:
    """By key and by block sizes. source: of the timings that count, measured or interpreted."""

    def __init__(self, request: Request, source: str, tools: schema.Tools, model: str) -> None:
        self._request = request
        self._source = source
        self._wanted = {
            "target": request.generation.name,
            "max_num_seqs": request.max_num_seqs,
            **dataclasses.asdict(request.settings),
            **dataclasses.asdict(tools),
        }
        self._model = model
        self._candidates: dict[TableKey, dict[BlockSizes, Candidate]] = {}

    def read(self, frame: pd.DataFrame) -> None:
        """Take the rows of a data set in."""
        mine = frame["source"].isin([self._source, schema.MODELLED])
        for name, value in self._wanted.items():
            mine &= frame[name].isna() if value is None else frame[name] == value
        for row in rows_of(frame[mine.fillna(False)]):
            self.add(row)

    def add(self, row: Mapping[str, Any]) -> None:
        """Take one row of this request in."""
        key = key_of(row)
        blocks = pair_of(row)
        candidate = self._candidates.setdefault(key, {}).setdefault(blocks, Candidate())
        batch, latency = row["workload_fingerprint"], row["latency_us"]
        if row["source"] == schema.MODELLED:
            if row["model"] == self._model and row["status"] == "ok":
                candidate.predicted[batch] = Median(latency * 1e-6, latency * 1e-6, latency * 1e-6)
                candidate.program = {name: row[name] for name in PROGRAM_COLUMNS}
        elif row["status"] == "ok":
            ends = (row["latency_low_us"], latency, row["latency_high_us"])
            for medians in candidate.timed.values():  # a row by another clock takes the place of this one's
                medians.pop(batch, None)
            candidate.timed.setdefault(row["timer"], {})[batch] = Median(*(value * 1e-6 for value in ends))
        elif not (self._request.retry_failed and row["status"] not in LASTING):
            candidate.failed = True

    def ranking(self, key: TableKey, batches: set[str]) -> tuple[BlockSizes, ...]:
        """The candidates that are ok on all of the workloads, by predicted latency."""
        scores = {
            blocks: geometric_mean([candidate.predicted[batch] for batch in sorted(batches)]).median
            for blocks, candidate in self._candidates.get(key, {}).items()
            if batches <= set(candidate.predicted)
        }
        return tuple(sorted(scores, key=lambda blocks: (scores[blocks], blocks)))

    def predictions(self, key: TableKey) -> dict[BlockSizes, dict[str, float]]:
        """Predicted seconds of a key's candidates, by the workload's fingerprint."""
        return {
            blocks: {batch: found.median for batch, found in candidate.predicted.items()}
            for blocks, candidate in self._candidates.get(key, {}).items()
        }

    def timed(
        self, key: TableKey, batches: set[str]
    ) -> tuple[str | None, dict[BlockSizes, dict[str, Median]]]:
        """The timings of these workloads by the clock that took the most of them, and that clock."""
        by_clock: dict[str, dict[BlockSizes, dict[str, Median]]] = {}
        for blocks, candidate in self._candidates.get(key, {}).items():
            for clock, medians in candidate.timed.items():
                if mine := {batch: found for batch, found in medians.items() if batch in batches}:
                    by_clock.setdefault(clock, {})[blocks] = mine
        if not by_clock:
            return None, {}
        trusted = sorted(by_clock, key=lambda clock: CLOCKS.index(clock) if clock in CLOCKS else len(CLOCKS))
        clock = max(trusted, key=lambda clock: sum(map(len, by_clock[clock].values())))
        return clock, by_clock[clock]

    def failed(self, key: TableKey) -> frozenset[BlockSizes]:
        """The candidates that earlier runs gave up."""
        return frozenset(b for b, candidate in self._candidates.get(key, {}).items() if candidate.failed)

    def program(self, key: TableKey, blocks: BlockSizes) -> dict[str, Any]:
        """The columns of a row that its compiled program fills; none of one that was not compiled for it."""
        candidate = self._candidates.get(key, {}).get(blocks)
        return candidate.program if candidate else {}
