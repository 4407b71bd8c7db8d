"""Winners to a Python table that people commit."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from autotune import gather, merge, results, unfinished, winners
from autotune.errors import UsageError
from autotune.folders import Folder
from autotune.incumbents import incumbents_of, uncompared
from autotune.kernel import rpa
from autotune.kernel.problem import BlockSizes, TableKey
from autotune.merge import Merged, Tables, tables_of
from autotune.tables import jax_module
from autotune.tables import source as source_module
from autotune.tables.convert import convert
from autotune.tables.dialects import JAX, Dialect
from autotune.tables.table import Table
from autotune.terminal import counted
from autotune.tpu.chips import GENERATIONS, MIB
from autotune.unfinished import Begun

if TYPE_CHECKING:
    import pandas as pd

_TITLE = "Tuned block sizes for ragged paged attention on TPU. Written by tpu-autotune."


@dataclasses.dataclass(frozen=True)
class Emitted:
    """A file's text, its rows, and what a conversion did to them (None without one)."""

    text: str
    rows: int
    conversion: str | None


@dataclasses.dataclass(frozen=True)
class Winners:
    """Winning lines of a results folder, and the table that they make with the one that they go into.

    lines: as `winners.choose` gives them. merged: None without a base. unfinished: sweeps into the folder
    that have not come to their end. uncompared: see `incumbents.uncompared`; none with a base, whose merge
    tells.
    """

    lines: pd.DataFrame
    base: Table | None = None
    merged: Merged | None = None
    unfinished: Sequence[Begun] = ()
    uncompared: Sequence[BlockSizes] = ()

    @property
    def tables(self) -> Tables:
        """Values by generation and key."""
        return self.merged.tables if self.merged else tables_of(self.lines)


def winning_lines(folder: Folder, target: str | None = None) -> pd.DataFrame:
    """The winner of each entry in a results folder, today's look-up being the incumbent of ties.

    Raises:
      UsageError: the folder cannot be read, or holds no candidate that is ok.
    """
    return read(folder, target=target).lines


def read(
    folder: Folder, *, target: str | None = None, base: Table | None = None, min_gain: float = 0.0
) -> Winners:
    """The winners of a results folder; ties go to the base's value, then to what JAX answers today.

    target: only this generation's. base, min_gain: a table to merge them into, see `merge`.

    Raises:
      UsageError: the folder cannot be read, or holds no candidate that is ok; the base is of another dialect.
    """
    frame = results.read(folder, winners.READ_COLUMNS)
    if interpreted := int((frame["source"] == results.INTERPRETED).sum()):
        raise UsageError(
            f"results folder {str(folder)!r} holds {interpreted} interpreted rows, which show that the "
            "kernel is right, not how fast it is: no table is made of such a folder; sweep into another one, "
            "on a TPU, or for a --target without one"
        )
    begun = unfinished.read(folder, target)
    held = set(frame["target"])
    if target is not None:
        frame = frame[frame["target"] == target].reset_index(drop=True)
    if frame.empty:
        raise UsageError(gather.nothing([folder], target, held))
    scored = winners.scores(frame)
    if scored.empty:
        of = f" for {target}" if target else ""
        raise UsageError(
            f"results folder {str(folder)!r} has {counted(len(frame), 'row')}{of} and no candidate that is "
            f"ok: nothing can win; `autotune show {folder}` says what failed"
        )
    today = incumbents_of(scored)
    if base is None:
        lines = winners.choose(scored, today)
        return Winners(lines, unfinished=begun, uncompared=uncompared(frame, scored, lines))
    lines = winners.choose(scored, merge.incumbents(base, today))
    return Winners(lines, base, merge.merge(frame, scored, lines, base, min_gain), begun)


def emit(
    won: Winners | pd.DataFrame,
    *,
    allow_modelled: bool,
    dialect: Dialect = JAX,
    names: str = "autotune",
) -> Emitted:
    """A table file; the same text for the same values.

    dialect: jax, or another to convert to. names: of the devices in the jax dialect: 'autotune' for a module
    that stands in for JAX's and tells all generations apart, 'jax' for a patch to JAX's own table.

    Raises:
      UsageError: the rows are not measured and that is not allowed, are interpreted, or hold more than one
        setting of the kernel's static arguments; two generations would share a name.
    """
    won = won if isinstance(won, Winners) else Winners(won)
    lines = won.lines
    require_known(lines, won.base, allow_modelled)
    sources = sorted({*lines["source"], *_kept_sources(won)})
    source = results.MODELLED if results.MODELLED in sources else ", ".join(sources)
    provenance = _provenance(lines, won, source)
    if dialect is not JAX:
        stated = {
            "source": source,
            "tuned_for": "JAX's ragged paged attention kernel, which is not this stack's",
            **{f"note_{i}": line for i, line in enumerate(provenance, 1)},
        }
        converted = convert(won.tables, dialect, stated)
        return Emitted(source_module.render(converted.table, _TITLE), len(converted.table), str(converted))
    if names == "jax":
        stated = {"source": source, **{f"note_{i}": line for i, line in enumerate(provenance, 1)}}
        table = _under_jaxs_names(won, stated)
        return Emitted(source_module.render(table, _TITLE), len(table), None)
    count = sum(map(len, won.tables.values()))
    limit = results.rows_of(lines[results.SETTING_COLUMNS].head(1))[0]["vmem_limit_bytes"]
    return Emitted(jax_module.render(won.tables, source, provenance, limit), count, None)


def require_known(lines: pd.DataFrame, base: Table | None, allow_modelled: bool) -> None:
    """Refuse what no table may hold."""
    sources = set(lines["source"])
    if results.INTERPRETED in sources:
        raise UsageError(
            "some winners come from interpreted rows, which show that the kernel is right, not how fast "
            "it is: sweep on a TPU, or for a --target without one"
        )
    if results.MODELLED in sources and not allow_modelled:
        count = int((lines["source"] == results.MODELLED).sum())
        raise UsageError(
            f"{count} of {len(lines)} winners are modelled, from the compiler's schedule and not timed on a "
            "TPU: add --allow-modelled to emit them, and the table will say so"
        )
    if base is not None and base.modelled and not allow_modelled:
        raise UsageError(
            f"the values of --base {base.origin} are modelled: add --allow-modelled to keep them, and the "
            "table will say so"
        )
    settings = lines[results.SETTING_COLUMNS].drop_duplicates()
    if len(settings) > 1:
        kinds = "; ".join(settings_text(row) for row in results.rows_of(settings))
        raise UsageError(
            f"the rows hold {len(settings)} settings of the kernel's static arguments ({kinds}), and a table "
            "holds one: keep each in a results folder of its own"
        )


def _kept_sources(won: Winners) -> set[str]:
    """Where the values that a base keeps come from."""
    if won.base is None or won.merged is None:
        return set()
    kept = won.merged.kept + won.merged.untold + won.merged.untouched
    return {str(won.base.provenance.get("source", "unknown"))} if kept else set()


def _under_jaxs_names(won: Winners, provenance: dict[str, Any]) -> Table:
    """The table under the names that the installed JAX's own look-up asks for.

    Devices of a base keep their names, and those that were not re-tuned their rows.
    """
    devices: dict[str, dict[TableKey, BlockSizes]] = {}
    owners: dict[str, str] = {}
    tuned = set(won.lines["target"])
    for generation in sorted(tuned):
        name = rpa.jax_device_name(GENERATIONS[generation].device_kinds[0])
        if name in owners:
            raise UsageError(
                f"{owners[name]} and {generation} are both {name!r} in JAX's table: choose one with --target"
            )
        owners[name] = generation
        devices[name] = won.tables[generation]
    for name, rows in won.base.devices.items() if won.base else ():
        if name not in devices and not tuned.intersection(JAX.generations(name)):
            devices[name] = dict(rows)
    ordered = {name: dict(sorted(devices[name].items())) for name in sorted(devices)}
    return Table(dialect=JAX, devices=ordered, provenance=provenance)


def _provenance(lines: pd.DataFrame, won: Winners, source: str) -> list[str]:
    """What a reviewer asks of a table; of finished sweeps, nothing in it depends on when or where."""
    settings = results.rows_of(lines[results.SETTING_COLUMNS].head(1))[0]
    text = []
    modelled = int((lines["source"] == results.MODELLED).sum())
    if modelled:
        models = ", ".join(sorted(lines["model"].dropna().unique()))
        text += [
            f"MODELLED: {modelled} of {len(lines)} values come from the compiler's schedule and a cost model",
            f"({models}). They were not timed on a TPU.",
        ]
    elif source == results.MEASURED:
        text.append("MEASURED: every value was timed on a TPU.")
    if won.base is not None:
        text += [
            f"merged into {won.base.origin} ({won.base.provenance.get('source', 'of unknown source')}):",
            *textwrap.wrap(str(won.merged), 96),
        ]
    for sweep in won.unfinished:
        text += textwrap.wrap(f"UNFINISHED: {sweep}: values may change.", 96)
    counts = sorted(lines["target"].value_counts().items())
    text += [
        f"keys: {', '.join(f'{count} {target}' for target, count in counts)}",
        f"settings: {settings_text(settings)}",
    ]
    for column in ("jax", "jaxlib", "libtpu", "kernel_fingerprint"):
        values = ", ".join(sorted(lines[column].dropna().unique())) or "not installed"
        text.append(f"{column.replace('_', ' ')}: {values}")
    newest = lines["time"].max()
    text.append(f"newest row: {newest:%Y-%m-%d %H:%M:%S} UTC")
    return text


def settings_text(settings: dict[str, object]) -> str:
    """The static arguments that were given, and the VMEM limit whether given or not."""
    limit = settings["vmem_limit_bytes"]
    parts = [
        f"{name}={value:g}"
        for name, value in settings.items()
        if isinstance(value, int | float) and name != "vmem_limit_bytes"
    ]
    parts.append(
        f"vmem_limit_bytes={limit} ({limit / MIB:g} MiB)"
        if isinstance(limit, int)
        else "the compiler's own VMEM limit"
    )
    return ", ".join(parts)
