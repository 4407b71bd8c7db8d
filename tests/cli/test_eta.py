"""How long it will take: as expected at first, and then as the compiles before took."""

from __future__ import annotations

import pytest

from autotune.cli.eta import START_SECONDS, seconds_left, seconds_of


def test_before_anything_is_compiled_it_is_what_is_expected() -> None:
    assert seconds_left(0.0, 0.0, left=100.0, jobs=4) == pytest.approx(25.0 + START_SECONDS)


@pytest.mark.parametrize("slowness", [0.5, 1.0, 3.0])
def test_after_many_compiles_it_is_as_slow_as_they_were(slowness: float) -> None:
    elapsed = START_SECONDS + slowness * 10_000.0 / 2
    assert seconds_left(elapsed, 10_000.0, left=500.0, jobs=2) == pytest.approx(slowness * 250.0, rel=0.02)


def test_a_slow_first_compile_is_not_taken_for_the_rule() -> None:
    left = seconds_left(START_SECONDS + 3.0, 0.5, left=100.0, jobs=1)  # six times as long as expected
    assert left == pytest.approx(100.0, rel=0.2)


def test_overflows_that_end_soon_do_not_make_the_others_look_quick() -> None:
    """Longest first, a sweep begins with programs of ten minutes that overflow in ten seconds."""
    done = sum(seconds_of(600.0, ok=False, took=10.0) for _ in range(10))
    left = seconds_left(START_SECONDS + 100.0, done, left=300.0, jobs=1)
    assert left == pytest.approx(300.0)
    assert seconds_of(600.0, ok=True, took=10.0) == 600.0
    assert seconds_of(600.0, ok=False, took=None) == 0.0
    assert seconds_of(600.0, ok=False, took=7200.0) == 600.0
