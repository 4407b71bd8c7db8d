"""Which rows of a key are compared with one another, rule by rule; `winners` says the rules."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import NamedTuple

# Why a candidate of a key was not in the comparison that decided, the first that holds: it failed there; it
# has rows there, but not on all workloads; by another clock only; of other tools only; of another source.
PASSED_OVER = ("failed", "other_workloads", "other_clock", "other_version", "other_source")
# Index of the sources in the order of trust: a clock before a model, and either before an interpreter.
MEASURED, MODELLED, INTERPRETED = range(3)
# A narrower comparison says nothing of the best unless all that came this near to it were tried again.
_NEAR = math.log(1.05)


class Row(NamedTuple):
    """A row in numbers, equal where the values are: of its place, block sizes, tools and so on.

    program: of the block sizes, max_num_seqs and versions, whatever the source. time: integer, ascending.
    lost: that does not fit, is refused or gives a wrong result. transient: may go otherwise the next time.
    """

    at: int
    pair: int
    tools: int
    program: int
    trust: int
    clock: int
    workload: int
    time: int
    log_latency: float
    ok: bool
    lost: bool
    transient: bool


class Comparison(NamedTuple):
    """Candidates of one set of tools and one clock that are ok on the same workloads.

    newest: the time of the newest row of these tools. means: by pair, of the logarithms of its latencies.
    tried: the pairs of means, and those that lost.
    """

    trust: int
    newest: int
    tools: int
    clock: int
    workloads: frozenset[int]
    means: dict[int, float]
    tried: frozenset[int]


class Decision(NamedTuple):
    """rows: the places of those that count. compared: how many candidates they are of.

    passed_over: how many other candidates there are, by PASSED_OVER. of_workloads: those that any candidate
    of the same source is ok on.
    """

    rows: list[int]
    compared: int
    passed_over: dict[str, int]
    of_workloads: int


def decide(rows: Sequence[Row]) -> Decision | None:
    """What decides a key; None where nothing is ok.

    rows: all of one key, target and setting, in any order.
    """
    alive = _alive(rows)
    if not alive:
        return None
    chosen = _decisive(_comparisons(rows, alive))
    counting = [
        row.at
        for row in alive
        if (row.tools, row.clock) == (chosen.tools, chosen.clock)
        and row.pair in chosen.means
        and row.workload in chosen.workloads
    ]
    timed = {row.workload for row in rows if row.ok and row.trust == chosen.trust}
    return Decision(counting, len(chosen.means), _passed_over(rows, alive, chosen), len(timed))


def _alive(rows: Sequence[Row]) -> list[Row]:
    """The rows that are ok, of pairs that no failure of the same tools counts against.

    A transient failure counts if as many others are ok on its workload as on any that the pair is ok on. A
    pair that failed by the clock does not win by the model of its tools either.
    """
    failed = [row for row in rows if not row.ok]
    if not failed:
        return list(rows)
    ok_on: dict[tuple[int, int], set[int]] = defaultdict(set)
    for row in rows:
        if row.ok:
            ok_on[row.tools, row.workload].add(row.pair)
    most_others: dict[tuple[int, int], int] = defaultdict(int)
    for (tools, _), pairs in ok_on.items():
        for pair in pairs:
            most_others[tools, pair] = max(most_others[tools, pair], len(pairs) - 1)
    out = {
        (row.tools, row.pair)
        for row in failed
        if not row.transient or len(ok_on[row.tools, row.workload]) >= most_others[row.tools, row.pair]
    }
    refuted = {row.program for row in failed if row.trust == MEASURED}
    return [
        row
        for row in rows
        if row.ok
        and (row.tools, row.pair) not in out
        and not (row.trust == MODELLED and row.program in refuted)
    ]


def _comparisons(rows: Sequence[Row], alive: Sequence[Row]) -> list[Comparison]:
    """Every comparison that there is, by tools, clock and workloads."""
    newest: dict[int, int] = {}
    lost: dict[int, set[int]] = defaultdict(set)
    for row in rows:
        newest[row.tools] = max(row.time, newest.get(row.tools, row.time))
        if row.lost:
            lost[row.tools].add(row.pair)
    runs: dict[tuple[int, int, int], dict[int, dict[int, float]]] = {}
    for row in alive:
        run = runs.setdefault((row.tools, row.clock, row.trust), {})
        run.setdefault(row.pair, {})[row.workload] = row.log_latency
    found = []
    for (tools, clock, trust), logs in sorted(runs.items()):
        for workloads in _sets({frozenset(own) for own in logs.values()}):
            means = {
                pair: sum(own[workload] for workload in workloads) / len(workloads)
                for pair, own in logs.items()
                if workloads <= own.keys()
            }
            tried = frozenset(lost[tools] | means.keys())
            found.append(Comparison(trust, newest[tools], tools, clock, workloads, means, tried))
    return found


def _sets(own: Collection[frozenset[int]]) -> list[frozenset[int]]:
    """The sets of workloads to compare on: each candidate's own; and of each workload, those that all
    candidates with it have. The comparison of the most candidates, then workloads, is on one of these."""
    if len(own) == 1:
        return list(own)
    common = [frozenset.intersection(*(s for s in own if one in s)) for one in frozenset().union(*own)]
    return sorted({*own, *common}, key=sorted)


def _decisive(found: list[Comparison]) -> Comparison:
    """The comparison that decides, by the three rules of `winners`."""
    trust = min(c.trust for c in [c for c in found if len(c.tried) >= 2] or found)
    found = [c for c in found if c.trust == trust]
    widest = min(found, key=lambda c: (-len(c.means), -len(c.workloads), -c.newest, c.tools, c.clock))
    limit = min(widest.means.values()) + _NEAR
    leaders = {pair for pair, mean in widest.means.items() if mean <= limit}
    eligible = [c for c in found if c is widest or (len(c.tried) >= 2 and leaders <= c.tried)]
    return min(eligible, key=lambda c: (-len(c.workloads), -c.newest, c.tools, -len(c.means), c.clock))


def _passed_over(rows: Sequence[Row], alive: Sequence[Row], chosen: Comparison) -> dict[str, int]:
    """How many candidates are not in the comparison that decided, by the first reason that holds."""
    living = {row.at for row in alive}
    why: dict[int, int] = {}
    for row in rows:
        if row.pair in chosen.means:
            continue
        if row.tools != chosen.tools:
            if row.trust == INTERPRETED != chosen.trust:
                continue
            reason = "other_version" if row.trust == chosen.trust else "other_source"
        elif row.at not in living:
            reason = "failed"
        else:
            reason = "other_workloads" if row.clock == chosen.clock else "other_clock"
        number = PASSED_OVER.index(reason)
        why[row.pair] = min(number, why.get(row.pair, number))
    reasons = list(why.values())
    return {name: reasons.count(number) for number, name in enumerate(PASSED_OVER)}
