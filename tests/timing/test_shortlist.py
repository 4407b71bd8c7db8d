"""Which candidates are timed, and when the clock asks for more."""

from __future__ import annotations

import pytest

from autotune.kernel.problem import BlockSizes
from autotune.timing.shortlist import Shortlist, agreement, geometric_mean
from autotune.timing.statistics import Median

RANKING = tuple(BlockSizes(p, q) for p in (4, 8, 16, 32) for q in (32, 64, 128, 256))


def exact(*values: float) -> dict[BlockSizes, Median]:
    """Latencies of the ranking's first, known to 1%."""
    return {b: Median(v * 0.99, v, v * 1.01) for b, v in zip(RANKING, values, strict=False)}


def test_first_are_the_predicted_best_and_todays_values() -> None:
    unranked = BlockSizes(128, 32)  # today's value, which the model gave no chance
    shortlist = Shortlist(RANKING, (RANKING[9], RANKING[1], unranked))
    assert shortlist.first() == [*RANKING[:4], RANKING[9], unranked]
    assert Shortlist(RANKING, top=2).first() == list(RANKING[:2])
    assert Shortlist(RANKING * 1, exhaustive=True, top=2).first() == list(RANKING)
    assert len(Shortlist(tuple(BlockSizes(p, 32) for p in range(1, 41))).first()) == 10


def test_not_wider_while_the_clock_agrees() -> None:
    shortlist = Shortlist(RANKING)
    timed = exact(100, 110, 120, 130)
    assert shortlist.trusted(timed)
    assert shortlist.wider(timed, timed) == []
    # One swap among four neighbours is no disagreement.
    assert shortlist.wider(timed, exact(110, 100, 120, 130)) == []


def test_not_wider_for_differences_that_are_noise() -> None:
    noisy = {b: Median(80, m.median, 140) for b, m in exact(130, 120, 110, 100).items()}
    assert Shortlist(RANKING).wider(noisy, noisy) == []


def test_wider_when_the_last_is_the_fastest() -> None:
    timed = exact(120, 130, 140, 100)
    assert Shortlist(RANKING).wider(timed, timed) == list(RANKING[4:6])


def test_wider_when_the_order_is_wrong() -> None:
    timed = exact(100, 140, 130, 120)  # the first is the fastest, and nothing else is right
    assert agreement(RANKING[:4], timed) == 0.5
    assert Shortlist(RANKING).wider(timed, timed) == list(RANKING[4:6])


def test_wider_when_all_failed_and_never_past_the_end() -> None:
    shortlist = Shortlist(RANKING[:6])
    assert shortlist.wider(RANKING[:4], {}) == [RANKING[4], RANKING[5]]
    assert shortlist.wider(RANKING[:6], {}) == []
    assert Shortlist(RANKING[:6], widens=False).wider(RANKING[:4], {}) == []


def test_geometric_mean() -> None:
    assert geometric_mean([Median(1, 2, 4), Median(4, 8, 16)]) == pytest.approx((2, 4, 8))
    assert geometric_mean([Median(-1, 2, 4)]).low == pytest.approx(1e-12)
    with pytest.raises(ValueError, match="positive"):
        geometric_mean([Median(-2, -1, 4)])
