"""Rows of the versions that decide a key: what another compiler refused, this one may take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from autotune.results.codes import codes
from autotune.results.rows import rows_of
from autotune.results.schema import TOOL_COLUMNS
from autotune.results.winners import ENTRY, TOOLS

if TYPE_CHECKING:
    import pandas as pd


def deciding(frame: pd.DataFrame, scored: pd.DataFrame) -> pd.DataFrame:
    """The rows, ok or not, that were made by the versions whose rows decide their entry of `winners.ENTRY`.

    Where nothing is ok those of the newest row decide. Sources are no versions: of a timed winner, what the
    compiler of the same version refused is there too.

    scored: what `winners.scores` makes of frame.
    """
    if frame.empty:
        return frame
    _, first, version = np.unique(codes(frame, [*ENTRY, *TOOLS]), return_index=True, return_inverse=True)
    newest = np.full(len(first), np.iinfo(np.int64).min)
    np.maximum.at(newest, version, frame["time"].to_numpy("datetime64[us]").view(np.int64))
    versions = rows_of(frame.iloc[first][[*ENTRY, *TOOLS]])
    decides = {_entry(versions[number]): versions[number] for number in np.argsort(newest)}
    _, one = np.unique(codes(scored, ENTRY), return_index=True)
    decides |= {_entry(row): row for row in rows_of(scored.iloc[one][[*ENTRY, *TOOLS]])}
    same = np.array([_same(row, decides[_entry(row)]) for row in versions])
    return frame[same[version]]


def _entry(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ENTRY)


def _same(row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two rows are of the same versions; a row without a model goes with that of any model."""
    models = {row["model"], other["model"]} - {None}
    return len(models) < 2 and all(row[name] == other[name] for name in ("max_num_seqs", *TOOL_COLUMNS))
