"""What winners do with noise: properties of the choice, and draws of samples as a sweep takes them."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.kernel.problem import BlockSizes, TableKey
from autotune.results import winners
from autotune.results.rows import blocks_of
from autotune.timing.statistics import Median, StoppingRule, median
from tests.factories import KEY, frame_of, make_row, winner

PAIRS = [BlockSizes(pages, queries) for pages in (2, 4, 8, 16) for queries in (32, 64, 128)]
WORKLOADS = ("mixed", "decode-heavy", "prefill-heavy")
NOISE = 0.01

Timed = dict[BlockSizes, dict[str, Median]]


def rows_of(
    timed: Timed, vmem: dict[BlockSizes, int] | None = None, key: TableKey = KEY
) -> list[dict[str, Any]]:
    return [
        make_row(
            *blocks,
            key=key,
            workload=name,
            source="measured",
            latency_us=found.median,
            latency_low_us=found.low,
            latency_high_us=found.high,
            vmem_used_bytes=vmem[blocks] if vmem else None,
        )
        for blocks, medians in timed.items()
        for name, found in medians.items()
    ]


@st.composite
def timings(draw: st.DrawFn) -> Timed:
    """Some candidates, on every workload, each with an interval around its median."""
    chosen = draw(st.lists(st.sampled_from(PAIRS), min_size=2, max_size=6, unique=True))
    medians = st.floats(50, 200)
    widths = st.floats(0, 0.05)

    def one() -> Median:
        middle = draw(medians)
        return Median(middle * (1 - draw(widths)), middle, middle * (1 + draw(widths)))

    return {blocks: {name: one() for name in WORKLOADS} for blocks in chosen}


@settings(max_examples=15, deadline=None)
@given(timings(), st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(timed: Timed, rng: random.Random) -> None:
    rows = rows_of(timed)
    expected = winner(rows)
    rng.shuffle(rows)
    assert winner(rows) == expected


@settings(max_examples=15, deadline=None)
@given(timings(), st.floats(1.001, 3), st.sampled_from(PAIRS), st.integers(0, 100))
def test_adding_a_slower_candidate_never_changes_the_winner(
    timed: Timed, factor: float, pair: BlockSizes, vmem: int
) -> None:
    """Slower than the slowest on every workload, by more than the intervals; whatever its size and VMEM."""
    blocks = next(p for p in [pair, *PAIRS] if p not in timed)
    used = dict.fromkeys(timed, 50)
    before = winner(rows_of(timed, used), [PAIRS[0]])
    slower: dict[str, Median] = {}
    for name in WORKLOADS:
        worst = max(known[name].high for known in timed.values()) * factor
        slower[name] = Median(worst, worst * 1.01, worst * 1.02)
    after = winner(rows_of({**timed, blocks: slower}, {**used, blocks: vmem}), [PAIRS[0]])
    assert after == before


@settings(max_examples=15, deadline=None)
@given(timings(), st.data())
def test_a_difference_inside_the_noise_keeps_the_incumbent(timed: Timed, data: st.DataObject) -> None:
    """Whichever candidate's intervals reach below the fastest one's upper ends is kept, if it is today's."""
    fastest = winner(
        rows_of({b: {n: Median(*[m.median] * 3) for n, m in k.items()} for b, k in timed.items()})
    )
    incumbent = data.draw(st.sampled_from([b for b in timed if b != fastest]))
    touching = {
        name: Median(min(found.low, timed[fastest][name].high), found.median, found.high)
        for name, found in timed[incumbent].items()
    }
    assert winner(rows_of({**timed, incumbent: touching}), [incumbent]) == incumbent


def draw(rng: random.Random, true: float, rule: StoppingRule) -> Median:
    """A candidate timed as a sweep does: until the median's interval is precise."""
    samples: list[float] = []
    while not rule.precise(samples):
        samples.append(true * rng.gauss(1, NOISE))
    return median(samples)


def wins(latencies: dict[BlockSizes, float], incumbent: BlockSizes, draws: int = 100) -> Counter[BlockSizes]:
    """How often each candidate wins, in draws with seeds of their own; each draw is a key of its own."""
    rule = StoppingRule(precision=0.01)
    rows, incumbents = [], {}
    for seed in range(draws):
        rng = random.Random(seed)
        key = KEY._replace(max_num_batched_tokens=16 * (seed + 1))
        timed = {b: {name: draw(rng, true, rule) for name in WORKLOADS} for b, true in latencies.items()}
        rows += rows_of(timed, key=key)
        incumbents["v6e", key] = [incumbent]
    chosen = winners.choose(winners.scores(frame_of(rows)), incumbents)
    assert len(chosen) == draws
    return Counter(blocks_of(chosen))


def test_a_real_gain_of_5_percent_is_found_at_1_percent_noise() -> None:
    incumbent, faster, *others = PAIRS
    latencies = {incumbent: 100.0, faster: 95.0, **dict.fromkeys(others[:4], 104.0)}
    assert wins(latencies, incumbent)[faster] >= 99


def test_no_gain_keeps_the_incumbent_at_1_percent_noise() -> None:
    """The best of six equal candidates looks faster than the incumbent, and is not chosen for it."""
    incumbent = PAIRS[-1]
    assert wins(dict.fromkeys(PAIRS[-6:], 100.0), incumbent)[incumbent] >= 99
