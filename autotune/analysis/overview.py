"""The winners of a results folder beside what JAX's look-up answers today, and what is not done yet."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from autotune.errors import UsageError
from autotune.io.folders import Folder
from autotune.io.terminal import printable
from autotune.kernel.jax_rpa.call import published_table
from autotune.kernel.problem import BlockSizes, TableKey
from autotune.keys.feasibility import told_apart
from autotune.results import dataset, maintenance, schema, unfinished, winners
from autotune.results.baselines import Incumbent, incumbent, incumbents_of, uncompared
from autotune.results.codes import codes
from autotune.results.rows import keys_of, pair_of, rows_of
from autotune.results.unfinished import Begun
from autotune.tpu.generations import GENERATIONS

if TYPE_CHECKING:
    import pandas as pd


class Line(NamedTuple):
    """One winner. default_cost and published_cost: latency relative to the winner's, None if unknown.

    default_status and published_status: ok, why the pair failed, or None where it was not tried.
    latency_us: microseconds, the geometric mean over the workloads; low_us and high_us: that of the ends of
    their intervals, None unless timed. tools: versions of what made the rows. compared, candidates,
    of_workloads, and passed_over by winners.PASSED_OVER: see `winners.scores`.
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
    default_status: str | None
    published_status: str | None
    settings: dict[str, Any]
    low_us: float | None
    high_us: float | None
    vmem_used_bytes: int | None
    workloads: int
    tools: dict[str, Any]
    compared: int
    candidates: int
    of_workloads: int
    passed_over: dict[str, int]


class Overview(NamedTuple):
    """The winners; how many candidates have each status, by source; keys for which nothing is ok, and why;
    sweeps that have begun and not ended, with how many of their keys have no row; of all winners, what they
    were compared with, and of each that not all rows had a say in; what a look-up answers today for winners
    that were not compared with it; of JAX's default and of its published values, on how many keys they fail
    and how, and how many keys there are.
    """

    lines: list[Line]
    statuses: dict[str, dict[str, int]]
    without_winner: list[tuple[str, TableKey, str]]
    unfinished: list[tuple[Begun, int]]
    compared: str
    narrowed: list[tuple[str, TableKey, str]]
    uncompared: list[BlockSizes]
    failing: dict[str, tuple[dict[str, int], int]]


def overview(folder: Folder, target: str | None = None, *, empty: bool = True) -> Overview:
    """What a results folder holds.

    empty: whether it may hold nothing; else a sweep into it has at least begun.

    Raises:
      UsageError: the folder cannot be read, or holds nothing and may not.
    """
    frame = dataset.read(folder, winners.READ_COLUMNS)
    begun = unfinished.read(folder, target)
    held = set(frame["target"])
    if target is not None:
        frame = frame[frame["target"] == target]
    if frame.empty and not begun and not empty:
        raise UsageError(maintenance.nothing([folder], target, held))
    scored = winners.scores(frame)
    chosen = winners.choose(scored, incumbents_of(scored))
    candidate = [*winners.ENTRY, *winners.TOOLS, *schema.BLOCK_COLUMNS]
    each = frame.drop_duplicates([*candidate, "status"])
    counts: dict[str, dict[str, int]] = {}
    for source, status in zip(each["source"], each["status"], strict=True):
        by_status = counts.setdefault(str(source), {})
        by_status[str(status)] = by_status.get(str(status), 0) + 1
    there = set(zip(frame["target"], keys_of(frame), strict=True)) if begun else set()
    won = set(zip(chosen["target"], keys_of(chosen), strict=True))
    lost = _lost(each, won)
    waiting = [(sweep, sum((sweep.target, key) not in there for key in sweep.keys)) for sweep in begun]
    missing = uncompared(frame, scored, chosen)
    lines = compared(frame, scored, chosen)
    few = winners.narrowed(chosen)
    narrowed = [
        (target, key, winners.compared_text(few.iloc[[number]]))
        for number, (target, key) in enumerate(zip(few["target"], keys_of(few), strict=True))
    ]
    said = winners.compared_text(chosen) if lines else ""
    return Overview(lines, counts, lost, waiting, said, narrowed, missing, failing(frame))


def _lost(each: pd.DataFrame, won: set[tuple[str, TableKey]]) -> list[tuple[str, TableKey, str]]:
    """Keys without a winner, and why: how many candidates have each status, the most frequent first, and of
    each the one that came closest, by the smallest overflow if any.

    each: a row a candidate and status.
    """
    columns = ["target", *schema.KEY_COLUMNS, "status"]
    counts = each.groupby(columns, observed=True).size().to_dict()
    nearest = each.sort_values("needed_bytes").drop_duplicates(columns)
    reasons: dict[tuple[str, TableKey], list[tuple[int, str]]] = {}
    for key, row in zip(keys_of(nearest), rows_of(nearest), strict=True):
        place = row["target"], key
        if place not in won:
            count = counts[(*place[:1], *key, row["status"])]
            reasons.setdefault(place, []).append((count, _why(row, count)))
    return [
        (*place, "; ".join(text for _, text in sorted(texts, key=lambda text: -text[0])))
        for place, texts in sorted(reasons.items())
    ]


def _why(row: dict[str, Any], count: int) -> str:
    """Why so many candidates are not ok, of which a row is one."""
    said = printable(row["error"] or "")
    if row["status"] == "ok":
        said = "not on every workload, as yet"
    if row["needed_bytes"] is not None and row["limit_bytes"] is not None:
        said = "needs {}, limit {}".format(*told_apart(row["needed_bytes"], row["limit_bytes"]))
    pair = f"{row['num_kv_pages_per_blk']},{row['num_queries_per_blk']}"
    status = printable(row["status"])
    which = f"{count} {status}, such as {pair}" if count > 1 else f"{pair} is {status}"
    return which + (f": {said}" if said else "")


def failing(frame: pd.DataFrame) -> dict[str, tuple[dict[str, int], int]]:
    """Of JAX's default and of its published values: how many keys each status that is not ok has, and how
    many keys with such a value there are. Interpreted rows do not count."""
    answers = _answers(frame)
    failed = _failures(frame, answers.values())
    counts: dict[str, tuple[dict[str, int], int]] = {"default": ({}, 0), "published": ({}, 0)}
    for entry, now in answers.items():
        for what, pair in now._asdict().items():
            if pair is None:
                continue
            by_status, keys = counts[what]
            if status := failed.get((*entry, *pair)):
                by_status[status] = by_status.get(status, 0) + 1
            counts[what] = by_status, keys + 1
    return counts


def _answers(frame: pd.DataFrame) -> dict[tuple[Any, ...], Incumbent]:
    """What JAX answers today, by the entry of winners.ENTRY, for all rows that are not interpreted."""
    published = published_table()
    timed = frame[frame["source"] != schema.INTERPRETED]
    _, first = np.unique(codes(timed, winners.ENTRY), return_index=True)
    rows = rows_of(timed.iloc[first][winners.ENTRY])
    entries = [tuple(row.values()) for row in rows]
    return {entry: incumbent(GENERATIONS[entry[0]], TableKey(*entry[1:9]), published) for entry in entries}


def _failures(frame: pd.DataFrame, answers: Collection[Incumbent]) -> dict[tuple[Any, ...], str]:
    """By entry and pair, the status of what is not ok on some workload; the newest row's counts.

    answers: whose pairs are asked for. Of a million rows those of other pairs are not looked at one by one.
    """
    columns = [*winners.ENTRY, *schema.BLOCK_COLUMNS]
    failed = frame[(frame["status"] != "ok") & (frame["source"] != schema.INTERPRETED)]
    pairs = {pair for now in answers for pair in now if pair}
    for column, values in zip(schema.BLOCK_COLUMNS, zip(*pairs, strict=True), strict=False):
        failed = failed[failed[column].isin(values)]
    newest = failed.sort_values("time", kind="stable").drop_duplicates(columns, keep="last")
    return {tuple(row[c] for c in columns): row["status"] for row in rows_of(newest)}


def compared(frame: pd.DataFrame, scored: pd.DataFrame, chosen: pd.DataFrame) -> list[Line]:
    """The winners beside what JAX answers today, a line each of `winners.choose` and in its order.

    scored: what they were chosen from, as `winners.scores` makes it of frame.
    """
    published = published_table()
    failed = _failures(frame, _answers(frame).values())
    columns = [*winners.ENTRY, *schema.BLOCK_COLUMNS]
    by_candidate = {
        tuple(row[c] for c in columns): row["score"] for row in _plain(scored[[*columns, "score"]])
    }
    lines = []
    for won in _plain(chosen):
        entry, score, source = [won[name] for name in winners.ENTRY], won["score"], won["source"]
        latency = won["latency_us"]
        timed = source != schema.MODELLED
        key = TableKey(*entry[1:9])
        now = incumbent(GENERATIONS[entry[0]], key, published)

        def cost(blocks: BlockSizes | None, entry: list[object] = entry, best: float = score) -> float | None:
            other = by_candidate.get((*entry, *blocks)) if blocks else None
            return other / best if other else None

        def status(blocks: BlockSizes | None, entry: list[object] = entry) -> str | None:
            if blocks is None:
                return None
            pair = (*entry, *blocks)
            return "ok" if pair in by_candidate else failed.get(pair)

        lines.append(
            Line(
                entry[0],
                key,
                source,
                pair_of(won),
                latency,
                won["tied"],
                now,
                cost(now.default),
                cost(now.published),
                status(now.default),
                status(now.published),
                {name: won[name] for name in schema.SETTING_COLUMNS},
                latency * won["score_low"] / score if timed else None,
                latency * won["score_high"] / score if timed else None,
                won["vmem_used_bytes"],
                won["workloads"],
                {name: won[name] for name in ("model", *schema.TOOL_COLUMNS)},
                won["compared"],
                won["candidates"],
                won["of_workloads"],
                {name: won[name] for name in winners.PASSED_OVER},
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
