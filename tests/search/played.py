"""Searches that are played through, without a compiler."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from autotune.kernel.problem import Program, TableKey
from autotune.results import schema
from autotune.search.plan import Plan, Request
from autotune.search.strategy import Search
from autotune.sweep import search_for
from autotune.tpu.compiler import Compiled
from autotune.tpu.generations import V6E

TOOLS = schema.Tools("1", "1", "1", "x")


KEYS = tuple(
    TableKey("bfloat16", "bfloat16", 8, 2, 128, page_size, tokens, length)
    for page_size in (16, 64, 128)
    for tokens in (512, 2048)
    for length in (1024, 4096)
)


def request(**changes: object) -> Request:
    return dataclasses.replace(Request(generation=V6E, keys=KEYS), **changes)  # type: ignore[arg-type]


def cycles_of(p: Program, noise: float, spill_from: float) -> tuple[int, ...]:
    """Schedules like real ones: bilinear in tokens and queries, rough, and steeper where registers spill."""
    pages, queries = p.blocks
    tokens = pages * p.layout.page_size
    rng = np.random.default_rng([pages, queries, p.layout.page_size])
    cycles = 300 + 0.4 * tokens + 7 * queries + 0.02 * tokens * queries + 12 * pages
    cycles *= 1 + noise * rng.uniform(-1, 1)
    cycles *= max(1.0, tokens * queries / spill_from) ** 0.2
    return 60, 280 + queries // 2, 27, round(cycles)


def play(search: Search, verdict_of: object, jobs: int = 3) -> dict[Program, Compiled]:
    """Go through a search as a pool does; returns the verdicts of all that it compiled."""
    done: dict[Program, Compiled] = {}
    under_way: list[Program] = []
    while True:
        while len(under_way) < jobs and (p := search.next()):
            assert p not in done
            assert p not in under_way
            under_way.append(p)
        if not under_way:
            return done
        p = under_way.pop(0)
        done[p] = verdict_of(p)  # type: ignore[operator]
        search.tell(p, done[p])


def best_latencies(the_plan: Plan, done: dict[Program, Compiled]) -> dict[TableKey, float]:
    latency = search_for(request(), the_plan)._latency  # type: ignore[attr-defined]
    best: dict[TableKey, float] = {}
    for p, verdict in done.items():
        for trial in the_plan.waiting[p]:
            if verdict.schedule:
                value = latency(trial, verdict.schedule.cycles)
                best[trial.key] = min(value, best.get(trial.key, math.inf))
    return best
