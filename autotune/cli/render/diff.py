"""Differences of tables as text for a terminal, markdown for a pull request, csv and json for other tools."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Mapping, Sequence
from itertools import combinations

from autotune.analysis.diff import DeviceDiff, Dimension, Regret, dimensions, directions
from autotune.io.terminal import cell, printable, shown
from autotune.kernel.problem import BlockSizes
from autotune.tables.keys import Key
from autotune.tables.table import Table
from autotune.tpu.generations import MIB

EXAMPLES = 10  # of added, removed and changed keys each, unless all are wanted
DIMENSIONS = 3  # that are shown, the most telling ones
VALUES = 12  # of a dimension


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Tables, the differences of each two of them, and what their choices cost, where rows tell.

    rows: where the rows are; sources: which of measured and modelled their latencies are; vmem_limit_bytes:
    that of the rows, None for the compiler's own.
    """

    tables: Sequence[Table]
    pairs: Mapping[tuple[int, int], Sequence[DeviceDiff]]
    regrets: Mapping[tuple[int, str], Regret]
    rows: str | None = None
    sources: Sequence[str] = ()
    vmem_limit_bytes: int | None = None

    @property
    def differs(self) -> bool:
        return any(device.differs for devices in self.pairs.values() for device in devices)


def render(comparison: Comparison, form: str, *, show_all: bool = False) -> str:
    """The comparison in one of text, csv, json and markdown; it ends with a newline.

    csv has a line for each key that differs, whatever show_all says, and nothing of what choices cost.
    """
    if form == "json":
        return json.dumps(_json(comparison), indent=1) + "\n"
    if form == "csv":
        return _csv(comparison)
    mark = form == "markdown"
    parts: list[str] = []
    if len(comparison.tables) == 2:
        before, after = comparison.tables
        for device in comparison.pairs[0, 1]:
            parts += _device(before, after, device, mark, show_all)
    else:
        parts += _counts(comparison, mark)
    parts += _regrets(comparison, mark)
    return "\n".join(parts).strip("\n") + "\n"


def _heading(text: str, mark: bool) -> list[str]:
    return ["", f"### {text}" if mark else text, ""] if mark else ["", text]


def _grid(header: Sequence[str], rows: Sequence[Sequence[str]], mark: bool) -> list[str]:
    """A table: markdown's, or columns padded with spaces."""
    if mark:
        lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
        return ["| " + " | ".join(line) + " |" for line in lines]
    widths = [max(len(line[i]) for line in [header, *rows]) for i in range(len(header))]
    return [
        "  "
        + "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(cells)).rstrip()
        for line in [header, *rows]
        for cells in [list(zip(line, widths, strict=True))]
    ]


def _name(table: Table, device: str | None) -> str:
    if device is None:
        return f"{table.shown} (no such device)"
    return table.shown if device in table.origin else f"{table.shown}:{printable(device)}"


def _device(before: Table, after: Table, device: DeviceDiff, mark: bool, show_all: bool) -> list[str]:
    lines = _heading(f"{_name(before, device.before)} -> {_name(after, device.after)}", mark)
    lines.append(
        f"{len(device.added)} added, {len(device.removed)} removed, {len(device.changed)} changed, "
        f"{device.same} the same"
    )
    if device.changed:
        for name, (up, down) in directions(device.changed).items():
            lines.append(f"{'- ' if mark else '  '}{name}: {up} larger, {down} smaller")
        lines += _dimensions(dimensions(before, device), mark)
    for word, sign, keys in (
        ("changed", "~", [(c.key, f"{tuple(c.before)} -> {tuple(c.after)}") for c in device.changed]),
        ("added", "+", [(key, str(tuple(value))) for key, value in device.added.items()]),
        ("removed", "-", [(key, str(tuple(value))) for key, value in device.removed.items()]),
    ):
        lines += _keys(word, sign, keys, mark, show_all)
    return lines


def _keys(word: str, sign: str, keys: Sequence[tuple[Key, str]], mark: bool, show_all: bool) -> list[str]:
    if not keys:
        return []
    shown = keys if show_all else keys[:EXAMPLES]
    lines = ["", f"{word}:"]
    if mark:
        lines += ["", "```diff", *(f"{sign} {tuple(key)}: {value}" for key, value in shown), "```"]
    else:
        for key, value in shown:
            text = f"  {sign} {tuple(key)}: {value}"
            lines += [text] if len(text) <= 80 else [f"  {sign} {tuple(key)}:", f"      {value}"]
    if len(shown) < len(keys):
        lines.append(f"  ... and {len(keys) - len(shown)} more" + ("" if mark else ": --all shows them"))
    return lines


def _dimensions(found: list[Dimension], mark: bool) -> list[str]:
    telling = [dimension for dimension in found if dimension.bits > 0][:DIMENSIONS]
    if not telling:
        return []
    lines = ["", "changed keys by part of the key, the most telling first:"]
    if mark:
        lines.append("")
    for dimension in telling:
        shares = [
            f"{value} {changed}/{common}"
            for value, (changed, common) in list(dimension.shares.items())[:VALUES]
        ]
        more = len(dimension.shares) - len(shares)
        text = ", ".join(shares) + (f", and {more} more" if more > 0 else "")
        lines += _folded(f"{'- ' if mark else '  '}{dimension.name} (changed/common): {text}", mark)
    return lines


def _folded(text: str, mark: bool) -> list[str]:
    import textwrap

    if mark:
        return [text]
    return textwrap.wrap(text, 80, subsequent_indent="    ", break_on_hyphens=False)


def _counts(comparison: Comparison, mark: bool) -> list[str]:
    names = [table.shown for table in comparison.tables]
    lines = _heading("keys added, removed, changed and the same, from the first to the second", mark)
    rows = []
    for i, j in combinations(range(len(names)), 2):
        devices = comparison.pairs[i, j]
        numbers = [
            sum(len(d.added) for d in devices),
            sum(len(d.removed) for d in devices),
            sum(len(d.changed) for d in devices),
            sum(d.same for d in devices),
        ]
        rows.append([f"{names[i]} -> {names[j]}", *map(str, numbers)])
    return lines + _grid(["tables", "added", "removed", "changed", "same"], rows, mark)


def _regrets(comparison: Comparison, mark: bool) -> list[str]:
    if not comparison.regrets:
        return []
    generations = sorted({generation for _, generation in comparison.regrets})
    sources = " and ".join(comparison.sources).upper()
    limit = comparison.vmem_limit_bytes
    at = f"a VMEM limit of {limit / MIB:g} MiB" if limit else "the compiler's own VMEM limit"
    lines = _heading("what each table's choices cost on each generation", mark)
    lines += [
        *_folded(
            f"mean over the keys, above the best pair of {shown(comparison.rows)} ({sources}, at {at})", mark
        ),
        *([""] if mark else []),
    ]
    rows, notes = [], []
    for position, table in enumerate(comparison.tables):
        cells = [table.shown]
        for generation in generations:
            regret = comparison.regrets.get((position, generation))
            cells.append("-" if regret is None or regret.mean is None else f"+{(regret.mean - 1) * 100:.1f}%")
            if regret and (regret.failed or regret.unknown):
                notes.append(
                    f"{table.shown} on {generation}: mean over {regret.keys} keys; {regret.failed} do not "
                    f"run, {regret.unknown} are not in the rows"
                )
        rows.append(cells)
    lines += _grid(["choices of", *(f"on {g}" for g in generations)], rows, mark)
    return lines + ([""] if notes else []) + [f"{'- ' if mark else '  '}{note}" for note in notes]


def _csv(comparison: Comparison) -> str:
    tables = comparison.tables
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    key_columns = tables[0].dialect.key_type._fields
    pairs = [f"{when}_{column}" for when in ("before", "after") for column in BlockSizes._fields]
    writer.writerow(["before", "after", "before_device", "after_device", "change", *key_columns, *pairs])
    nothing = ("", "")
    for (i, j), devices in comparison.pairs.items():
        for device in devices:
            where = [tables[i].origin, tables[j].origin, device.before or "", device.after or ""]
            lines: list[list[object]] = [
                *([*where, "changed", *c.key, *c.before, *c.after] for c in device.changed),
                *([*where, "added", *key, *nothing, *value] for key, value in device.added.items()),
                *([*where, "removed", *key, *value, *nothing] for key, value in device.removed.items()),
            ]
            writer.writerows(map(cell, line) for line in lines)
    return file.getvalue()


def _json(comparison: Comparison) -> dict[str, object]:
    names = [table.origin for table in comparison.tables]
    return {
        "tables": names,
        "provenance": [dict(table.provenance) for table in comparison.tables],
        "differs": comparison.differs,
        "comparisons": [
            {
                "before": names[i],
                "after": names[j],
                "devices": [
                    {
                        "before": device.before,
                        "after": device.after,
                        "added": [[list(key), list(value)] for key, value in device.added.items()],
                        "removed": [[list(key), list(value)] for key, value in device.removed.items()],
                        "changed": [[list(c.key), list(c.before), list(c.after)] for c in device.changed],
                        "same": device.same,
                        "dimensions": [
                            {
                                "name": d.name,
                                "bits": d.bits,
                                "shares": [[value, *share] for value, share in d.shares.items()],
                            }
                            for d in dimensions(comparison.tables[i], device)
                        ],
                    }
                    for device in devices
                ],
            }
            for (i, j), devices in comparison.pairs.items()
        ],
        "regret": [
            {"table": names[position], "generation": generation, **dataclasses.asdict(regret)}
            for (position, generation), regret in comparison.regrets.items()
        ],
        "rows": comparison.rows,
        "sources": list(comparison.sources),
        "vmem_limit_bytes": comparison.vmem_limit_bytes,
    }
