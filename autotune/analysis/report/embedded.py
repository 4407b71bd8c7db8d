"""What the page's scripts read: the keys as JSON that cannot leave its script element."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from autotune.analysis.overview import Rival
from autotune.analysis.report.data import Report
from autotune.analysis.report.entries import Entry
from autotune.emit import settings_text
from autotune.results import schema, winners

# More are drawn slowly and say no more; they are taken evenly.
MAX_POINTS = 5000


def embedded(report: Report) -> str:
    """The keys, and the points that were predicted and measured, for page.js."""
    keys, points = report.keys, report.agreement.points
    step = math.ceil(len(points) / MAX_POINTS) or 1
    return _json(
        {
            "entries": [_entry(entry) for entry in keys.entries],
            "settings": [
                settings_text(dict(zip(schema.SETTING_COLUMNS, s, strict=True))) for s in keys.settings
            ],
            "tools": [_kit(dict(zip(winners.TOOLS, kit, strict=True))) for kit in keys.tools],
            "failures": keys.failures,
            "points": points[::step],
            "all_points": len(points),
        }
    )


def _json(value: Any) -> str:
    """ASCII JSON in which no character can end a script element or open a comment in it."""
    text = json.dumps(_short(value), separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _entry(entry: Entry) -> dict[str, Any]:
    return {
        "target": entry.target,
        "key": entry.key,
        "setting": entry.setting,
        "winner": entry.winner,
        "us": entry.us,
        "tied": entry.tied,
        **_rival("default", entry.default),
        **_rival("published", entry.published),
        "runs": [run._asdict() for run in entry.runs],
    }


def _rival(name: str, rival: Rival | None) -> dict[str, Any]:
    blocks, cost, status = rival or (None, None, None)
    return {name: blocks, f"{name}_cost": cost, f"{name}_status": status}


def _short(value: Any) -> Any:
    """Every number in it with five digits: nothing is known better, and four are shown."""
    if isinstance(value, dict):
        return {name: _short(held) for name, held in value.items()}
    if isinstance(value, list | tuple):
        return [_short(held) for held in value]
    if not isinstance(value, float):
        return value
    rounded = float(f"{value:.5g}")
    return int(rounded) if rounded.is_integer() else rounded


def _kit(tools: Mapping[str, Any]) -> str:
    """Tools in a few words, as they tell runs of one source apart."""
    said = [f"{name} {tools[name]}" for name in ("jax", "libtpu", "model") if tools[name]]
    return ", ".join([*said, f"kernel {tools['kernel_fingerprint']}", f"{tools['max_num_seqs']} sequences"])
