"""What the page's scripts read: the keys as JSON that cannot leave its script element."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from autotune import results, winners
from autotune.emit import settings_text
from autotune.report.data import Report
from autotune.report.entries import Cell, Entry


def embedded(report: Report) -> str:
    """The keys, and the points that were predicted and measured, for page.js."""
    keys = report.keys
    return _json(
        {
            "entries": [_entry(entry) for entry in keys.entries],
            "settings": [
                settings_text(dict(zip(results.SETTING_COLUMNS, s, strict=True))) for s in keys.settings
            ],
            "tools": [_kit(dict(zip(winners.TOOLS, kit, strict=True))) for kit in keys.tools],
            "failures": keys.failures,
            "points": [
                {
                    "entry": point.entry,
                    "blocks": point.blocks,
                    "workload": point.workload,
                    "predicted": _short(point.predicted_us),
                    "measured": _short(point.measured_us),
                }
                for point in report.agreement.points
            ],
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
        "default": entry.default,
        "default_cost": _short(entry.default_cost),
        "published": entry.published,
        "published_cost": _short(entry.published_cost),
        "runs": [{**run._asdict(), "cells": [_cell(cell) for cell in run.cells]} for run in entry.runs],
    }


def _cell(cell: Cell) -> list[Any]:
    """Without names, which would be most of the file."""
    intervals = [pair and [_short(end) for end in pair] for pair in cell.intervals or ()]
    return [
        *(cell.pages, cell.queries, cell.vmem_bytes, _short(cell.score), _short(cell.us)),
        [_short(value) for value in cell.values],
        intervals or None,
    ]


def _short(value: float | None) -> float | None:
    """With six digits: nothing is known better."""
    if value is None:
        return None
    rounded = float(f"{value:.6g}")
    return int(rounded) if rounded.is_integer() else rounded


def _kit(tools: Mapping[str, Any]) -> str:
    """Tools in a few words, as they tell runs of one source apart."""
    said = [f"{name} {tools[name]}" for name in ("jax", "libtpu", "model") if tools[name]]
    return ", ".join([*said, f"kernel {tools['kernel_fingerprint']}", f"{tools['max_num_seqs']} sequences"])
