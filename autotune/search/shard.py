"""Which part of a sweep is this host's, when some hosts share it without talking to one another.

The parts follow from what was asked for alone, never from rows, caches or who came first, so that every host
cuts alike. Together they are the whole, and no program is in two of them.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from autotune.kernel.jax_rpa.call import published_table
from autotune.kernel.problem import Layout, Program, TableKey
from autotune.results.baselines import incumbent
from autotune.search import space
from autotune.search.plan import Request, candidates_of, without_compile
from autotune.search.strategy import heads_of

T = TypeVar("T", Program, TableKey)


class Shard(NamedTuple):
    """Part `number`, from 1, of `parts`."""

    number: int
    parts: int

    def __str__(self) -> str:
        return f"{self.number}/{self.parts}"


def programs(request: Request, shard: Shard) -> frozenset[Program]:
    """The distinct programs of a shard, those included that need no compile to be ruled out.

    Dealt by expected compile time. Where all are compiled, one by one. Where a search leaves out what cannot
    win, it learns from the programs of one layout of heads, and these stay together as long as a host's fair
    share has room for them; else those of one page size do.
    """
    costs: dict[Program, int] = {}
    published = published_table()
    for key in dict.fromkeys(request.keys):
        problem = key.canonical_problem(request.max_num_seqs)
        incumbents = [blocks for blocks in incumbent(request.generation, key, published) if blocks]
        for program in candidates_of(request, problem, incumbents):
            if without_compile(request, problem, program):
                costs.setdefault(program, 1)
            else:
                # Whole milliseconds, for hosts whose last digits differ.
                costs[program] = 1 + round(1000 * space.expected_compile_seconds(program))
    levels = () if request.all_of_them else (heads_of, lambda program: program.layout)
    return frozenset(_deal(costs, levels, shard))


def keys(request: Request, shard: Shard) -> tuple[TableKey, ...]:
    """The keys of a shard of a sweep on a device, in the request's order; each key is timed on one host.

    Keys of one layout run the same programs and stay together as long as a fair share has room for them.
    """
    problems = {key: key.canonical_problem(request.max_num_seqs) for key in request.keys}
    costs = {
        key: len(space.candidates(problem, request.kv_pages, request.queries))
        for key, problem in problems.items()
    }

    def layout(key: TableKey) -> Layout:
        return problems[key].layout

    def heads(key: TableKey) -> Layout:
        return dataclasses.replace(layout(key), page_size=1)

    mine = _deal(costs, (heads, layout), shard)
    return tuple(key for key in costs if key in mine)


def _deal(costs: Mapping[T, int], levels: Sequence[Callable[[T], Hashable]], shard: Shard) -> set[T]:
    """A shard's things: the most costly bundle first, each to the shard that has the least so far."""
    fair = sum(costs.values()) / shard.parts
    bundles: list[list[T]] = []
    _bundle(list(costs), costs, levels, fair, bundles)
    loads = [(0, number) for number in range(1, shard.parts + 1)]
    mine: set[T] = set()
    for cost, _, bundle in sorted((-_cost(b, costs), min(map(repr, b)), b) for b in bundles):
        load, number = heapq.heappop(loads)
        heapq.heappush(loads, (load - cost, number))
        if number == shard.number:
            mine.update(bundle)
    return mine


def _cost(things: Iterable[T], costs: Mapping[T, int]) -> int:
    return sum(costs[thing] for thing in things)


def _bundle(
    things: list[T],
    costs: Mapping[T, int],
    levels: Sequence[Callable[[T], Hashable]],
    fair: float,
    into: list[list[T]],
) -> None:
    """Things that are alike by the first level, by the next ones where a bundle is beyond a fair share."""
    if not levels:
        into.extend([thing] for thing in things)
        return
    alike: dict[Hashable, list[T]] = {}
    for thing in things:
        alike.setdefault(levels[0](thing), []).append(thing)
    for bundle in alike.values():
        if _cost(bundle, costs) <= math.ceil(fair):
            into.append(bundle)
        else:
            _bundle(bundle, costs, levels[1:], fair, into)
