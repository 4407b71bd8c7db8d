"""Rows to the winner of each key: a pure function of rows, in whatever order they come.

A candidate's score on a key is the geometric mean, over the key's workloads, of its latency relative to the
best candidate of that workload: 1.00 is the best there is. Candidates whose intervals overlap the best one's
are a tie; a tie goes to the incumbent, then to the least VMEM, then to the smaller pair.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

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
    *("workload", "time", "needed_bytes", "limit_bytes", "error"),
]


def scores(frame: pd.DataFrame) -> pd.DataFrame:
    """One line a candidate that is ok on every workload of its key.

    frame: rows, as `results.read` gives them. The result has the columns of ENTRY, TOOLS and BLOCK_COLUMNS,
    and `score`, `score_low`, `score_high` (1.0 is the best), `latency_us` (geometric mean over the
    workloads), `vmem_used_bytes`, `workloads` and `time`. Of a key's rows by several sources or tools only
    the most trusted source and then the newest tools count, so that like is compared with like.
    """
    import pandas as pd

    frame = _comparable(frame)
    ok = frame[(frame["status"] == "ok") & (frame["latency_us"] > 0)].copy()
    best = ok.groupby(["_entry", "workload_fingerprint"], sort=False)["latency_us"].transform("min")
    for name, column in (
        ("score", "latency_us"),
        ("score_low", "latency_low_us"),
        ("score_high", "latency_high_us"),
    ):
        ok[name] = np.log(ok[column].fillna(ok["latency_us"]).clip(lower=_LEAST_US) / best)
    ok["latency_us"] = np.log(ok["latency_us"])
    grouped = ok.groupby(["_entry", *BLOCK_COLUMNS], sort=False)
    out = grouped.agg(
        score=("score", "mean"),
        score_low=("score_low", "mean"),
        score_high=("score_high", "mean"),
        latency_us=("latency_us", "mean"),
        vmem_used_bytes=("vmem_used_bytes", "max"),
        workloads=("workload_fingerprint", "nunique"),
        time=("time", "max"),
    ).reset_index()
    for name in ("score", "score_low", "score_high", "latency_us"):
        out[name] = np.exp(out[name])
    # A candidate that failed, or has not yet been tried, on some workload cannot be compared.
    out = out[out["workloads"] == out.groupby("_entry")["workloads"].transform("max")]
    entries = frame.drop_duplicates("_entry")[["_entry", *ENTRY, *TOOLS]]
    merged = out.merge(entries, on="_entry").drop(columns="_entry")
    return pd.DataFrame(merged).sort_values([*ENTRY, *BLOCK_COLUMNS], ignore_index=True)


def _comparable(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows that count, with `_entry`: the number of the table entry that each belongs to."""
    frame = frame.assign(
        _entry=frame.groupby(ENTRY, sort=False, dropna=False).ngroup(),
        _tools=frame.groupby([*ENTRY, *TOOLS], sort=False, dropna=False).ngroup(),
        _trust=frame["source"].map(_PREFERENCE).astype("int64"),
    )
    frame["_newest"] = frame.groupby("_tools", sort=False)["time"].transform("max")
    chosen = (
        frame[["_entry", "_tools", "_trust", "_newest", *TOOLS]]
        .drop_duplicates("_tools")
        .sort_values(["_trust", "_newest", *TOOLS], ascending=[True, False, *[True] * len(TOOLS)])
        .drop_duplicates("_entry")
    )
    return frame[frame["_tools"].isin(chosen["_tools"])]


def choose(
    scored: pd.DataFrame, incumbents: Mapping[tuple[str, TableKey], Iterable[BlockSizes]] | None = None
) -> pd.DataFrame:
    """The winner of each entry: one line of `scores`, with `tied`, how many candidates it could not be told
    from.

    incumbents: by (target, key), the pairs that a tie goes to, the dearest first.
    """
    if scored.empty:
        return scored.assign(tied=0)
    scored = scored.copy()
    entry = scored.groupby(ENTRY, sort=False, dropna=False).ngroup()
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
