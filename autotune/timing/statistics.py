"""What a set of timings says: the median, how far it can be trusted, and whether more are needed.

Timings of one program are skewed and have outliers, so nothing here assumes a distribution. The interval of
the median comes from order statistics: of n independent samples, the number below the true median is binomial
with p = 1/2, whatever the samples' distribution is.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

CONFIDENCE = 0.95
# The fewest samples whose smallest and largest hold the median with CONFIDENCE: 1 - 2 * 0.5**6 = 0.969.
FEWEST_SAMPLES = 6

T = TypeVar("T")


class Median(NamedTuple):
    """The median of samples, and an interval that holds the true median with CONFIDENCE; one unit for all."""

    low: float
    median: float
    high: float

    @property
    def precision(self) -> float:
        """Half the interval's width, relative to the median: 0.01 is 1%."""
        return (self.high - self.low) / 2 / self.median if self.median > 0 else math.inf


@functools.cache
def interval_rank(count: int, confidence: float = CONFIDENCE) -> int:
    """k, such that the k-th smallest and the k-th largest of `count` samples hold the true median.

    The largest such k, counting from 1; 0 where even the smallest and the largest sample do not suffice.
    """
    tail = 0.0  # the chance that fewer than k samples are below the median
    for k in range(1, count // 2 + 1):
        # Through logarithms: math.comb of a thousand samples is no float.
        tail += math.exp(
            math.lgamma(count + 1) - math.lgamma(k) - math.lgamma(count - k + 2) - count * math.log(2)
        )
        if 2 * tail > 1 - confidence:
            return k - 1
    return count // 2


def median(samples: Sequence[float], confidence: float = CONFIDENCE) -> Median:
    """The median with its interval; with too few samples for one, the interval is all of their range.

    Raises:
      ValueError: there is no sample.
    """
    if not samples:
        raise ValueError("no sample to take a median of")
    ordered = sorted(samples)
    count = len(ordered)
    middle = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    rank = max(1, interval_rank(count, confidence))
    return Median(ordered[rank - 1], middle, ordered[-rank])


class StoppingRule(NamedTuple):
    """When a candidate's timing is done.

    precision: half the interval's width over the median that is good enough. max_seconds: of timing one
    candidate on one workload, after which what there is counts, once there is an interval, or after five
    times as long. max_samples: enough whatever their interval; more would only tell how the device drifts.
    """

    precision: float = 0.01
    max_seconds: float = 10.0
    max_samples: int = 1000

    def precise(self, samples: Sequence[float]) -> bool:
        """Whether the samples say enough; asking after every round makes the interval a bit optimistic."""
        return len(samples) >= FEWEST_SAMPLES and median(samples).precision <= self.precision

    def done(self, samples: Sequence[float], seconds: float) -> bool:
        """seconds: spent on these samples so far."""
        if len(samples) < FEWEST_SAMPLES:
            return len(samples) > 0 and seconds >= 5 * self.max_seconds
        return seconds >= self.max_seconds or len(samples) >= self.max_samples or self.precise(samples)


def interleaved(items: Iterable[T], repeats: int, rng: random.Random) -> list[T]:
    """Every item `repeats` times, in random order, each once before any comes again.

    Whatever drifts while they run (clock, temperature, other users of the host) then hits all alike.
    """
    order: list[T] = []
    for _ in range(repeats):
        turn = list(items)
        rng.shuffle(turn)
        order += turn
    return order
