"""Numbers in place of rows: what they must keep is equality and order."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.results import codes as rowcodes
from autotune.results.codes import codes

ROWS = st.lists(
    st.tuples(
        st.sampled_from(["mixed", "decode-heavy", "é", "", None]),
        st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)),
        st.one_of(st.none(), st.floats(allow_nan=False)),
    ),
    max_size=30,
)
TYPES = {"text": pa.string(), "number": pa.int64(), "real": pa.float64()}


def _table(rows: list[tuple[str | None, int | None, float | None]]) -> pa.Table:
    columns = list(zip(*rows, strict=True)) or [(), (), ()]
    return pa.table({name: pa.array(c, t) for (name, t), c in zip(TYPES.items(), columns, strict=True)})


def _sortable(row: tuple[object, ...]) -> list[tuple[bool, object]]:
    """Nulls last, and text as its bytes."""
    return [(v is None, v.encode() if isinstance(v, str) else v or 0) for v in row]


@settings(max_examples=200, deadline=None)
@given(ROWS, st.booleans(), st.integers(1, 7), st.sampled_from([2**62, 2**6]))
def test_codes_compare_as_the_rows_do(
    rows: list[tuple[str | None, int | None, float | None]], encoded: bool, pieces: int, most: int
) -> None:
    parts = [_table(rows[start : start + pieces]) for start in range(0, len(rows), pieces)]
    table = pa.concat_tables(parts) if parts else _table([])
    if encoded:
        table = table.set_column(0, "text", table["text"].dictionary_encode())
    before, rowcodes._MOST = rowcodes._MOST, most  # so that the numbers do not suffice, and are made dense
    try:
        found = codes(table, list(TYPES)).tolist()
    finally:
        rowcodes._MOST = before
    for a, left in zip(rows, found, strict=True):
        for b, right in zip(rows, found, strict=True):
            assert (left < right) == (_sortable(a) < _sortable(b))
            assert (left == right) == (_sortable(a) == _sortable(b))


def test_codes_within_others_weigh_less() -> None:
    frame = pd.DataFrame({"a": ["x", "y", "x", "y"]})
    assert np.argsort(codes(frame, ["a"], np.array([1, 0, 0, 1]))).tolist() == [2, 1, 0, 3]
