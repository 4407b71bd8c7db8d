"""The winners of a results folder beside what JAX's look-up answers today, and what is not done yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from autotune.errors import UsageError
from autotune.io.folders import Folder
from autotune.io.terminal import printable
from autotune.kernel.jax_rpa.call import published_table
from autotune.kernel.problem import BlockSizes, TableKey
from autotune.keys.feasibility import told_apart
from autotune.results import dataset, maintenance, schema, unfinished, versions, winners
from autotune.results.baselines import Incumbent, incumbent, incumbents_of, uncompared
from autotune.results.codes import codes
from autotune.results.rows import key_of, keys_of, pair_of, rows_of
from autotune.results.unfinished import Begun
from autotune.tpu.generations import GENERATIONS

if TYPE_CHECKING:
    import pandas as pd

Entry = tuple[Any, ...]  # values of winners.ENTRY


class Rival(NamedTuple):
    """A pair that JAX hands out today. cost: its latency relative to the winner's, None if unknown. status:
    ok, why it failed, or None where it was not tried."""

    blocks: BlockSizes
    cost: float | None = None
    status: str | None = None


class Line(NamedTuple):
    """One winner.

    latency_us: microseconds, the geometric mean over the workloads; low_us and high_us: that of the ends of
    their intervals, None unless timed. published: None for a key that JAX's table does not list. won: the
    winner's columns of `winners.choose`.
    """

    target: str
    key: TableKey
    settings: dict[str, Any]
    source: str
    blocks: BlockSizes
    latency_us: float
    low_us: float | None
    high_us: float | None
    default: Rival
    published: Rival | None
    won: dict[str, Any]


class Judged(NamedTuple):
    """Rows judged. scored, chosen: as of `winners`; lines: one each of chosen. counting: the rows of the
    versions that decide. failing: of JAX's default and of its published values, how many keys each status
    that is not ok has, and how many keys with such a value there are; interpreted rows do not count."""

    scored: pd.DataFrame
    chosen: pd.DataFrame
    counting: pd.DataFrame
    lines: list[Line]
    failing: dict[str, tuple[dict[str, int], int]]


class Overview(NamedTuple):
    """The winners; how many candidates have each status, by source; keys for which nothing is ok, and why;
    sweeps that have begun and not ended, with how many of their keys have no row; of all winners, what they
    were compared with, and of each that not all rows had a say in; what a look-up answers today for winners
    that were not compared with it; failing: see `Judged`.
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
    seen = judge(frame)
    there = set(zip(frame["target"], keys_of(frame), strict=True)) if begun else set()
    few = winners.narrowed(seen.chosen)
    return Overview(
        lines=seen.lines,
        statuses=_statuses(frame),
        without_winner=_lost(seen.counting, {(line.target, line.key) for line in seen.lines}),
        unfinished=[(one, sum((one.target, key) not in there for key in one.keys)) for one in begun],
        compared=winners.compared_text(seen.chosen) if seen.lines else "",
        narrowed=[
            (target, key, winners.compared_text(few.iloc[[number]]))
            for number, (target, key) in enumerate(zip(few["target"], keys_of(few), strict=True))
        ],
        uncompared=uncompared(seen.counting, seen.scored, seen.chosen),
        failing=seen.failing,
    )


def _statuses(frame: pd.DataFrame) -> dict[str, dict[str, int]]:
    """By source and status, how many candidates there are, those of other versions counting anew."""
    each = frame.drop_duplicates([*winners.ENTRY, *winners.TOOLS, *schema.BLOCK_COLUMNS, "status"])
    out: dict[str, dict[str, int]] = {}
    for (source, status), count in Counter(zip(each["source"], each["status"], strict=True)).items():
        out.setdefault(source, {})[status] = count
    return out


def _lost(rows: pd.DataFrame, won: set[tuple[str, TableKey]]) -> list[tuple[str, TableKey, str]]:
    """Keys without a winner, and why: how many candidates have each status, the most frequent first, and of
    each the one that came closest, by the smallest overflow if any."""
    each = rows.drop_duplicates([*winners.ENTRY, *winners.TOOLS, *schema.BLOCK_COLUMNS, "status"])
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


def judge(frame: pd.DataFrame) -> Judged:
    """The winners of some rows beside what JAX answers today."""
    scored = winners.scores(frame)
    chosen = winners.choose(scored, incumbents_of(scored))
    counting = versions.deciding(frame, scored)
    published = published_table()
    answers = _answers(frame[frame["source"] != schema.INTERPRETED], published)
    failed = _failures(counting, answers.values())
    columns = [*winners.ENTRY, *schema.BLOCK_COLUMNS, "score"]
    by_candidate = {tuple(row[c] for c in columns[:-1]): row["score"] for row in _plain(scored[columns])}

    def rival(entry: Entry, blocks: BlockSizes, best: float) -> Rival:
        score = by_candidate.get((*entry, *blocks))
        if score is None:
            return Rival(blocks, status=failed.get((*entry, *blocks)))
        return Rival(blocks, score / best, "ok")

    lines = []
    for won in _plain(chosen):
        entry, score, latency = _entry(won), won["score"], won["latency_us"]
        now = incumbent(GENERATIONS[won["target"]], key_of(won), published)
        timed = won["source"] != schema.MODELLED
        lines.append(
            Line(
                target=won["target"],
                key=key_of(won),
                settings={name: won[name] for name in schema.SETTING_COLUMNS},
                source=won["source"],
                blocks=pair_of(won),
                latency_us=latency,
                low_us=latency * won["score_low"] / score if timed else None,
                high_us=latency * won["score_high"] / score if timed else None,
                default=rival(entry, now.default, score),
                published=rival(entry, now.published, score) if now.published else None,
                won=won,
            )
        )
    return Judged(scored, chosen, counting, lines, _failing(answers, failed))


def _entry(row: Mapping[str, Any]) -> Entry:
    return tuple(row[name] for name in winners.ENTRY)


def _answers(
    frame: pd.DataFrame, published: Mapping[str, Mapping[TableKey, BlockSizes]]
) -> dict[Entry, Incumbent]:
    """What JAX answers today, by entry."""
    _, first = np.unique(codes(frame, winners.ENTRY), return_index=True)
    return {
        _entry(row): incumbent(GENERATIONS[row["target"]], key_of(row), published)
        for row in rows_of(frame.iloc[first][winners.ENTRY])
    }


def _failures(rows: pd.DataFrame, answers: Collection[Incumbent]) -> dict[Entry, str]:
    """By entry and pair, the status of what is not ok on some workload; the newest row's counts.

    answers: whose pairs are asked for. Of a million rows those of other pairs are not looked at one by one.
    """
    columns = [*winners.ENTRY, *schema.BLOCK_COLUMNS]
    failed = rows[(rows["status"] != "ok") & (rows["source"] != schema.INTERPRETED)]
    pairs = {pair for now in answers for pair in now if pair}
    for column, values in zip(schema.BLOCK_COLUMNS, zip(*pairs, strict=True), strict=False):
        failed = failed[failed[column].isin(values)]
    newest = failed.sort_values("time", kind="stable").drop_duplicates(columns, keep="last")
    return {tuple(row[c] for c in columns): row["status"] for row in rows_of(newest)}


def _failing(
    answers: Mapping[Entry, Incumbent], failed: Mapping[Entry, str]
) -> dict[str, tuple[dict[str, int], int]]:
    """See `Judged`."""
    out = {}
    for what in ("default", "published"):
        pairs = [(*entry, *pair) for entry, now in answers.items() if (pair := getattr(now, what))]
        out[what] = dict(Counter(failed[pair] for pair in pairs if pair in failed)), len(pairs)
    return out


def _plain(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The lines of a frame as plain Python values, None where a value is missing."""
    lines = frame.astype(object).where(frame.notna(), None).to_dict("records")
    return [{str(name): value for name, value in line.items()} for line in lines]
