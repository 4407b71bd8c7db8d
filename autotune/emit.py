"""Winners to a Python table that people commit."""

from __future__ import annotations

import dataclasses
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from autotune.errors import AutotuneError, UsageError
from autotune.io.folders import Folder
from autotune.io.terminal import counted, typed
from autotune.kernel.jax_rpa import call
from autotune.kernel.problem import BlockSizes, TableKey
from autotune.results import dataset, maintenance, schema, unfinished, versions, winners
from autotune.results.baselines import incumbents_of, uncompared
from autotune.results.rows import keys_of, rows_of
from autotune.results.unfinished import Begun
from autotune.tables import load, merge, render
from autotune.tables import source as source_module
from autotune.tables.dialects import JAX
from autotune.tables.merge import Merged, Tables, tables_of
from autotune.tables.table import Table
from autotune.tpu.generations import GENERATIONS, MIB

if TYPE_CHECKING:
    import pandas as pd

_ROWS_TITLE = (
    "Tuned block sizes for ragged paged attention on TPU, rows to paste into the TUNED_BLOCK_SIZES of "
    "jax.experimental.pallas.ops.tpu.ragged_paged_attention.tuned_block_sizes. Written by tpu-autotune."
)


@dataclasses.dataclass(frozen=True)
class Emitted:
    """A file's text, its rows, and how many values come from where."""

    text: str
    rows: int
    sources: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Winners:
    """Winning lines of a results folder, and the table that they make with the one that they go into.

    lines: as `winners.choose` gives them. merged: None without a base. unfinished: sweeps into the folder
    that have not come to their end. uncompared: see `baselines.uncompared`; none with a base, whose merge
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

    @property
    def narrowed(self) -> str:
        """What to say of winners that not all of the rows had a say in; '' where there are none."""
        few = winners.narrowed(self.lines)
        return (
            f"{len(few)} of {counted(len(self.lines), 'winner')}: {winners.compared_text(few)}"
            if len(few)
            else ""
        )

    @property
    def base_source(self) -> str:
        """Where the values of the base come from."""
        if self.base is None:
            return "nowhere"
        return schema.MODELLED if self.base.modelled else str(self.base.provenance.get("source", "unknown"))

    def sources(self) -> dict[tuple[str, TableKey], str]:
        """Where the value of each generation's key comes from."""
        of_rows = zip(
            zip(self.lines["target"], keys_of(self.lines), strict=True),
            self.lines["source"],
            strict=True,
        )
        found = {place: source for place, source in of_rows if not self.merged or place in self.merged.taken}
        return {
            (target, key): found.get((target, key), self.base_source)
            for target, rows in self.tables.items()
            for key in rows
        }


def read(
    folder: Folder, *, target: str | None = None, base: Table | None = None, min_gain: float = 0.0
) -> Winners:
    """The winners of a results folder; ties go to the base's value, then to what JAX answers today.

    target: only this generation's. base, min_gain: a table to merge them into, see `merge`.

    Raises:
      UsageError: the folder cannot be read or holds no row; the base is of another dialect.
      AutotuneError: no candidate is ok.
    """
    frame = dataset.read(folder, [*winners.READ_COLUMNS, "host"])
    if interpreted := int((frame["source"] == schema.INTERPRETED).sum()):
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
        raise UsageError(maintenance.nothing([folder], target, held))
    scored = winners.scores(frame)
    if scored.empty:
        of = f" for {target}" if target else ""
        raise AutotuneError(
            f"results folder {str(folder)!r} has {counted(len(frame), 'row')}{of} and no candidate that is "
            f"ok: nothing can win; `autotune show {typed(folder)}` says what failed"
        )
    today = incumbents_of(scored)
    if base is None:
        lines = winners.choose(scored, today)
        missing = uncompared(versions.deciding(frame, scored), scored, lines)
        return Winners(lines, unfinished=begun, uncompared=missing)
    lines = winners.choose(scored, merge.incumbents(base, today))
    return Winners(lines, base, merge.merge(frame, scored, lines, base, min_gain), begun)


def emit(
    won: Winners,
    *,
    allow_modelled: bool,
    names: str = "autotune",
) -> Emitted:
    """A table file; the same text for the same values.

    names: of the devices: 'autotune' for a module that stands in for JAX's and tells all generations apart,
    'jax' for rows to paste into JAX's own table.

    Raises:
      UsageError: the rows are not measured and that is not allowed, are interpreted, or hold more than one
        setting of the kernel's static arguments; two generations would share a name.
    """
    lines = won.lines
    require_known(lines, won.base, allow_modelled)
    by_place = won.sources()
    if names == "jax":
        devices, owners = _under_jaxs_names(won)
        held = Counter(
            (name, by_place[owners[name], key] if name in owners else won.base_source)
            for name, rows in devices.items()
            for key in rows
        )
    else:
        held = Counter((target, source) for (target, _), source in by_place.items())
    sources = Counter[str]()
    for (_, source), count in sorted(held.items()):
        sources[source] += count
    source = schema.MODELLED if schema.MODELLED in sources else ", ".join(sorted(sources))
    provenance = _provenance(won, held, source)
    stated = {"source": source, **{f"note_{i}": line for i, line in enumerate(provenance, 1)}}
    if names == "jax":
        rule = load("jax").rule
        if rule:
            stated[source_module.LOOKUP] = rule.name
        table = Table(dialect=JAX, devices=devices, provenance=stated)
        return Emitted(source_module.render(table, _ROWS_TITLE), len(table), sources)
    limit = rows_of(lines[schema.SETTING_COLUMNS].head(1))[0]["vmem_limit_bytes"]
    text = render.render(won.tables, source, provenance, limit)
    return Emitted(text, held.total(), sources)


def require_known(lines: pd.DataFrame, base: Table | None, allow_modelled: bool) -> None:
    """Refuse what no table may hold."""
    sources = set(lines["source"])
    if schema.INTERPRETED in sources:
        raise UsageError(
            "some winners come from interpreted rows, which show that the kernel is right, not how fast "
            "it is: sweep on a TPU, or for a --target without one"
        )
    if schema.MODELLED in sources and not allow_modelled:
        count = int((lines["source"] == schema.MODELLED).sum())
        raise UsageError(
            f"{count} of {len(lines)} winners are modelled, from the compiler's schedule and not timed on a "
            "TPU: add --allow-modelled to emit them, and the table will say so"
        )
    if base is not None and base.modelled and not allow_modelled:
        raise UsageError(
            f"the values of --base {base.origin} are modelled: add --allow-modelled to keep them, and the "
            "table will say so"
        )
    settings = lines[schema.SETTING_COLUMNS].drop_duplicates()
    if len(settings) > 1:
        kinds = "; ".join(settings_text(row) for row in rows_of(settings))
        raise UsageError(
            f"the rows hold {len(settings)} settings of the kernel's static arguments ({kinds}), and a table "
            "holds one: keep each in a results folder of its own"
        )


def _under_jaxs_names(won: Winners) -> tuple[dict[str, dict[TableKey, BlockSizes]], dict[str, str]]:
    """Rows under the names that the installed JAX's own look-up asks for, and whose re-tuned names are.

    Devices of a base keep their names, and those that were not re-tuned their rows.
    """
    devices: dict[str, dict[TableKey, BlockSizes]] = {}
    owners: dict[str, str] = {}
    tuned = set(won.lines["target"])
    for generation in sorted(tuned):
        name = call.jax_device_name(GENERATIONS[generation].device_kinds[0])
        if name in owners:
            raise UsageError(
                f"{owners[name]} and {generation} are both {name!r} in JAX's table: choose one with --target"
            )
        owners[name] = generation
        devices[name] = won.tables[generation]
    for name, rows in won.base.devices.items() if won.base else ():
        if name not in devices and not tuned.intersection(JAX.generations(name)):
            devices[name] = dict(rows)
    return {name: dict(sorted(devices[name].items())) for name in sorted(devices)}, owners


def _provenance(won: Winners, held: Counter[tuple[str, str]], source: str) -> list[str]:
    """What a reviewer asks of a table; of finished sweeps, nothing in it depends on when, and on where only
    what was timed.

    held: how many values the table holds, by name of the device and source.
    """
    lines = won.lines
    settings = rows_of(lines[schema.SETTING_COLUMNS].head(1))[0]
    text = []
    modelled = sum(count for (_, of), count in held.items() if of == schema.MODELLED)
    if modelled:
        models = ", ".join(sorted(lines["model"].dropna().unique())) or "that of the table merged into"
        text += [
            f"MODELLED: {modelled} of {held.total()} values come from the compiler's schedule and a cost",
            f"model ({models}). They were not timed on a TPU.",
        ]
    elif source == schema.MEASURED:
        text.append("MEASURED: every value was timed on a TPU.")
    timed = lines[lines["source"] == schema.MEASURED]
    if len(timed):
        hosts = sorted({host for names in timed.get("hosts", ()) for host in names})
        text += textwrap.wrap(f"timed on: {', '.join(hosts) or 'hosts that the rows do not name'}", 96)
    if won.base is not None:
        text += [
            f"merged into {won.base.origin} ({won.base.provenance.get('source', 'of unknown source')}):",
            *textwrap.wrap(str(won.merged), 96),
        ]
    for sweep in won.unfinished:
        text += textwrap.wrap(f"UNFINISHED: {sweep}: values may change.", 96)
    counts = Counter[str]()
    for (name, _), count in sorted(held.items()):
        counts[name] += count
    text += [
        f"keys: {', '.join(f'{count} {name}' for name, count in counts.items())}",
        f"settings: {settings_text(settings)}",
        *textwrap.wrap(f"compared: {winners.compared_text(lines)}", 96),
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
