from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.kernel.problem import BlockSizes, Settings
from autotune.results import dataset, schema, winners
from autotune.results.rows import blocks_of
from tests.factories import TOOLS, frame_of, make_row, winner


def timed(pages: int, queries: int, **latencies: float) -> list[dict[str, Any]]:
    return [make_row(pages, queries, workload=name, latency_us=us) for name, us in latencies.items()]


def test_score_is_the_geometric_mean_of_the_ratio_to_each_workloads_best() -> None:
    rows = timed(4, 32, mixed=10.0, decode=20.0) + timed(8, 32, mixed=20.0, decode=10.0)
    rows += timed(16, 32, mixed=11.0, decode=11.0)
    scored = winners.scores(frame_of(rows))
    assert scored["score"].tolist() == pytest.approx([math.sqrt(2), math.sqrt(2), 1.1])
    assert scored["latency_us"].tolist() == pytest.approx([math.sqrt(200), math.sqrt(200), 11.0])
    assert winner(rows) == (16, 32)


@pytest.mark.parametrize("status", [s for s in schema.STATUSES if s != "ok"])
def test_only_ok_on_every_workload_can_win(status: str) -> None:
    rows = timed(4, 32, mixed=10.0, decode=10.0) + timed(8, 32, mixed=1.0)
    assert winner([*rows, make_row(8, 32, workload="decode", status=status)]) == (4, 32)


@pytest.mark.parametrize("latency", [None, 0.0, -1.0, float("nan"), float("inf")])
def test_a_latency_that_is_none_cannot_win(latency: float | None) -> None:
    rows = [*timed(4, 32, mixed=10.0), make_row(8, 32, latency_us=latency)]
    assert winner(rows) == (4, 32)


def test_a_tie_goes_to_the_incumbent_then_to_the_least_vmem_then_to_the_smaller_pair() -> None:
    rows = [
        make_row(16, 32, latency_us=10.0, vmem_used_bytes=100),
        make_row(8, 64, latency_us=10.0, vmem_used_bytes=50),
        make_row(4, 128, latency_us=10.0, vmem_used_bytes=50),
        make_row(2, 32, latency_us=11.0, vmem_used_bytes=1),
    ]
    assert winner(rows, [BlockSizes(16, 32)]) == (16, 32)
    assert winner(rows, [BlockSizes(2, 32), BlockSizes(8, 64), BlockSizes(16, 32)]) == (8, 64)
    assert winner(rows) == (4, 128)


def test_overlapping_intervals_are_a_tie_and_others_are_not() -> None:
    def measured(pages: int, us: float) -> dict[str, Any]:
        return make_row(
            pages, 32, source="measured", latency_us=us, latency_low_us=us - 0.1, latency_high_us=us + 0.1
        )

    rows = [measured(4, 10.0), measured(8, 10.15), measured(16, 10.5)]
    assert winner(rows, [BlockSizes(8, 32)]) == (8, 32)
    assert winner(rows, [BlockSizes(16, 32)]) == (4, 32)


def test_an_interval_that_reaches_below_zero_ties_with_all(tmp_path: Path) -> None:
    def measured(pages: int, us: float, low: float) -> dict[str, Any]:
        return make_row(
            pages,
            32,
            source="measured",
            latency_us=us,
            latency_low_us=low,
            latency_high_us=2 * us,
            timer="wall clock",
        )

    rows = [measured(4, 10.0, 9.0), measured(8, 100.0, -5.0), measured(16, 100.0, 99.0)]
    dataset.append(tmp_path, rows)
    assert len(dataset.read(tmp_path)) == 3
    assert winner(rows, [BlockSizes(8, 32)]) == (8, 32)
    assert winner(rows, [BlockSizes(16, 32)]) == (4, 32)


def test_measured_beats_modelled_and_newer_tools_beat_older() -> None:
    newer = schema.Tools("0.12.0", "0.12.0", "0.0.50", "def")
    rows = [
        make_row(4, 32, latency_us=1.0, minute=1),
        make_row(8, 32, latency_us=2.0, minute=2, tools=newer),
        make_row(16, 32, latency_us=3.0, minute=2, tools=newer),
    ]
    assert winner(rows) == (8, 32), "rows of two libtpus are not compared with each other"
    rows.append(make_row(2, 32, latency_us=9.0, source="measured", minute=0, tools=TOOLS))
    assert winner(rows) == (8, 32), "one that is timed alone has won against nothing"
    rows.append(make_row(1, 32, latency_us=8.0, source="measured", minute=0, tools=TOOLS))
    assert winner(rows) == (1, 32)


def test_settings_are_judged_apart() -> None:
    window = Settings(sliding_window=128)
    rows = [make_row(4, 32, latency_us=1.0), make_row(8, 32, latency_us=2.0, settings=window)]
    chosen = winners.choose(winners.scores(frame_of(rows)))
    assert len(chosen) == 2


NEWER = schema.Tools("0.12.0", "0.12.0", "0.0.50", "def")
OTHERS: dict[str, list[dict[str, Any]]] = {
    "one more workload": timed(8, 32, mixed=9.0, decode=9.0, prefill=9.0, chat=1.0),
    "fewer workloads": timed(16, 64, mixed=9.0),
    "another version": [make_row(8, 32, workload="mixed", latency_us=9.0, minute=9, tools=NEWER)],
    "another model": [make_row(8, 32, workload="mixed", latency_us=9.0, minute=9, model="m2")],
    "a single timing": [make_row(8, 32, workload="mixed", latency_us=9.0, minute=9, source="measured")],
    "more sequences": [make_row(8, 32, workload="mixed", latency_us=9.0, minute=9) | {"max_num_seqs": 4}],
}


@pytest.mark.parametrize("others", OTHERS.values(), ids=OTHERS)
def test_a_later_row_of_a_slow_pair_does_not_make_it_the_winner(others: list[dict[str, Any]]) -> None:
    rows = [
        row
        for number, pages in enumerate((4, 2, 8))
        for row in timed(pages, 32, mixed=1.0 + number, decode=1.0 + number, prefill=1.0 + number)
    ]
    assert winner(rows + others) == winner(rows) == (4, 32)
    scored = winners.scores(frame_of(rows + others))
    assert set(scored["compared"]) == {3}
    assert set(scored["workloads"]) == {3}, "nor is the winner judged by fewer workloads"


def test_newer_tools_take_over_once_the_best_of_the_older_was_tried_again() -> None:
    rows = [make_row(pages, 32, latency_us=float(pages)) for pages in (1, 2, 4, 8)]
    again = [make_row(2, 32, latency_us=1.0, minute=5, tools=NEWER)]
    again.append(make_row(8, 32, latency_us=3.0, minute=5, tools=NEWER))
    assert winner(rows + again) == (1, 32)
    assert winner([*rows, *again, make_row(1, 32, latency_us=2.0, minute=6, tools=NEWER)]) == (2, 32)
    refused = make_row(1, 32, status="vmem_oom", minute=6, tools=NEWER)
    assert winner([*rows, *again, refused]) == (2, 32), "it was tried again, and lost"
    broken = make_row(1, 32, status="crashed", minute=6, tools=NEWER)
    assert winner([*rows, *again, broken]) == (1, 32), "what the machine did is no defeat"


@pytest.mark.parametrize("status", ["timeout", "crashed"])
def test_a_later_crash_on_another_workload_does_not_drop_the_best(status: str) -> None:
    rows = [row for n in (1, 2, 4, 8) for row in timed(n, 32, mixed=float(n), decode=float(n))]
    later = [make_row(1, 32, workload="chat", status=status, minute=5)]
    later += [make_row(8, 32, workload="chat", latency_us=1.0, minute=5)]
    assert winner(rows + later) == (1, 32), "one other was tried there"
    later += [make_row(n, 32, workload="chat", latency_us=float(n), minute=5) for n in (2, 4)]
    assert winner(rows + later) == (2, 32), "all others were, and only it failed"


def test_a_workload_that_fails_for_all_drops_none() -> None:
    rows = [row for n in (1, 2, 4) for row in timed(n, 32, mixed=float(n))]
    rows += [make_row(n, 32, workload="chat", status="timeout") for n in (1, 2, 4)]
    assert winner(rows) == (1, 32)


def test_a_narrower_comparison_decides_only_with_all_that_were_near_the_best() -> None:
    """Five candidates within a few percent: a later workload on which one or two of them were tried."""
    us = {1: 1.00, 2: 1.01, 4: 1.03, 8: 1.04, 16: 2.0}
    rows = [row for n, value in us.items() for row in timed(n, 32, mixed=value)]
    both = rows + timed(1, 32, chat=9.0) + timed(2, 32, chat=1.0)
    assert winner(both) == (1, 32)
    scored = winners.scores(frame_of(both))
    assert set(scored["compared"]) == {5}
    all_near = both + timed(4, 32, chat=9.0) + timed(8, 32, chat=9.0)
    assert winner(all_near) == (2, 32), "all near the best were tried on it"
    newer = [
        make_row(n, 32, workload="mixed", latency_us=u, minute=9, tools=NEWER) for n, u in ((1, 2), (2, 1))
    ]
    assert winner(rows + newer) == (1, 32)


def test_many_sets_of_workloads_do_not_hide_the_widest() -> None:
    """Every pair lacks two of eight workloads, all others their own two: more sets than can be listed."""
    names = ["w" * (1 + n) for n in range(8)]
    lacking = list(itertools.combinations(names, 2))
    rows = [
        make_row(1 + n, 32, workload=name, latency_us=1.0 + 0.001 * n)
        for n, without in enumerate(lacking)
        for name in names
        if name not in without
    ]
    rows += [make_row(64, 64, workload=name, latency_us=0.999) for name in names]
    most = len(lacking) - len([pair for pair in lacking if names[0] in pair]) + 1
    scored = winners.scores(frame_of(rows))
    assert scored["compared"].iloc[0] == most
    assert winner(rows) == (64, 64)


def test_a_clock_has_the_last_word_on_what_it_compared() -> None:
    rows = [make_row(pages, 32, latency_us=float(pages)) for pages in (1, 2, 4, 8)]
    clock = [make_row(pages, 32, latency_us=float(us), source="measured") for pages, us in ((8, 5), (4, 6))]
    assert winner(rows + clock) == (8, 32)
    wrong = make_row(4, 32, status="wrong_result", source="measured")
    assert winner([*rows, clock[0], wrong]) == (8, 32), "two were tried, and one of them lost"
    best = make_row(1, 32, status="wrong_result", source="measured")
    assert winner([*rows, best]) == (2, 32), "what gives a wrong result does not win by a prediction"


def test_what_was_passed_over_is_counted_by_why() -> None:
    rows = [make_row(pages, 32, latency_us=float(pages), source="measured") for pages in (1, 2, 4)]
    rows += [make_row(8, 32, source="measured", timer="wall clock")]
    rows += [make_row(16, 32, source="measured", status="crashed")]
    rows += [make_row(1, 64, source="measured", tools=NEWER)]
    rows += [make_row(2, 64, source="measured", workload="chat")]
    rows += [make_row(4, 64), make_row(4, 32), make_row(8, 64, source="interpreted")]
    [line] = winners.choose(winners.scores(frame_of(rows))).to_dict("records")
    assert {
        name: line[name] for name in ("compared", "candidates", "of_workloads", *winners.PASSED_OVER)
    } == {
        "compared": 3,
        "candidates": 8,
        "of_workloads": 2,
        "failed": 1,
        "other_workloads": 1,
        "other_clock": 1,
        "other_version": 1,
        "other_source": 1,
    }


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_the_best_of_the_widest_comparison_is_never_passed_over(data: st.DataObject) -> None:
    """Against a plain search through every set of workloads of one run."""
    lists = st.lists(st.sampled_from(["a", "bb", "ccc"]), unique=True, min_size=1)
    held = {pages: data.draw(lists) for pages in (1, 2, 4, 8)}
    us = {(pages, w): data.draw(st.floats(1.0, 9.0)) for pages, names in held.items() for w in names}
    rows = [make_row(pages, 32, workload=w, latency_us=value) for (pages, w), value in us.items()]
    sets = [set(s) for n in (1, 2, 3) for s in itertools.combinations(["a", "bb", "ccc"], n)]
    among = {tuple(sorted(s)): [p for p in held if s <= set(held[p])] for s in sets}
    widest = max(among, key=lambda s: (len(among[s]), len(s)))
    scored = winners.scores(frame_of(rows))
    assert scored["compared"].iloc[0] <= len(among[widest])
    ties = [s for s in among if (len(among[s]), len(s)) == (len(among[widest]), len(widest))]
    means = [min(among[s], key=lambda p: sum(math.log(us[p, w]) for w in s)) for s in ties]
    assert set(means) & set(scored["num_kv_pages_per_blk"])


rows_strategy = st.lists(
    st.tuples(
        st.sampled_from([1, 2, 4, 8]),
        st.sampled_from([32, 64]),
        st.sampled_from(["mixed", "decode"]),
        st.sampled_from([1.0, 1.5, 2.0]),
    ),
    min_size=1,
    max_size=16,
    unique_by=lambda t: t[:3],
)


@given(rows_strategy, st.randoms())
@settings(max_examples=60, deadline=None)
def test_the_order_of_rows_does_not_matter(drawn: list[tuple[int, int, str, float]], random: Any) -> None:
    rows = [make_row(p, q, workload=w, latency_us=us) for p, q, w, us in drawn]
    shuffled = rows.copy()
    random.shuffle(shuffled)
    first, second = (winners.choose(winners.scores(frame_of(r))) for r in (rows, shuffled))
    assert blocks_of(first) == blocks_of(second)


def test_nothing_ok_is_no_winner_and_no_error(tmp_path: Path) -> None:
    dataset.append(tmp_path, [make_row(status="vmem_oom", needed_bytes=2, limit_bytes=1)])
    scored = winners.scores(dataset.read(tmp_path, winners.READ_COLUMNS))
    assert winners.choose(scored).empty
