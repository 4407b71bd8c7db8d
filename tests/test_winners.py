from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune import results, winners
from autotune.kernel.problem import BlockSizes, Settings
from tests.test_results import KEY, TOOLS, make_row


def frame_of(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Rows as reading them gives them, without the disk."""
    import pyarrow as pa

    table = pa.Table.from_pylist(rows, schema=results.schema())
    return table.to_pandas(types_mapper=results._nullable_types().get)


def timed(pages: int, queries: int, **latencies: float) -> list[dict[str, Any]]:
    return [make_row(pages, queries, workload=name, latency_us=us) for name, us in latencies.items()]


def winner(rows: list[dict[str, Any]], incumbents: list[BlockSizes] | None = None) -> BlockSizes:
    scored = winners.scores(frame_of(rows))
    chosen = winners.choose(scored, {("v6e", KEY): incumbents or []})
    [blocks] = winners.blocks_of(chosen)
    return blocks


def test_score_is_the_geometric_mean_of_the_ratio_to_each_workloads_best() -> None:
    rows = timed(4, 32, mixed=10.0, decode=20.0) + timed(8, 32, mixed=20.0, decode=10.0)
    rows += timed(16, 32, mixed=11.0, decode=11.0)
    scored = winners.scores(frame_of(rows))
    assert scored["score"].tolist() == pytest.approx([math.sqrt(2), math.sqrt(2), 1.1])
    assert scored["latency_us"].tolist() == pytest.approx([math.sqrt(200), math.sqrt(200), 11.0])
    assert winner(rows) == (16, 32)


@pytest.mark.parametrize("status", [s for s in results.STATUSES if s != "ok"])
def test_only_ok_on_every_workload_can_win(status: str) -> None:
    rows = timed(4, 32, mixed=10.0, decode=10.0) + timed(8, 32, mixed=1.0)
    assert winner([*rows, make_row(8, 32, workload="decode", status=status)]) == (4, 32)
    assert winner(rows) == (4, 32), "a workload that is not yet tried counts as little as one that failed"


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
            pages, 32, source="measured", latency_us=us, latency_low_us=low, latency_high_us=2 * us
        )

    rows = [measured(4, 10.0, 9.0), measured(8, 100.0, -5.0), measured(16, 100.0, 99.0)]
    results.append(tmp_path, rows)
    assert len(results.read(tmp_path)) == 3
    assert winner(rows, [BlockSizes(8, 32)]) == (8, 32)
    assert winner(rows, [BlockSizes(16, 32)]) == (4, 32)


def test_measured_beats_modelled_and_newer_tools_beat_older() -> None:
    newer = results.Tools("0.12.0", "0.12.0", "0.0.50", "def")
    rows = [
        make_row(4, 32, latency_us=1.0, minute=1),
        make_row(8, 32, latency_us=2.0, minute=2, tools=newer),
        make_row(16, 32, latency_us=3.0, minute=2, tools=newer),
    ]
    assert winner(rows) == (8, 32), "rows of two libtpus are not compared with each other"
    rows.append(make_row(2, 32, latency_us=9.0, source="measured", minute=0, tools=TOOLS))
    assert winner(rows) == (2, 32)


def test_settings_are_judged_apart() -> None:
    window = Settings(sliding_window=128)
    rows = [make_row(4, 32, latency_us=1.0), make_row(8, 32, latency_us=2.0, settings=window)]
    chosen = winners.choose(winners.scores(frame_of(rows)))
    assert len(chosen) == 2


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
    assert winners.blocks_of(first) == winners.blocks_of(second)


def test_nothing_ok_is_no_winner_and_no_error(tmp_path: Path) -> None:
    results.append(tmp_path, [make_row(status="vmem_oom", needed_bytes=2, limit_bytes=1)])
    scored = winners.scores(results.read(tmp_path, winners.READ_COLUMNS))
    assert winners.choose(scored).empty
