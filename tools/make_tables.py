"""Rows of a sweep into a generation's committed table: `python tools/make_tables.py FOLDER GENERATION`.

Writes autotune/tables/tpu_GENERATION.py, data and provenance only, and the rows behind it as one parquet file
under autotune/tables/rows/GENERATION, without the host that made them.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune import emit
from autotune.errors import AutotuneError, UsageError
from autotune.io.files import whole
from autotune.keys import presets
from autotune.model.calibrate import current
from autotune.results import dataset, schema, winners
from autotune.results.rows import keys_of, rows_of
from autotune.results.scores import COMMITTED_ROWS
from autotune.tables import lookups
from autotune.tables.dialects import JAX
from autotune.tables.load import committed_path
from autotune.tables.source import render
from autotune.tables.table import Table
from autotune.tpu import generations

if TYPE_CHECKING:
    import pandas as pd

    from autotune.kernel.problem import TableKey

PRESETS = ("published", "serving", "long")


def keys() -> list[TableKey]:
    """The keys of the committed tables, sorted."""
    return sorted({key for preset in PRESETS for key in presets.keys(preset)})


def table_of(folder: Path, generation: str) -> tuple[Table, list[TableKey]]:
    """The committed table that a folder's rows make, and the keys of the presets without a winner: nothing
    can win, or the sweep of that preset is not done.

    Raises:
      UsageError: the folder cannot be read or has no winner, the rows are of several settings, or of the
        published keys some have no row at all.
    """
    won = emit.read(folder, target=generation)
    lines = won.lines
    emit.require_known(lines, None, allow_modelled=True)
    wanted = keys()
    frame = dataset.read(folder, winners.READ_COLUMNS)
    tried = set(keys_of(frame[frame["target"] == generation]))
    published = presets.keys(PRESETS[0])
    missing = [key for key in published if key not in tried]
    if missing:
        raise UsageError(
            f"{len(missing)} of {len(published)} published keys have no row for {generation} in "
            f"{str(folder)!r}, such as {tuple(missing[0])}: the sweep is not done"
        )
    rows = won.tables[generation]
    device = JAX.written[generation]
    held = {key: rows[key] for key in wanted if key in rows}
    table = Table(dialect=JAX, devices={device: held}, provenance=_provenance(lines, frame, held))
    return table, [key for key in wanted if key not in rows]


def _provenance(lines: pd.DataFrame, frame: pd.DataFrame, held: Collection[TableKey]) -> dict[str, Any]:
    """What the module says of its values: versions, limit, workloads; nothing of when or where."""

    def every(column: str) -> str:
        return ", ".join(sorted(lines[column].dropna().unique())) or "none"

    settings = rows_of(lines[schema.SETTING_COLUMNS].head(1))[0]
    return {
        "source": every("source"),
        "keys": len(held),
        "keys_from": f"every canonical key that a key of jax {every('jax')}'s own table stands for",
        **_served(held),
        "lookup": lookups.AUTOTUNE.name,
        "model": every("model"),
        "workloads": ", ".join(sorted(frame["workload"].unique())),
        **{name: value for name, value in settings.items() if value is not None},
        **{name: every(name) for name in schema.TOOL_COLUMNS},
    }


def _served(held: Collection[TableKey]) -> dict[str, Any]:
    """What there is of the keys of calls as they are served."""
    beyond = set(held).difference(presets.keys(PRESETS[0]))
    if not beyond:
        return {}
    tokens, lengths = ({key[at] for key in beyond} for at in (6, 7))
    most = max(key.num_kv_heads_per_blk for key in beyond)
    return {
        "and_from": f"layouts of up to {most} KV heads at {min(tokens)} to {max(tokens)} tokens, lengths of "
        f"{min(lengths)} to {max(lengths)}"
    }


def write_rows(folder: Path, generation: str, to: Path) -> int:
    """The generation's rows as one file in a folder, sorted, without their host; how many there are.

    Rows of an earlier cost model stay out: no table is made of them.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    frame = dataset.read(folder)
    version = current(generations.by_name(generation)).version
    rows = rows_of(frame[(frame["target"] == generation) & (frame["model"] == version)])
    table = pa.Table.from_pylist([{**row, "host": None} for row in rows], schema=schema.arrow())
    with whole(to / "rows.parquet") as file:
        pq.write_table(table, file, compression="zstd", compression_level=19)
    return len(rows)


def main(arguments: list[str]) -> int:
    """Commit one generation; 1 if some keys have nothing that can win."""
    if len(arguments) != 2:
        print("usage: python tools/make_tables.py FOLDER GENERATION", file=sys.stderr)
        return 2
    folder, generation = Path(arguments[0]), generations.by_name(arguments[1]).name
    count = write_rows(folder, generation, COMMITTED_ROWS / generation)
    table, lost = table_of(COMMITTED_ROWS / generation, generation)
    title = (
        f"Block sizes of JAX's ragged paged attention kernel for TPU {generation}. "
        f"{table.provenance['source'].upper()}: see PROVENANCE."
    )
    with whole(committed_path(generation)) as file:
        file.write(render(table, title, quote='"').encode())
    print(f"{committed_path(generation)}: {len(table)} keys, {count} rows behind them")
    if lost:
        print(f"without a winner: {len(lost)} keys, such as {tuple(lost[0])}", file=sys.stderr)
    return 1 if lost else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except AutotuneError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
