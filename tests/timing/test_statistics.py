"""The interval of the median, and when timing stops."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.timing.statistics import (
    FEWEST_SAMPLES,
    Median,
    StoppingRule,
    interleaved,
    interval_rank,
    median,
)


@pytest.mark.parametrize(
    ("count", "rank"),
    # Textbook values of the 95% interval of the median.
    [(5, 0), (6, 1), (8, 1), (9, 2), (11, 2), (12, 3), (20, 6), (30, 10), (50, 18), (100, 40)],
)
def test_rank_is_the_textbook_one(count: int, rank: int) -> None:
    assert interval_rank(count) == rank


def test_rank_of_many_samples_is_no_overflow() -> None:
    assert interval_rank(5000) == pytest.approx(2500 - 0.98 * 5000**0.5, abs=1.5)


@pytest.mark.parametrize("draw", ["normal", "lognormal", "two modes"])
def test_interval_holds_the_true_median(draw: str) -> None:
    """In at least 95% of draws, less three standard deviations of 1,000 draws, whatever the distribution."""
    rng = random.Random(7)
    samples = {
        "normal": lambda: rng.gauss(100, 1),
        "lognormal": lambda: 100 * rng.lognormvariate(0, 0.5),
        "two modes": lambda: 100 + rng.choice((-1, 1)) * rng.expovariate(1),
    }[draw]
    for count in (6, 15, 40):
        held = 0
        for _ in range(1000):
            low, _, high = median([samples() for _ in range(count)])
            held += low <= 100 <= high
        assert held >= 1000 * 0.95 - 3 * (1000 * 0.95 * 0.05) ** 0.5


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=60))
def test_interval_is_ordered_and_made_of_samples(samples: list[float]) -> None:
    found = median(samples)
    assert min(samples) <= found.low <= found.median <= found.high <= max(samples)
    assert {found.low, found.high} <= set(samples)
    assert found == median(samples[::-1])


def test_no_sample_is_an_error() -> None:
    with pytest.raises(ValueError, match="no sample"):
        median([])


def test_precision_is_half_the_width_over_the_median() -> None:
    assert Median(98.0, 100.0, 102.0).precision == pytest.approx(0.02)
    assert Median(-1.0, 0.0, 1.0).precision == float("inf")


def test_stops_when_precise_or_out_of_time() -> None:
    rule = StoppingRule(precision=0.01, max_seconds=2.0)
    steady = [100.0] * (FEWEST_SAMPLES - 1)
    assert not rule.done(steady, 1.0)  # too few to say, however alike
    assert rule.done([*steady, 100.0], 0.0)
    noisy = [80.0, 120.0] * 10
    assert not rule.done(noisy, 1.9)
    assert rule.done(noisy, 2.0)
    assert not rule.done([], 50.0)  # no sample is never a result
    assert not rule.done([80.0, 120.0], 2.0) and rule.done([80.0, 120.0], 10.0)
    assert rule.done(noisy * 50, 0.0)  # a thousand samples say what there is to say


def test_one_percent_noise_needs_few_samples() -> None:
    rng, rule = random.Random(3), StoppingRule(precision=0.01)
    counts = []
    for _ in range(50):
        samples: list[float] = []
        while not rule.precise(samples):
            samples.append(rng.gauss(100, 1))
        counts.append(len(samples))
    assert max(counts) <= 30


def test_interleaved_gives_each_a_turn_before_any_comes_again() -> None:
    order = interleaved("abcde", 40, random.Random(1))
    turns = [order[i : i + 5] for i in range(0, 200, 5)]
    assert all(sorted(turn) == list("abcde") for turn in turns)
    firsts = Counter(turn[0] for turn in turns)
    assert len(firsts) == 5 and max(firsts.values()) < 20
    assert order == interleaved("abcde", 40, random.Random(1)) != interleaved("abcde", 40, random.Random(2))
