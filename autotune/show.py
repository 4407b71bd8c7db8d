"""The winners of a results folder beside what JAX's look-up answers today, and what is not done yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from autotune import gather, results, unfinished, winners
from autotune.errors import UsageError
from autotune.folders import Folder
from autotune.incumbents import Incumbent, incumbent, incumbents_of, uncompared
from autotune.kernel.problem import BlockSizes, TableKey
from autotune.kernel.rpa import published_table
from autotune.terminal import printable
from autotune.tpu.chips import GENERATIONS, MIB
from autotune.unfinished import Begun

if TYPE_CHECKING:
    import pandas as pd


class Line(NamedTuple):
    """One winner. default_cost and published_cost: latency relative to the winner's, None if unknown.

    latency_us: microseconds, the geometric mean over the workloads; low_us and high_us: that of the ends of
    their intervals, None unless timed. tools: versions of what made the rows.
    """

    target: str
    key: TableKey
    source: str
    blocks: BlockSizes
    latency_us: float
    tied: int
    incumbent: Incumbent
    default_cost: float | None
    published_cost: float | None
    settings: dict[str, Any]
    low_us: float | None
    high_us: float | None
    vmem_used_bytes: int | None
    workloads: int
    tools: dict[str, Any]


class Overview(NamedTuple):
    """The winners; how many candidates have each status, by source; keys for which nothing is ok, and why;
    sweeps that have begun and not ended, with how many of their keys have no row; what a look-up answers
    today for winners that were not compared with it.
    """

    lines: list[Line]
    statuses: dict[str, dict[str, int]]
    without_winner: list[tuple[str, TableKey, str]]
    unfinished: list[tuple[Begun, int]]
    uncompared: list[BlockSizes]


def overview(folder: Folder, target: str | None = None, *, empty: bool = True) -> Overview:
    """What a results folder holds.

    empty: whether it may hold nothing; else a sweep into it has at least begun.

    Raises:
      UsageError: the folder cannot be read, or holds nothing and may not.
    """
    frame = results.read(folder, winners.READ_COLUMNS)
    begun = unfinished.read(folder, target)
    held = set(frame["target"])
    if target is not None:
        frame = frame[frame["target"] == target]
    if frame.empty and not begun and not empty:
        raise UsageError(gather.nothing([folder], target, held))
    scored = winners.scores(frame)
    chosen = winners.choose(scored, incumbents_of(scored))
    candidate = [*winners.ENTRY, *winners.TOOLS, *results.BLOCK_COLUMNS]
    each = frame.drop_duplicates([*candidate, "status"])
    counts: dict[str, dict[str, int]] = {}
    for source, status in zip(each["source"], each["status"], strict=True):
        by_status = counts.setdefault(str(source), {})
        by_status[str(status)] = by_status.get(str(status), 0) + 1
    there = set(zip(frame["target"], winners.keys_of(frame), strict=True)) if begun else set()
    won = set(zip(chosen["target"], winners.keys_of(chosen), strict=True))
    # Of a key without a winner, the candidate that came closest: the smallest overflow, if any.
    closest = frame.sort_values("needed_bytes").drop_duplicates(["target", *results.KEY_COLUMNS])
    lost = [
        (target, key, _why(row))
        for target, key, row in zip(
            closest["target"], winners.keys_of(closest), results.rows_of(closest), strict=True
        )
        if (target, key) not in won
    ]
    waiting = [(sweep, sum((sweep.target, key) not in there for key in sweep.keys)) for sweep in begun]
    missing = uncompared(frame, scored, chosen)
    return Overview(compared(scored, chosen), counts, sorted(lost), waiting, missing)


def _why(row: dict[str, Any]) -> str:
    """Why a candidate is not ok."""
    pair = f"{row['num_kv_pages_per_blk']},{row['num_queries_per_blk']}"
    if row["needed_bytes"] is not None and row["limit_bytes"] is not None:
        needed, limit = row["needed_bytes"] / MIB, row["limit_bytes"] / MIB
        return f"{pair} is {printable(row['status'])}: needs {needed:.2f} MiB, limit {limit:.2f} MiB"
    said = printable(row["error"] or "")
    if row["status"] == "ok":
        said = "not on every workload, as yet"
    return f"{pair} is {printable(row['status'])}" + (f": {said}" if said else "")


def compared(scored: pd.DataFrame, chosen: pd.DataFrame) -> list[Line]:
    """The winners beside what JAX answers today, a line each of `winners.choose` and in its order.

    scored: what they were chosen from, as `winners.scores` gives it.
    """
    published = published_table()
    entry_columns = [*winners.ENTRY, *results.BLOCK_COLUMNS]
    by_candidate = {
        line: score
        for *line_values, score in zip(
            *(scored[name].astype(object).where(scored[name].notna(), None) for name in entry_columns),
            scored["score"],
            strict=True,
        )
        for line in [tuple(line_values)]
    }
    lines = []
    for won in _plain(chosen):
        entry, score, source = [won[name] for name in winners.ENTRY], won["score"], won["source"]
        latency = won["latency_us"]
        timed = source != results.MODELLED
        key = TableKey(*entry[1:9])
        now = incumbent(GENERATIONS[entry[0]], key, published)

        def cost(blocks: BlockSizes | None, entry: list[object] = entry, best: float = score) -> float | None:
            other = by_candidate.get((*entry, *blocks)) if blocks else None
            return other / best if other else None

        lines.append(
            Line(
                entry[0],
                key,
                source,
                BlockSizes(*(won[name] for name in results.BLOCK_COLUMNS)),
                latency,
                won["tied"],
                now,
                cost(now.default),
                cost(now.published),
                {name: won[name] for name in results.SETTING_COLUMNS},
                latency * won["score_low"] / score if timed else None,
                latency * won["score_high"] / score if timed else None,
                won["vmem_used_bytes"],
                won["workloads"],
                {name: won[name] for name in ("model", *results.TOOL_COLUMNS)},
            )
        )
    return lines


def _plain(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The lines of a frame as plain Python values, None where a value is missing."""
    columns = [frame[name].astype(object).where(frame[name].notna(), None).tolist() for name in frame]
    return [
        {
            str(name): int(value) if isinstance(value, np.integer) else value
            for name, value in zip(frame, values, strict=True)
        }
        for values in zip(*columns, strict=True)
    ]
