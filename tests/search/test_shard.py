from __future__ import annotations

from collections import Counter

import pytest

from autotune.kernel.problem import Program, TableKey
from autotune.keys import presets
from autotune.results import schema
from autotune.search import plan, shard
from autotune.search.plan import Request
from autotune.search.shard import Shard
from autotune.search.space import expected_compile_seconds
from autotune.sweep import search_for
from autotune.tpu.compiler import Compiled
from autotune.tpu.generations import V6E
from autotune.tpu.schedule import Schedule
from tests.search.played import best_latencies, cycles_of, play
from tests.search.played import request as search_request

TOOLS = schema.Tools("1", "1", "1", "x")


@pytest.fixture(scope="module")
def published() -> Request:
    return Request(generation=V6E, keys=presets.keys("published"))


def all_programs(request: Request) -> set[Program]:
    made = plan.Planner(request, None, TOOLS, "m").plan()
    return set(made.waiting) | {trial.program for trial, _ in made.settled}


@pytest.mark.parametrize("parts", [1, 3, 20])
@pytest.mark.parametrize("exhaustive", [False, True])
def test_parts_are_the_whole_and_no_program_is_in_two(
    published: Request, parts: int, exhaustive: bool
) -> None:
    request = Request(generation=V6E, keys=published.keys[::16], exhaustive=exhaustive)
    shuffled = Request(generation=V6E, keys=request.keys[::-1], exhaustive=exhaustive)
    assert shard.programs(request, Shard(1, parts)) == shard.programs(shuffled, Shard(1, parts))
    found = Counter(p for n in range(parts) for p in shard.programs(request, Shard(n + 1, parts)))
    assert set(found.values()) == {1}
    assert set(found) == all_programs(request)


def test_parts_cost_about_the_same_and_what_a_search_learns_from_stays_together(published: Request) -> None:
    """One layout of heads costs more than half: layouts are whole by page size."""
    waiting = set(plan.Planner(published, None, TOOLS, "m").plan().waiting)
    for parts in (2, 3):
        seconds, holders = [], Counter[object]()
        for number in range(1, parts + 1):
            found = shard.programs(published, Shard(number, parts))
            seconds.append(sum(map(expected_compile_seconds, found & waiting)))
            holders.update({program.layout for program in found})
        assert max(seconds) < 1.1 * min(seconds)
        assert set(holders.values()) == {1}


def test_more_parts_than_programs_leave_some_with_nothing(published: Request) -> None:
    few = Request(generation=V6E, keys=published.keys[:1], kv_pages=(4, 8), queries=(32,))
    sizes = [len(shard.programs(few, Shard(number, 5))) for number in range(1, 6)]
    assert sorted(sizes) == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("parts", [1, 3, 20])
def test_keys_of_a_device_sweep(published: Request, parts: int) -> None:
    request = Request(generation=V6E, keys=published.keys[::3])
    found = [shard.keys(request, Shard(number, parts)) for number in range(1, parts + 1)]
    assert Counter(key for part in found for key in part) == Counter(request.keys)
    order = {key: place for place, key in enumerate(request.keys)}
    assert all(list(part) == sorted(part, key=order.__getitem__) for part in found)
    if parts == 3:
        assert max(map(len, found)) < 2 * min(map(len, found))

        def layouts(part: tuple[TableKey, ...]) -> set[object]:
            return {key.canonical_problem().layout for key in part}

        assert not layouts(found[0]) & layouts(found[1]) | layouts(found[1]) & layouts(found[2])


def test_a_plan_of_a_part_knows_what_rows_say_of_the_others(published: Request) -> None:
    request = Request(generation=V6E, keys=published.keys[:4])
    whole = plan.Planner(request, None, TOOLS, "m").plan()
    made = [
        plan.Planner(request, None, TOOLS, "m").plan(shard.programs(request, Shard(number, 2)))
        for number in (1, 2)
    ]
    assert sum(part.candidates for part in made) == whole.candidates
    assert set(made[0].waiting) | set(made[1].waiting) == set(whole.waiting)
    assert not set(made[0].waiting) & set(made[1].waiting)
    assert set(made[0].incumbents) | set(made[1].incumbents) == set(whole.incumbents)


@pytest.mark.parametrize("parts", [2, 3, 8])
def test_searches_of_the_parts_find_what_one_search_finds(parts: int) -> None:
    """Whole, a key is decided in one part; beyond that in some, each of which finds its own best."""
    whole = plan.Planner(search_request(), None, TOOLS, "m").plan()

    def verdict_of(program: Program) -> Compiled:
        return Compiled(status="ok", schedule=Schedule(cycles_of(program, 0.05, 1e5), 1, 1))

    one = best_latencies(whole, play(search_for(search_request(), whole), verdict_of))
    done: dict[Program, Compiled] = {}
    for number in range(1, parts + 1):
        mine = shard.programs(search_request(), Shard(number, parts))
        part = plan.Planner(search_request(), None, TOOLS, "m").plan(mine)
        compiled = play(search_for(search_request(), part), verdict_of)
        assert not set(compiled) & set(done)
        done |= compiled
    together = best_latencies(whole, done)
    assert set(together) == set(one)
    assert all(abs(together[key] / one[key] - 1) < 0.01 for key in one)
