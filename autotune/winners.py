"""Rows to the winner of each key: a pure function of rows, in whatever order they come.

A candidate's score on a key is the geometric mean, over the key's workloads, of its latency relative to the
best candidate of that workload: 1.00 is the best there is. Candidates whose intervals overlap the best one's
are a tie; a tie goes to the incumbent, then to the least VMEM, then to the smaller pair.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from autotune.kernel.problem import BlockSizes, TableKey
from autotune.results import (
    BLOCK_COLUMNS,
    INTERPRETED,
    KEY_COLUMNS,
    MEASURED,
    MODELLED,
    SETTING_COLUMNS,
    TOOL_COLUMNS,
)
from autotune.rowcodes import Codes, codes
from autotune.tpu.trace import CLOCKS

if TYPE_CHECKING:
    import pandas as pd

# One table entry; within it, rows that may be compared with one another share TOOLS.
ENTRY = ["target", *KEY_COLUMNS, *SETTING_COLUMNS]
TOOLS = ["source", "model", "max_num_seqs", *TOOL_COLUMNS]
# A clock has the last word over a model, and either over an interpreter.
_PREFERENCE = {MEASURED: 0, MODELLED: 1, INTERPRETED: 2}
# Modelled latencies have no noise; they tie when they are equal but for rounding.
_ROUNDING = 1e-9
# A noisy wall clock's interval may reach below zero; a latency does not.
_LEAST_US = 1e-6

READ_COLUMNS = [
    *("target", "status", "latency_us", "latency_low_us", "latency_high_us", "vmem_used_bytes"),
    *("timer", "workload", "time", "needed_bytes", "limit_bytes", "error"),
]


def scores(frame: pd.DataFrame) -> pd.DataFrame:
    """One line a candidate that is ok on every workload of its key.

    frame: rows, as `results.read` gives them. The result has the columns of ENTRY, TOOLS and BLOCK_COLUMNS,
    and `score`, `score_low`, `score_high` (1.0 is the best), `latency_us` (geometric mean over the
    workloads), `vmem_used_bytes`, `workloads` and `time`. Of a key's rows by several sources or tools only
    the most trusted source and then the newest tools count, and of several clocks only one, so that like is
    compared with like.
    """
    import pandas as pd

    # Numbers stand for rows' values, and only what is counted with is looked at: of a million rows, grouping
    # by twenty columns of pandas' types costs seconds.
    entry, counts = _comparable(frame)
    latency = frame["latency_us"].to_numpy(float, na_value=np.nan)
    ok = np.flatnonzero(counts & (frame["status"] == "ok").to_numpy(bool) & (latency > 0))
    ok = ok[_of_one_clock(frame.iloc[ok], entry[ok])]
    rows = frame.iloc[ok]
    entry, latency = entry[ok], latency[ok]
    line = codes(rows, BLOCK_COLUMNS, entry)
    contest = codes(rows, ["workload_fingerprint"], entry)
    best = pd.Series(latency).groupby(contest).transform("min").to_numpy()
    cells = pd.DataFrame(
        {
            "row": ok,
            "entry": entry,
            "score": np.log(latency / best),
            "latency_us": np.log(latency),
            "vmem_used_bytes": rows["vmem_used_bytes"].to_numpy(float, na_value=np.nan),
            "contest": contest,
            "time": rows["time"].array,
        }
    )
    for name, column in (("score_low", "latency_low_us"), ("score_high", "latency_high_us")):
        end = rows[column].to_numpy(float, na_value=np.nan)
        cells[name] = np.log(np.where(np.isnan(end), latency, end).clip(min=_LEAST_US) / best)
    lines = cells.groupby(line).agg(
        row=("row", "first"),
        entry=("entry", "first"),
        score=("score", "mean"),
        score_low=("score_low", "mean"),
        score_high=("score_high", "mean"),
        latency_us=("latency_us", "mean"),
        vmem_used_bytes=("vmem_used_bytes", "max"),
        workloads=("contest", "nunique"),
        time=("time", "max"),
    )
    # A candidate that failed, or has not yet been tried, on some workload cannot be compared.
    lines = lines[lines["workloads"] == lines.groupby("entry")["workloads"].transform("max")]
    for name in ("score", "score_low", "score_high", "latency_us"):
        lines[name] = np.exp(lines[name])
    lines["vmem_used_bytes"] = lines["vmem_used_bytes"].astype("Int64")
    what = frame[[*ENTRY, *TOOLS, *BLOCK_COLUMNS]].iloc[lines["row"]].reset_index(drop=True)
    return what.join(lines.drop(columns=["row", "entry"]).reset_index(drop=True))


def _comparable(frame: pd.DataFrame) -> tuple[Codes, np.ndarray[Any, np.dtype[np.bool_]]]:
    """The table entry that each row belongs to, as a number, and whether the row counts."""
    import pandas as pd

    entry = codes(frame, ENTRY)
    tools = codes(frame, TOOLS, entry)
    rows = pd.DataFrame({"row": np.arange(len(frame)), "entry": entry, "time": frame["time"].array})
    groups = rows.groupby(tools).agg(row=("row", "first"), entry=("entry", "first"), newest=("time", "max"))
    groups = groups.join(frame[TOOLS].iloc[groups["row"]].set_axis(groups.index))
    groups["trust"] = groups["source"].map(_PREFERENCE).astype("int64")
    chosen = groups.sort_values(
        ["trust", "newest", *TOOLS], ascending=[True, False, *[True] * len(TOOLS)]
    ).drop_duplicates("entry")
    return entry, pd.Series(tools).isin(chosen.index).to_numpy()


def _of_one_clock(rows: pd.DataFrame, entry: Codes) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which rows are by the one clock that counts for their entry: the one that timed the most, then the most
    trusted."""
    if rows["timer"].nunique() < 2:
        return np.ones(len(rows), bool)
    import pandas as pd

    clock = codes(rows, ["timer"], entry)
    cells = pd.DataFrame(
        {
            "entry": entry,
            "cell": codes(rows, [*BLOCK_COLUMNS, "workload_fingerprint"], clock),
            "trust": rows["timer"].map({name: rank for rank, name in enumerate(CLOCKS)}).to_numpy(),
        }
    )
    groups = cells.groupby(clock).agg(
        entry=("entry", "first"), cells=("cell", "nunique"), trust=("trust", "first")
    )
    chosen = groups.sort_values(["cells", "trust"], ascending=[False, True]).drop_duplicates("entry")
    return np.isin(clock, chosen.index)


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


def keys_of(lines: pd.DataFrame) -> list[TableKey]:
    """The TableKey of each line."""
    columns = (lines[name].tolist() for name in KEY_COLUMNS)
    return [TableKey(*values) for values in zip(*columns, strict=True)]


def blocks_of(lines: pd.DataFrame) -> list[BlockSizes]:
    """The BlockSizes of each line."""
    columns = (lines[name].tolist() for name in BLOCK_COLUMNS)
    return [BlockSizes(*values) for values in zip(*columns, strict=True)]
