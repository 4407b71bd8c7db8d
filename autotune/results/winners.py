"""Rows to the winner of each key: a pure function of rows, in whatever order they come.

A candidate's score on a key is the geometric mean, over the key's workloads, of its latency relative to the
best candidate of that workload: 1.00 is the best there is. Candidates whose intervals overlap the best one's
are a tie; a tie goes to the incumbent, then to the least VMEM, then to the smaller pair.

Only like is compared with like. A comparison is of one source, one set of tools, one clock and one set of
workloads; its candidates are those that are ok on all of these. One that the compiler refused, or that gave
a wrong result, is in none. A timeout or a crash is the machine's: it counts on a workload that the others
were timed on as well, not on one that few were. Of a key's comparisons one decides:

1. The most trusted source counts, measured before modelled, if it tried two candidates: one alone wins
   against nothing. Tried are those that are ok, and those that lost: that do not fit, are refused by the
   compiler, or give a wrong result. A pair that failed by the clock does not win by the model of its tools.
2. Of its comparisons the widest is that of the most candidates, then of the most workloads, then the newest.
3. A narrower one takes its place only if all that are within 5% of the widest's best were tried in it: the
   one of the most workloads, then the newest. So a later row of another candidate, workload or version cannot
   drop what was the best.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from autotune.kernel.problem import BlockSizes, TableKey
from autotune.results.codes import Codes, codes
from autotune.results.comparisons import PASSED_OVER, Decision, Row, decide
from autotune.results.schema import (
    BLOCK_COLUMNS,
    CLOCKS,
    KEY_COLUMNS,
    MEASURED,
    MODELLED,
    SETTING_COLUMNS,
    SOURCES,
    TOOL_COLUMNS,
    Status,
)

if TYPE_CHECKING:
    import pandas as pd

# One table entry; within it, rows that may be compared with one another share TOOLS.
ENTRY = ["target", *KEY_COLUMNS, *SETTING_COLUMNS]
TOOLS = ["source", "model", "max_num_seqs", *TOOL_COLUMNS]
_ACCOUNTS = ("compared", "candidates", *PASSED_OVER, "of_workloads")
_FOUND = (
    *("score", "score_low", "score_high", "latency_us", "vmem_used_bytes", "workloads", "time"),
    *_ACCOUNTS,
)
# A candidate with one of these was tried and lost; other failures are the machine's, or of no call at all.
_LOST = (Status.VMEM_OOM, Status.SMEM_OOM, Status.COMPILE_ERROR, Status.WRONG_RESULT)
# What may go otherwise the next time.
_TRANSIENT = (Status.TIMEOUT, Status.CRASHED)
# Modelled latencies have no noise; they tie when they are equal but for rounding.
_ROUNDING = 1e-9
# A noisy wall clock's interval may reach below zero; a latency does not.
_LEAST_US = 1e-6

READ_COLUMNS = [
    *("target", "status", "latency_us", "latency_low_us", "latency_high_us", "vmem_used_bytes"),
    *("timer", "workload", "time", "needed_bytes", "limit_bytes", "error"),
]


def scores(frame: pd.DataFrame) -> pd.DataFrame:
    """One line a candidate of the comparison that decides its key; see the module.

    frame: rows, as `results.read` gives them. The result has the columns of ENTRY, TOOLS and BLOCK_COLUMNS,
    and `score`, `score_low`, `score_high` (1.0 is the best), `latency_us` (geometric mean over the
    workloads), `vmem_used_bytes`, `workloads` and `time`. The same in all lines of an entry: `compared`, the
    candidates of the comparison; `candidates`, those of the key; those of PASSED_OVER, which are the
    difference; `of_workloads`, those that any candidate of the same source is ok on; with a column `host` in
    the frame, `hosts`, those of the measured rows that counted.
    """
    import pandas as pd

    entries = _dense(codes(frame, ENTRY))
    pairs = _dense(codes(frame, BLOCK_COLUMNS, entries))
    decided = _decided(frame, entries, pairs)
    if not decided:
        return frame.iloc[:0][[*ENTRY, *TOOLS, *BLOCK_COLUMNS]].reindex(
            columns=[*ENTRY, *TOOLS, *BLOCK_COLUMNS, *_FOUND]
        )
    counts = np.sort(np.concatenate([decision.rows for decision in decided.values()]))
    picked = frame.iloc[counts]
    latency = picked["latency_us"].to_numpy(float)
    entry = pd.Series(entries[counts])
    workload = codes(picked, ["workload_fingerprint"])
    best = pd.Series(latency).groupby([entry, workload]).transform("min")
    cells = pd.DataFrame(
        {
            "row": counts,
            "entry": entry,
            "score": np.log(latency / best),
            "latency_us": np.log(latency),
            "vmem_used_bytes": picked["vmem_used_bytes"].to_numpy(float, na_value=np.nan),
            "workload": workload,
            "time": picked["time"].array,
        }
    )
    for name, column in (("score_low", "latency_low_us"), ("score_high", "latency_high_us")):
        end = picked[column].to_numpy(float, na_value=np.nan)
        cells[name] = np.log(np.where(np.isnan(end), latency, end).clip(min=_LEAST_US) / best)
    lines = cells.groupby(pairs[counts]).agg(
        row=("row", "first"),
        entry=("entry", "first"),
        score=("score", "mean"),
        score_low=("score_low", "mean"),
        score_high=("score_high", "mean"),
        latency_us=("latency_us", "mean"),
        vmem_used_bytes=("vmem_used_bytes", "max"),
        workloads=("workload", "nunique"),
        time=("time", "max"),
    )
    for name in ("score", "score_low", "score_high", "latency_us"):
        lines[name] = np.exp(lines[name])
    lines["vmem_used_bytes"] = lines["vmem_used_bytes"].astype("Int64")
    of_line = [decided[number] for number in lines["entry"].tolist()]
    lines["compared"] = [decision.compared for decision in of_line]
    lines["candidates"] = [decision.compared + sum(decision.passed_over.values()) for decision in of_line]
    for name in PASSED_OVER:
        lines[name] = [decision.passed_over[name] for decision in of_line]
    lines["of_workloads"] = [decision.of_workloads for decision in of_line]
    if "host" in frame:
        timed = (picked["host"].notna() & (picked["source"] == MEASURED)).to_numpy(bool)
        hosts: dict[int, set[str]] = {}
        for number, host in zip(entry[timed].tolist(), picked["host"][timed].tolist(), strict=True):
            hosts.setdefault(number, set()).add(host)
        lines["hosts"] = [tuple(sorted(hosts.get(number, ()))) for number in lines["entry"].tolist()]
    what = frame[[*ENTRY, *TOOLS, *BLOCK_COLUMNS]].iloc[lines["row"]].reset_index(drop=True)
    return what.join(lines.drop(columns=["row", "entry"]).reset_index(drop=True))


def _decided(frame: pd.DataFrame, entries: Codes, pairs: Codes) -> dict[int, Decision]:
    """What decides each entry on which anything is ok, by its number."""
    latency = frame["latency_us"].to_numpy(float, na_value=np.nan)
    ok = (frame["status"] == Status.OK).to_numpy(bool) & (latency > 0) & (latency < np.inf)
    clocks = frame["timer"].map({name: rank for rank, name in enumerate(CLOCKS)}).fillna(len(CLOCKS))
    columns = {
        "pair": pairs,
        "tools": _dense(codes(frame, TOOLS, entries)),
        "program": codes(frame, ["max_num_seqs", *TOOL_COLUMNS], pairs),
        "trust": frame["source"].map({name: rank for rank, name in enumerate(SOURCES)}),
        "clock": clocks.where(frame["source"] != MODELLED, 0).astype(int),
        "workload": codes(frame, ["workload_fingerprint"]),
        "time": frame["time"].to_numpy("datetime64[us]").view(np.int64),
        "log_latency": np.log(np.where(ok, latency, 1.0)),
        "ok": ok,
        "lost": frame["status"].isin(_LOST),
        "transient": frame["status"].isin(_TRANSIENT),
    }
    values = [np.asarray(columns[name]).tolist() for name in Row._fields[1:]]
    rows_of: dict[int, list[Row]] = {}
    for at, (number, *row) in enumerate(zip(entries.tolist(), *values, strict=True)):
        rows_of.setdefault(number, []).append(Row(at, *row))
    found = {number: decide(rows) for number, rows in rows_of.items()}
    return {number: decision for number, decision in found.items() if decision}


def _dense(numbers: Codes) -> Codes:
    """The same order in numbers from 0 on, without gaps."""
    _, dense = np.unique(numbers, return_inverse=True)
    return dense.astype(np.int64, copy=False)


def choose(
    scored: pd.DataFrame, incumbents: Mapping[tuple[str, TableKey], Iterable[BlockSizes]] | None = None
) -> pd.DataFrame:
    """The winner of each entry: one line of `scores`, with `tied`, how many candidates it could not be told
    from.

    incumbents: by (target, key), the pairs that a tie goes to, the dearest first.
    """
    if scored.empty:
        return scored.assign(tied=0)
    import pandas as pd

    scored = scored.copy()
    entry = pd.Series(codes(scored, ENTRY), scored.index)
    order = scored["score"].argsort(kind="stable").to_numpy()
    first = entry.iloc[order].drop_duplicates().index  # the best line of each entry
    reach = scored.loc[first].set_index(entry.loc[first])["score_high"]
    tied = scored[scored["score_low"] <= entry.map(reach) * (1 + _ROUNDING)].copy()
    tied["_entry"] = entry.loc[tied.index]
    tied["tied"] = tied.groupby("_entry")["_entry"].transform("size") - 1
    tied["_rank"] = _incumbency(tied, incumbents or {})
    # A tie is a tie: among equals the score has no say, or noise would move the table.
    tied = tied.sort_values(
        ["_entry", "_rank", "vmem_used_bytes", *BLOCK_COLUMNS], kind="stable", na_position="last"
    )
    winners = tied.drop_duplicates("_entry").drop(columns=["_entry", "_rank"])
    return winners.sort_values(ENTRY, ignore_index=True)


def _incumbency(
    lines: pd.DataFrame, incumbents: Mapping[tuple[str, TableKey], Iterable[BlockSizes]]
) -> list[int]:
    """How dear a line's pair is as an incumbent, from 0; past all of them if it is none."""
    ranks = {
        (target, *key, *blocks): rank
        for (target, key), pairs in incumbents.items()
        for rank, blocks in reversed(list(enumerate(pairs)))
    }
    columns = [lines[name].tolist() for name in ("target", *KEY_COLUMNS, *BLOCK_COLUMNS)]
    return [ranks.get(line, len(ranks)) for line in zip(*columns, strict=True)]


_WORDS = {
    "failed": "failed",
    "other_workloads": "not tried on the same workloads",
    "other_clock": "timed by another clock",
    "other_version": "with rows of other versions only",
    "other_source": "with rows of another source only",
}


def narrowed(chosen: pd.DataFrame) -> pd.DataFrame:
    """Those winners that rows of other workloads, clocks or versions had no say in, or that are alone."""
    unlike = chosen[list(PASSED_OVER[1:4])].sum(axis=1) > 0
    fewer = chosen["workloads"] < chosen["of_workloads"]
    alone = (chosen["compared"] == 1) & (chosen["other_source"] > 0)
    return chosen[unlike | fewer | alone]


def compared_text(chosen: pd.DataFrame) -> str:
    """How many of their keys' candidates winners are among, and what was passed over, why."""
    among, there = (_span(chosen[name]) for name in ("compared", "candidates"))
    sums = [(int(chosen[name].sum()), _WORDS[name]) for name in PASSED_OVER]
    text = f"each winner is among {among} of {there} candidates of its key"
    if passed := ", ".join(f"{count} {words}" for count, words in sums if count):
        text += f"; passed over: {passed}"
    fewer = chosen[chosen["workloads"] < chosen["of_workloads"]]
    if len(fewer):
        text += (
            f"; on {_span(fewer['workloads'])} of {_span(fewer['of_workloads'])} workloads where the others "
            "have rows of too few candidates"
        )
    return text


def _span(numbers: pd.Series[int]) -> str:
    least, most = int(numbers.min()), int(numbers.max())
    return f"{least}" if least == most else f"{least} to {most}"


def refuted(frame: pd.DataFrame, lines: pd.DataFrame) -> pd.DataFrame:
    """The rows that say of a pair that it does not run, made by the tools of some lines: what an earlier
    compiler refused this one may take. A pair that timed out or crashed may run the next time."""
    failed = frame[~frame["status"].isin([Status.OK, *_TRANSIENT])]
    tools = lines[TOOL_COLUMNS].drop_duplicates()
    return failed.merge(tools, on=TOOL_COLUMNS) if len(tools) else failed
