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

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from autotune.kernel.problem import BlockSizes, TableKey
from autotune.results.codes import Codes, codes
from autotune.results.schema import (
    BLOCK_COLUMNS,
    CLOCKS,
    INTERPRETED,
    KEY_COLUMNS,
    MEASURED,
    MODELLED,
    SETTING_COLUMNS,
    TOOL_COLUMNS,
)

if TYPE_CHECKING:
    import pandas as pd

Flags = np.ndarray[Any, np.dtype[np.bool_]]

# One table entry; within it, rows that may be compared with one another share TOOLS.
ENTRY = ["target", *KEY_COLUMNS, *SETTING_COLUMNS]
TOOLS = ["source", "model", "max_num_seqs", *TOOL_COLUMNS]
# Why a candidate of a key was not in the comparison that decided, the first that holds: it failed there; it
# has rows there, but not on all workloads; by another clock only; of other tools only; of another source.
PASSED_OVER = ("failed", "other_workloads", "other_clock", "other_version", "other_source")
_ACCOUNTS = ("compared", "candidates", *PASSED_OVER, "of_workloads")
_FOUND = (
    *("score", "score_low", "score_high", "latency_us", "vmem_used_bytes", "workloads", "time"),
    *_ACCOUNTS,
)
# A clock has the last word over a model, and either over an interpreter.
_PREFERENCE = {MEASURED: 0, MODELLED: 1, INTERPRETED: 2}
# A candidate with one of these was tried and lost; other failures are the machine's, or of no call at all.
_LOST = ("vmem_oom", "smem_oom", "compile_error", "wrong_result")
# What may go otherwise the next time.
_TRANSIENT = ("timeout", "crashed")
# A narrower comparison says nothing of the best unless all that came this near to it were tried again.
_NEAR = 1.05
# Modelled latencies have no noise; they tie when they are equal but for rounding.
_ROUNDING = 1e-9
# A noisy wall clock's interval may reach below zero; a latency does not.
_LEAST_US = 1e-6
# Runs of one set of tools: by each clock, and by one that this version does not know.
_PER_TOOLS = len(CLOCKS) + 1

READ_COLUMNS = [
    *("target", "status", "latency_us", "latency_low_us", "latency_high_us", "vmem_used_bytes"),
    *("timer", "workload", "time", "needed_bytes", "limit_bytes", "error"),
]


class _Rows(NamedTuple):
    """Numbers that stand for rows' values, a row each; of a million rows, grouping by twenty columns of
    pandas' types costs seconds.

    pair: of an entry and its block sizes. tools: of an entry and TOOLS. run: of tools and a clock. alive: ok,
    of a pair that no failure of its tools counts against. lost: see _LOST. trust, newest: by tools. entry_of:
    an entry's number by tools.
    """

    entry: Codes
    pair: Codes
    tools: Codes
    run: Codes
    workload: Codes
    latency: np.ndarray[Any, np.dtype[np.float64]]
    ok: Flags
    alive: Flags
    lost: Flags
    trust: Codes
    newest: Codes
    entry_of: Codes


class _Comparisons(NamedTuple):
    """One a line: its run, candidates and workloads, in numbers; members: (comparison, pair, mean of the
    logarithms of its latencies) a line; sets: the workloads of those that do not have all of their run's."""

    run: Codes
    candidates: Codes
    workloads: Codes
    of: Codes
    pair: Codes
    mean: np.ndarray[Any, np.dtype[np.float64]]
    sets: dict[int, frozenset[int]]


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

    rows = _coded(frame)
    if not rows.alive.any():
        return frame.iloc[:0][[*ENTRY, *TOOLS, *BLOCK_COLUMNS]].reindex(
            columns=[*ENTRY, *TOOLS, *BLOCK_COLUMNS, *_FOUND]
        )
    found = _comparisons(rows)
    chosen = _decisive(rows, found)
    counts = _counted(rows, found, chosen)
    picked = frame.iloc[counts]
    entry, latency = rows.entry[counts], rows.latency[counts]
    contest = _dense(entry * (rows.workload.max(initial=0) + 1) + rows.workload[counts])
    best = pd.Series(latency).groupby(contest).transform("min").to_numpy()
    cells = pd.DataFrame(
        {
            "row": counts,
            "entry": entry,
            "score": np.log(latency / best),
            "latency_us": np.log(latency),
            "vmem_used_bytes": picked["vmem_used_bytes"].to_numpy(float, na_value=np.nan),
            "contest": contest,
            "time": picked["time"].array,
        }
    )
    for name, column in (("score_low", "latency_low_us"), ("score_high", "latency_high_us")):
        end = picked[column].to_numpy(float, na_value=np.nan)
        cells[name] = np.log(np.where(np.isnan(end), latency, end).clip(min=_LEAST_US) / best)
    lines = cells.groupby(rows.pair[counts]).agg(
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
    for name in ("score", "score_low", "score_high", "latency_us"):
        lines[name] = np.exp(lines[name])
    lines["vmem_used_bytes"] = lines["vmem_used_bytes"].astype("Int64")
    accounts = _accounts(rows, found, chosen)
    for name in _ACCOUNTS:
        lines[name] = accounts[name][lines["entry"]]
    if "host" in frame:
        hosts = _hosts(picked["host"].where(picked["source"] == MEASURED), entry)
        lines["hosts"] = [hosts.get(number, ()) for number in lines["entry"].tolist()]
    what = frame[[*ENTRY, *TOOLS, *BLOCK_COLUMNS]].iloc[lines["row"]].reset_index(drop=True)
    return what.join(lines.drop(columns=["row", "entry"]).reset_index(drop=True))


def _dense(numbers: Codes) -> Codes:
    """The same order in numbers from 0 on, without gaps."""
    _, dense = np.unique(numbers, return_inverse=True)
    return dense.astype(np.int64, copy=False)


def _together(first: Codes, second: Codes) -> Codes:
    """A dense number for each pair of numbers, ordered by the first."""
    return _dense(first * (second.max(initial=0) + 1) + second)


def _coded(frame: pd.DataFrame) -> _Rows:
    entry = _dense(codes(frame, ENTRY))
    pair = _dense(codes(frame, BLOCK_COLUMNS, entry))
    _, first, tools = np.unique(codes(frame, TOOLS, entry), return_index=True, return_inverse=True)
    latency = frame["latency_us"].to_numpy(float, na_value=np.nan)
    ok = (frame["status"] == "ok").to_numpy(bool) & (latency > 0) & (latency < np.inf)
    trust = np.array(frame["source"].iloc[first].map(_PREFERENCE).tolist(), np.int64)
    newest = np.full(len(first), np.iinfo(np.int64).min)
    np.maximum.at(newest, tools, frame["time"].to_numpy("datetime64[us]").view(np.int64))
    workload = _dense(codes(frame, ["workload_fingerprint"]))
    line = _together(tools, pair)
    out = np.zeros(line.max(initial=-1) + 1, bool)
    transient = ~ok & frame["status"].isin(_TRANSIENT).to_numpy(bool)
    out[line[~ok & ~transient]] = True
    if transient.any():
        out[line[_counting(line, _together(tools, workload), ok, transient)]] = True
    alive = ok & ~out[line]
    modelled = trust[tools] == _PREFERENCE[MODELLED]
    if (refuted := (trust[tools] == _PREFERENCE[MEASURED]) & ~ok).any():
        program = _dense(codes(frame, ["max_num_seqs", *TOOL_COLUMNS], pair))
        out = np.zeros(program.max() + 1, bool)
        out[program[refuted]] = True
        alive &= ~(modelled & out[program])
    clock = np.zeros(len(frame), np.int64)
    if frame["timer"].nunique() > 1:
        ranks = {name: rank for rank, name in enumerate(CLOCKS)}
        clock = np.array(frame["timer"].map(ranks).fillna(len(CLOCKS)).tolist(), np.int64)
        clock[modelled] = 0
    return _Rows(
        entry,
        pair,
        tools,
        tools * _PER_TOOLS + clock,
        workload,
        latency,
        ok,
        alive,
        frame["status"].isin(_LOST).to_numpy(bool),
        trust,
        newest,
        entry[first],
    )


def _counting(line: Codes, cell: Codes, ok: Flags, transient: Flags) -> Codes:
    """The rows of transient failures that count: as many others are ok on their workload as on any other that
    the candidate is ok on.

    line: of tools and a pair. cell: of tools and a workload.
    """
    distinct = np.unique(np.stack([cell[ok], line[ok]]), axis=1)
    others = np.bincount(distinct[0], minlength=cell.max(initial=-1) + 1)
    most = np.zeros(line.max(initial=-1) + 1, np.int64)
    np.maximum.at(most, distinct[1], others[distinct[0]] - 1)
    [failed] = np.nonzero(transient)
    counting: Codes = failed[others[cell[failed]] >= most[line[failed]]]
    return counting


def _comparisons(rows: _Rows) -> _Comparisons:
    """Every comparison that there is, those of one run's sets of workloads apart."""
    [alive] = np.nonzero(rows.alive)
    run, pair = rows.run[alive], rows.pair[alive]
    runs, run = np.unique(run, return_inverse=True)
    line, first, held = np.unique(
        run * (pair.max(initial=0) + 1) + pair, return_index=True, return_counts=True
    )
    run_of, pair_of = run[first], pair[first]
    where = np.searchsorted(line, run * (pair.max(initial=0) + 1) + pair)
    mean = np.bincount(where, np.log(rows.latency[alive]), len(line)) / held
    distinct = np.unique(run * (rows.workload.max(initial=0) + 1) + rows.workload[alive])
    all_of_run = np.bincount(distinct // (rows.workload.max(initial=0) + 1), minlength=len(runs))
    partial = np.zeros(len(runs), bool)
    partial[run_of[held < all_of_run[run_of]]] = True

    whole = ~partial[run_of]
    [whole_runs] = np.nonzero(~partial)
    number = np.searchsorted(whole_runs, run_of[whole])
    parts = [(number, pair_of[whole], mean[whole])]
    numbers, members = [runs[whole_runs]], [np.bincount(number, minlength=len(whole_runs))]
    workloads = [all_of_run[whole_runs]]
    sets: dict[int, frozenset[int]] = {}
    [cells] = np.nonzero(partial[run])
    cells = cells[np.argsort(run[cells], kind="stable")]
    count = len(whole_runs)
    for part in np.split(cells, np.nonzero(np.diff(run[cells]))[0] + 1) if len(cells) else []:
        by_pair: dict[int, dict[int, float]] = {}
        for at in part.tolist():
            row = alive[at]
            by_pair.setdefault(int(pair[at]), {})[int(rows.workload[row])] = float(rows.latency[row])
        for batch in _sets({frozenset(own) for own in by_pair.values()}):
            inside = {p: own for p, own in by_pair.items() if batch <= own.keys()}
            logs = [np.mean(np.log([own[w] for w in sorted(batch)])) for own in inside.values()]
            parts.append((np.full(len(inside), count), np.array([*inside]), np.array(logs)))
            numbers.append(runs[run[part[:1]]])
            members.append(np.array([len(inside)]))
            workloads.append(np.array([len(batch)]))
            sets[count] = batch
            count += 1
    of, pairs, means = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    return _Comparisons(
        np.concatenate(numbers), np.concatenate(members), np.concatenate(workloads), of, pairs, means, sets
    )


def _sets(own: Collection[frozenset[int]]) -> list[frozenset[int]]:
    """The sets of workloads to compare on: each candidate's own; and of each workload, those that all
    candidates with it have. The comparison of the most candidates, then workloads, is on one of these."""
    common = [frozenset.intersection(*(s for s in own if one in s)) for one in frozenset().union(*own)]
    return sorted({*own, *common}, key=sorted)


def _decisive(rows: _Rows, found: _Comparisons) -> Codes:
    """The comparison that decides each entry, -1 where nothing is ok."""
    tools = found.run // _PER_TOOLS
    entry, trust, newest = rows.entry_of[tools], rows.trust[tools], rows.newest[tools]
    entries = rows.entry.max(initial=-1) + 1

    def first(order: list[Codes], among: Flags) -> Codes:
        [these] = np.nonzero(among)
        these = these[np.lexsort([column[these] for column in [*order[::-1], entry]])]
        picked = np.full(entries, -1)
        at, where = np.unique(entry[these], return_index=True)
        picked[at] = these[where]
        return picked

    [lost] = np.nonzero(rows.lost)
    lost_pairs = np.unique(np.stack([rows.tools[lost], rows.pair[lost]]), axis=1)
    tried = found.candidates + np.bincount(lost_pairs[0], minlength=len(rows.trust))[tools]
    ties = [-newest, tools, found.run, np.arange(len(tools))]
    source = first([(tried < 2).astype(np.int64), trust, *ties], np.ones(len(tools), bool))
    among = trust == trust[source[entry]]
    widest = first([-found.candidates, -found.workloads, *ties], among)
    lowest = np.full(len(tools), np.inf)
    np.minimum.at(lowest, found.of, found.mean)
    near = (found.of == widest[entry[found.of]]) & (found.mean <= lowest[found.of] + np.log(_NEAR))
    leads = np.zeros(rows.pair.max(initial=-1) + 1, bool)
    leads[found.pair[near]] = True
    leaders = np.bincount(entry[found.of[near]], minlength=entries)
    again = np.bincount(found.of, leads[found.pair], len(tools))
    again += np.bincount(lost_pairs[0], leads[lost_pairs[1]], len(rows.trust))[tools]
    among &= ((again >= leaders[entry]) & (tried >= 2)) | (np.arange(len(tools)) == widest[entry])
    return first([-found.workloads, -newest, tools, -found.candidates, *ties], among)


def _counted(rows: _Rows, found: _Comparisons, chosen: Codes) -> Codes:
    """The rows that count: of the candidates and workloads of the comparisons that decide."""
    [alive] = np.nonzero(rows.alive)
    mine = chosen[rows.entry[alive]]
    inside = _inside(rows, found, chosen)
    counts = alive[(found.run[mine] == rows.run[alive]) & inside[rows.pair[alive]]]
    if not found.sets:
        return counts
    some = set(found.sets).intersection(chosen.tolist())
    kept = np.ones(len(counts), bool)
    comparison = chosen[rows.entry[counts]]
    for at in np.nonzero(np.isin(comparison, list(some)))[0].tolist():
        kept[at] = int(rows.workload[counts[at]]) in found.sets[int(comparison[at])]
    return counts[kept]


def _inside(rows: _Rows, found: _Comparisons, chosen: Codes) -> Flags:
    """By pair: whether it is in the comparison that decides."""
    inside = np.zeros(rows.pair.max(initial=-1) + 1, bool)
    inside[found.pair[np.isin(found.of, chosen)]] = True
    return inside


def _accounts(rows: _Rows, found: _Comparisons, chosen: Codes) -> dict[str, Codes]:
    """By entry: what was compared, what there is, and what was passed over, why; see `scores`."""
    entries = len(chosen)
    tools = np.where(chosen >= 0, found.run[chosen] // _PER_TOOLS, -1) if len(chosen) else chosen
    inside = _inside(rows, found, chosen)
    own_tools = tools[rows.entry]
    same_source = rows.trust[rows.tools] == rows.trust[own_tools]
    reason = np.full(len(rows.entry), PASSED_OVER.index("other_source"))
    reason[same_source] = PASSED_OVER.index("other_version")
    here = rows.tools == own_tools
    reason[here] = PASSED_OVER.index("failed")
    reason[here & rows.alive] = PASSED_OVER.index("other_clock")
    same_run = rows.run == found.run[chosen[rows.entry]] if len(found.run) else here
    reason[here & rows.alive & same_run] = PASSED_OVER.index("other_workloads")
    # Of a pair that failed on one workload, no other row says that it was passed over for another reason.
    relevant = same_source | (rows.trust[rows.tools] != _PREFERENCE[INTERPRETED])
    why = np.full(len(inside), len(PASSED_OVER))
    np.minimum.at(why, rows.pair[relevant], reason[relevant])
    entry_of = np.zeros(len(inside), np.int64)
    entry_of[rows.pair] = rows.entry
    out = {"compared": np.bincount(entry_of[inside], minlength=entries)}
    for number, name in enumerate(PASSED_OVER):
        out[name] = np.bincount(entry_of[~inside & (why == number)], minlength=entries)
    out["candidates"] = sum(out.values(), np.zeros(entries, np.int64))
    [timed] = np.nonzero(same_source & rows.ok)
    most = rows.workload.max(initial=0) + 1
    out["of_workloads"] = np.bincount(
        np.unique(rows.entry[timed] * most + rows.workload[timed]) // most, minlength=entries
    )
    return out


def _hosts(host: pd.Series[str], entry: Codes) -> dict[int, tuple[str, ...]]:
    """By entry, the hosts of its rows, sorted."""
    named = host.notna().to_numpy(bool)
    groups = host[named].groupby(entry[named])
    return {int(str(number)): tuple(sorted(names.unique().tolist())) for number, names in groups}


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
    failed = frame[~frame["status"].isin(["ok", "timeout", "crashed"])]
    tools = lines[TOOL_COLUMNS].drop_duplicates()
    return failed.merge(tools, on=TOOL_COLUMNS) if len(tools) else failed
