"""Rows to what a report shows: plain numbers and text, nothing of files or screens.

Decisions are those of `winners`, `show` and `diff`; here they are only arranged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from autotune.analysis import overview
from autotune.analysis.report import agreement, entries, provenance, regret
from autotune.errors import UsageError
from autotune.io.folders import Folder
from autotune.results import dataset, maintenance, schema, winners

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = [*winners.READ_COLUMNS, "autotune", "device_kind", "host"]


class Report(NamedTuple):
    """All that the page shows. regret: a matrix for each setting of the kernel. failing: see
    `overview.Judged`."""

    keys: entries.Gathered
    regret: list[regret.Matrix]
    agreement: agreement.Agreement
    failing: dict[str, tuple[dict[str, int], int]]
    provenance: provenance.Provenance


def build(folders: Sequence[Folder], target: str | None = None) -> Report:
    """The report of some results folders, read as one.

    target: only this generation's rows.

    Raises:
      UsageError: a folder cannot be read, or there is no row at all.
    """
    frame = _read(folders)
    held = set(frame["target"])
    if target is not None:
        frame = frame[frame["target"] == target].reset_index(drop=True)
    if frame.empty:
        raise UsageError(maintenance.nothing(folders, target, held))
    timed = frame[frame["source"] != schema.INTERPRETED].reset_index(drop=True)
    judged = overview.judge(timed)
    keys = entries.gather(frame)
    entries.decide(keys, judged.lines)
    return Report(
        keys,
        regret.matrices(timed, judged.chosen),
        agreement.of(timed, keys.numbers),
        judged.failing,
        provenance.of(frame, folders),
    )


def _read(folders: Sequence[Folder]) -> pd.DataFrame:
    import pandas as pd

    frames = [dataset.read(folder, COLUMNS) for folder in folders]
    if len(frames) == 1:
        return frames[0]
    # A folder may be named with its copy: as within one, the newest row of an identity counts.
    frame = pd.concat(frames, ignore_index=True).sort_values("time", kind="stable")
    frame = frame.drop_duplicates(schema.IDENTITY, keep="last")
    return frame.sort_values(schema.IDENTITY, kind="stable", ignore_index=True)
