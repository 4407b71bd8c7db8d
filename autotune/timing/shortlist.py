"""Which candidates of a key are worth a TPU's time: the predicted best, today's values, and when to go on."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from autotune.kernel.problem import BlockSizes
from autotune.timing.statistics import Median

# The cost model has the published winner among its first three for 97% of the reachable keys of JAX's tables,
# of twelve candidates each (docs/model.md): a quarter of them, and one more to see whether the order holds.
LEAST_TOP = 4
TOP_SHARE = 0.25

# The predicted order is believed while at least this share of the pairs that the clock can tell apart is in
# it, and the fastest is not among the last third of those that were timed.
LEAST_AGREEMENT = 0.7

_NOTHING = 1e-12  # seconds


@dataclasses.dataclass(frozen=True)
class Shortlist:
    """The candidates of a key that compile, and how many of them to time.

    ranking: by predicted latency, the fastest first. always: timed whatever the prediction says, or without
    one: the values that a look-up gives today. top: how many of the ranking to time at first; None for the
    default; all of them if exhaustive. widens: whether more are timed where the clock disagrees.
    """

    ranking: tuple[BlockSizes, ...]
    always: tuple[BlockSizes, ...] = ()
    top: int | None = None
    exhaustive: bool = False
    widens: bool = True

    def first(self) -> list[BlockSizes]:
        """The candidates to time at first, in the order in which to compile them."""
        return list(dict.fromkeys([*self.ranking[: self._top()], *self.always]))

    def _top(self) -> int:
        if self.exhaustive:
            return len(self.ranking)
        if self.top is not None:
            return self.top
        return max(LEAST_TOP, math.ceil(TOP_SHARE * len(self.ranking)))

    def wider(self, tried: Iterable[BlockSizes], timed: Mapping[BlockSizes, Median]) -> list[BlockSizes]:
        """Further candidates to time; none while the clock agrees with the prediction.

        tried: all that were timed or failed. timed: the latencies of those that have one.
        """
        tried = set(tried)
        rest = [blocks for blocks in self.ranking if blocks not in tried]
        if not self.widens or not rest or self.trusted(timed):
            return []
        return rest[: max(LEAST_TOP, self._top()) // 2]

    def trusted(self, timed: Mapping[BlockSizes, Median]) -> bool:
        """Whether the timed order bears the predicted one out."""
        order = [blocks for blocks in self.ranking if blocks in timed]
        if not order:
            return False  # all of the predicted best failed
        best = min(order, key=lambda blocks: timed[blocks].median)
        in_last_third = order.index(best) >= math.ceil(len(order) * 2 / 3)
        # The last of very few says nothing, and one that ties with the first is no surprise.
        if in_last_third and len(order) > 2 and timed[best].high < timed[order[0]].low:
            return False
        return agreement(order, timed) >= LEAST_AGREEMENT


def agreement(order: Sequence[BlockSizes], timed: Mapping[BlockSizes, Median]) -> float:
    """Of the pairs whose intervals do not overlap, the share that is in the given order; 1.0 if none is."""
    right = wrong = 0
    for i, first in enumerate(order):
        for second in order[i + 1 :]:
            right += timed[first].high < timed[second].low
            wrong += timed[second].high < timed[first].low
    return right / (right + wrong) if right + wrong else 1.0


def geometric_mean(medians: Sequence[Median]) -> Median:
    """One latency over a key's workloads, to compare candidates by.

    Raises:
      ValueError: a median is not positive. An end of an interval may be: it counts as next to nothing.
    """
    if not medians or min(m.median for m in medians) <= 0:
        raise ValueError("only positive latencies have a geometric mean")
    return Median(
        *(
            statistics.geometric_mean(max(value, _NOTHING) for value in values)
            for values in zip(*medians, strict=True)
        )
    )
