"""What the page's scripts read: the keys as JSON that cannot leave its script element."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from autotune.analysis.overview import Rival
from autotune.analysis.report.agreement import Point
from autotune.analysis.report.data import Report
from autotune.analysis.report.entries import Cell, Entry
from autotune.emit import settings_text
from autotune.results import schema, winners

# More are drawn slowly and say no more; they are taken evenly.
MAX_POINTS = 5000


def embedded(report: Report) -> str:
    """The keys, and the points that were predicted and measured, for page.js."""
    keys, points = report.keys, report.agreement.points
    return _json(
        {
            "entries": [_entry(entry) for entry in keys.entries],
            "settings": [
                settings_text(dict(zip(schema.SETTING_COLUMNS, s, strict=True))) for s in keys.settings
            ],
            "tools": [_kit(dict(zip(winners.TOOLS, kit, strict=True))) for kit in keys.tools],
            "failures": keys.failures,
            "points": [_point(point) for point in points[:: math.ceil(len(points) / MAX_POINTS) or 1]],
            "all_points": len(points),
        }
    )


def _json(value: Any) -> str:
    """ASCII JSON in which no character can end a script element or open a comment in it."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _entry(entry: Entry) -> dict[str, Any]:
    return {
        "target": entry.target,
        "key": entry.key,
        "setting": entry.setting,
        "winner": entry.winner,
        "us": _short(entry.us),
        "tied": entry.tied,
        **_rival("default", entry.default),
        **_rival("published", entry.published),
        "runs": [{**run._asdict(), "cells": [_cell(cell) for cell in run.cells]} for run in entry.runs],
    }


def _rival(name: str, rival: Rival | None) -> dict[str, Any]:
    blocks, cost, status = rival or (None, None, None)
    return {name: blocks, f"{name}_cost": _short(cost), f"{name}_status": status}


def _cell(cell: Cell) -> list[Any]:
    """Without names, which would be most of the file."""
    intervals = [pair and [_short(end) for end in pair] for pair in cell.intervals or ()]
    return [
        *(cell.pages, cell.queries, cell.vmem_bytes, _short(cell.score), _short(cell.us)),
        [_short(value) for value in cell.values],
        intervals or None,
    ]


def _point(point: Point) -> list[Any]:
    return [
        *(point.entry, point.blocks, point.workload),
        *(_short(point.predicted_us), _short(point.measured_us)),
    ]


def _short(value: float | None) -> float | None:
    """With five digits: nothing is known better, and four are shown."""
    if value is None:
        return None
    rounded = float(f"{value:.5g}")
    return int(rounded) if rounded.is_integer() else rounded


def _kit(tools: Mapping[str, Any]) -> str:
    """Tools in a few words, as they tell runs of one source apart."""
    said = [f"{name} {tools[name]}" for name in ("jax", "libtpu", "model") if tools[name]]
    return ", ".join([*said, f"kernel {tools['kernel_fingerprint']}", f"{tools['max_num_seqs']} sequences"])
