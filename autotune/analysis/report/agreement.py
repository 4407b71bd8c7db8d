"""What was predicted beside what was measured, for pairs of block sizes that have both."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from autotune.kernel.problem import BlockSizes
from autotune.results import schema, winners
from autotune.results.rows import pair_of, rows_of

if TYPE_CHECKING:
    import pandas as pd

# One candidate on one workload, whatever made its row.
_SAME = [
    *winners.ENTRY,
    "max_num_seqs",
    *schema.BLOCK_COLUMNS,
    *schema.TOOL_COLUMNS,
    "workload_fingerprint",
]


class Point(NamedTuple):
    """One pair on one workload, in microseconds; entry: a key's number."""

    entry: int
    blocks: BlockSizes
    workload: str
    predicted_us: float
    measured_us: float


class Figures(NamedTuple):
    """Of one generation.

    error: median of |predicted / measured - 1|. keys: those with two pairs or more that have both. regret:
    what the pair predicted to be the best costs by the clock above the best that was timed, geometric mean
    over these keys; None without such keys.
    """

    target: str
    points: int
    error: float
    keys: int
    regret: float | None


class Agreement(NamedTuple):
    """All points, and the figures of each generation."""

    points: list[Point]
    figures: list[Figures]


def of(frame: pd.DataFrame, numbers: Mapping[tuple[Any, ...], int]) -> Agreement:
    """Measured rows with the newest modelled row of the same candidate and workload.

    frame: rows as `results.read` gives them. numbers: of their keys, by the columns of winners.ENTRY.
    """
    ok = frame[(frame["status"] == "ok") & (frame["latency_us"] > 0)].sort_values("time", kind="stable")
    newest = {
        source: ok[ok["source"] == source].drop_duplicates(_SAME, keep="last")
        for source in (schema.MODELLED, schema.MEASURED)
    }
    both = newest[schema.MEASURED].merge(
        newest[schema.MODELLED][[*_SAME, "latency_us"]], on=_SAME, suffixes=("", "_predicted")
    )
    both = both.sort_values(_SAME, kind="stable", ignore_index=True)
    points = [
        Point(
            numbers[tuple(line[name] for name in winners.ENTRY)],
            pair_of(line),
            line["workload"],
            predicted,
            line["latency_us"],
        )
        for line, predicted in zip(rows_of(both), both["latency_us_predicted"].tolist(), strict=True)
    ]
    costs = _costs(both) if points else {}
    figures = [
        Figures(
            str(target),
            len(part),
            float((part["latency_us_predicted"] / part["latency_us"] - 1).abs().median()),
            len(costs.get(str(target), [])),
            statistics.geometric_mean(costs[str(target)]) if target in costs else None,
        )
        for target, part in both.groupby("target", sort=False)
    ]
    return Agreement(points, figures)


def _costs(both: pd.DataFrame) -> dict[str, list[float]]:
    """By generation, each key's cost, by the clock, of the pair that was predicted to be the best."""
    line = [*winners.ENTRY, *schema.BLOCK_COLUMNS]
    timed = winners.scores(both)
    no_interval = {"latency_low_us": math.nan, "latency_high_us": math.nan}
    predicted = winners.scores(both.assign(latency_us=both["latency_us_predicted"], **no_interval))
    pairs = timed.merge(predicted[[*line, "score"]], on=line, suffixes=("", "_predicted"))
    out: dict[str, list[float]] = {}
    for _, key in pairs.groupby(winners.ENTRY, dropna=False, sort=False):
        if len(key) > 1:
            taken = key.sort_values(["score_predicted", *schema.BLOCK_COLUMNS]).iloc[0]
            out.setdefault(str(taken["target"]), []).append(float(taken["score"] / key["score"].min()))
    return out
