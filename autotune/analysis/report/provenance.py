"""Where a report's rows come from: files, versions, hosts, devices, times, and how many of each kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from autotune.io.folders import Folder
from autotune.results import dataset, schema
from autotune.results.rows import rows_of
from autotune.tpu.generations import MIB

if TYPE_CHECKING:
    import pandas as pd

# In the order they are shown: (column, what it is called).
_VALUES = (
    ("device_kind", "device kinds"),
    ("jax", "jax"),
    ("jaxlib", "jaxlib"),
    ("libtpu", "libtpu"),
    ("kernel_fingerprint", "fingerprint of the kernel's source"),
    ("autotune", "autotune"),
    ("model", "cost model"),
    ("timer", "timers"),
    ("host", "hosts"),
)
MAX_FILES = 200  # of a folder that are named; a long sweep leaves thousands


class Source(NamedTuple):
    """A folder: names of its first files, and how many files there are."""

    folder: str
    names: list[str]
    files: int


class Provenance(NamedTuple):
    """facts: (what, its values as text). counts: rows by source and status. first, last: ISO times, UTC."""

    sources: list[Source]
    facts: list[tuple[str, list[str]]]
    counts: dict[str, dict[str, int]]
    first: str
    last: str


def of(frame: pd.DataFrame, folders: Sequence[Folder]) -> Provenance:
    """That of the rows of some folders; there is at least one row."""
    facts = [(name, sorted(map(str, frame[column].dropna().unique()))) for column, name in _VALUES]
    limits = [
        "the compiler's own" if limit is None else f"{limit / MIB:g} MiB"
        for limit in sorted(
            {row["vmem_limit_bytes"] for row in rows_of(frame[["vmem_limit_bytes"]].drop_duplicates())},
            key=lambda limit: limit or 0,
        )
    ]
    facts.insert(1, ("VMEM limit", limits))
    counts: dict[str, dict[str, int]] = {}
    for source in schema.SOURCES:
        statuses = frame.loc[frame["source"] == source, "status"].value_counts()
        if len(statuses):
            counts[source] = {str(status): int(count) for status, count in statuses.items()}
    sources = []
    for folder in dict.fromkeys(folders):
        names = dataset.names(folder)
        sources.append(Source(str(folder), names[:MAX_FILES], len(names)))
    return Provenance(
        sources,
        [(name, values) for name, values in facts if values],
        counts,
        f"{frame['time'].min():%Y-%m-%d %H:%M:%S}",
        f"{frame['time'].max():%Y-%m-%d %H:%M:%S}",
    )
