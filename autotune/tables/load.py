"""A table from what a user names: a file, the installed jax, a generation, or a results folder."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from importlib.metadata import version
from pathlib import Path

from autotune.errors import MachineError, UsageError
from autotune.io import folders
from autotune.io.folders import Folder
from autotune.kernel.problem import BlockSizes, TableKey
from autotune.tables import lookups
from autotune.tables.dialects import JAX
from autotune.tables.source import read_file
from autotune.tables.table import Table
from autotune.tpu.generations import GENERATIONS

_PUBLISHED = "experimental/pallas/ops/tpu/ragged_paged_attention/tuned_block_sizes.py"
COMMITTED = Path(__file__).parent


def load(name: str | os.PathLike[str], lookup: str | None = None) -> Table:
    """The table that a name stands for.

    lookup: the name of the look-up that asks for its keys, see `rules`; by default its own, where that is
    known.

    name: `jax` for the installed JAX's own; a generation (`v6e`) for the committed one; a path of a Python
    file in the jax, tpu-inference or sglang-jax dialect; a results folder, for its winners. `:DEVICE` after
    it picks one device name or generation: `jax:TPU v6`, `tuned.py:v5e`. A Path is a file or a results
    folder, whatever it is called.

    Raises:
      TypeError: name is neither text nor a path.
      UsageError: nothing is known by this name, the file is no table, or there is no such look-up of its
        dialect; one line.
    """
    if not isinstance(name, str | os.PathLike):
        raise TypeError(f"a table is named by a string or a path, not by {name!r}")
    table = _named(name) if isinstance(name, str) else _of_path(Path(name))
    if table is None:
        raise UsageError(f"table {str(name)!r} does not exist: use the path of a table or a results folder")
    if lookup is not None:
        table = dataclasses.replace(table, rule=lookups.by_name(lookup, table.dialect))
    return table


def _named(name: str) -> Table:
    table = _whole(name)
    if table is None:
        before, colon, device = name.rpartition(":")
        if colon and before and (table := _whole(before)) is not None:
            return table.only(device)
        raise UsageError(
            f"table {name!r} does not exist: use a table's path, a results folder, jax, jax:DEVICE "
            f"or one of {', '.join(GENERATIONS)}"
        )
    return table


def _whole(name: str) -> Table | None:
    """The table of this very name, without a device after it; None if there is no such thing."""
    if name == "jax":
        return published()
    if name in GENERATIONS:
        return committed(name)
    if "://" in name:
        return _in_bucket(name)
    return _of_path(Path(name))


def _of_path(path: Path) -> Table | None:
    """The table in a file or results folder; None if there is no such thing."""
    try:
        if path.is_dir():
            return from_results(path)
        if not path.exists():
            return None
        if not path.is_file():  # a pipe or a device would be waited for
            raise UsageError(f"table {str(path)!r} is neither a file nor a folder")
    except (OSError, ValueError):  # a name that no file system takes
        return None
    return read_file(path)


def _in_bucket(name: str) -> Table | None:
    """The winners of a results folder in a bucket; None if the name ends with `:DEVICE`."""
    if name.rpartition(":")[2] in (*GENERATIONS, *JAX.written.values()):
        return None
    return from_results(folders.parse(name))


def published() -> Table:
    """The installed JAX's own table, read from its source without importing jax.

    Raises:
      MachineError: jax is not installed, or has no such kernel.
    """
    spec = importlib.util.find_spec("jax")
    path = Path(spec.origin).parent / _PUBLISHED if spec and spec.origin else None
    if path is None or not path.is_file():
        raise MachineError(
            "the installed jax has no ragged paged attention table: type `pip install --upgrade "
            "'jax[tpu]>=0.10'`; "
            "`autotune doctor` says more"
        )
    table = read_file(path)
    return dataclasses.replace(table, origin="jax", provenance={"source": "published", "jax": version("jax")})


def committed_path(generation: str) -> Path:
    """Where a generation's committed table is, if there is one."""
    return COMMITTED / f"tpu_{generation}.py"


def committed(generation: str) -> Table:
    """The table of a generation that comes with this package.

    Raises:
      UsageError: there is none.
    """
    path = committed_path(generation)
    if not path.is_file():
        have = ", ".join(g for g in GENERATIONS if committed_path(g).is_file()) or "none yet"
        raise UsageError(
            f"no table is committed for {generation!r}: there are {have}; `make tables` makes them"
        )
    return dataclasses.replace(read_file(path), origin=generation, rule=lookups.AUTOTUNE)


def from_results(folder: Folder) -> Table:
    """The winners of a results folder as a table of the jax dialect, ties going to what JAX answers today.

    Raises:
      UsageError: the folder has no rows, no winner, or winners of several settings of the kernel.
    """
    from autotune.results import baselines, dataset, maintenance, schema, winners
    from autotune.results.rows import blocks_of, keys_of, rows_of

    frame = dataset.read(folder, winners.READ_COLUMNS)
    if frame.empty:
        raise UsageError(maintenance.nothing([folder], None))
    scored = winners.scores(frame)
    if scored.empty:
        raise UsageError(f"results folder {str(folder)!r} has no candidate that is ok, so nothing can win")
    lines = winners.choose(scored, baselines.incumbents_of(scored))
    settings = lines[schema.SETTING_COLUMNS].drop_duplicates()
    if len(settings) > 1:
        raise UsageError(
            f"results folder {str(folder)!r} has winners for {len(settings)} settings of the kernel's static "
            "arguments, and a table holds one: keep each in a folder of its own"
        )
    devices: dict[str, dict[TableKey, BlockSizes]] = {}
    for target, key, blocks in zip(lines["target"], keys_of(lines), blocks_of(lines), strict=True):
        devices.setdefault(JAX.written.get(target, target), {})[key] = blocks
    sources = sorted(set(lines["source"]))
    limit = rows_of(settings)[0]["vmem_limit_bytes"]
    return Table(
        dialect=JAX,
        devices=devices,
        origin=str(folder),
        rule=lookups.AUTOTUNE,
        provenance={"source": "modelled" if "modelled" in sources else ", ".join(sources)}
        | ({"vmem_limit_bytes": limit} if limit else {}),
    )
