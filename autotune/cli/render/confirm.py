"""What `autotune confirm` found, as text to paste and as JSON."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.analysis.confirm import FAILED, NAMES, NOT_APPLICABLE, Check
from autotune.io.terminal import WIDTH, folded, printable

SCHEMA = 1
STATE_WIDTH = len(NOT_APPLICABLE)
NAME_WIDTH = max(map(len, NAMES))


def head(of: Mapping[str, Any]) -> str:
    """The first line, with all the versions, folded; of: what `confirm.head` says."""
    where = "on a TPU that cannot be used"
    if of["generation"]:
        where = f"on {of['generation']} ({of['device_kind']!r})"
    if of["interpreted"]:
        where = f"on the CPU, interpreting for {of['generation']}"
    versions = ", ".join(f"{name} {of[name] or 'missing'}" for name in ("jax", "jaxlib", "libtpu"))
    text = f"autotune {of['autotune']} {where}; {versions}, Python {of['python']}, {of['system']}"
    return folded(printable(text), WIDTH)


def line(check: Check) -> str:
    """A check, folded; each part of it in its own column."""
    first = f"{check.state:<{STATE_WIDTH}}  {check.name:<{NAME_WIDTH}}  "
    return textwrap.fill(
        printable(check.seen),
        WIDTH,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=False,
        break_on_hyphens=False,
    )


def end(of: Mapping[str, Any], checks: Sequence[Check]) -> str:
    """The last line: how many failed, and what to do with the text."""
    failed = sum(check.state == FAILED for check in checks)
    counts = f"{failed} failed" if failed else "None failed"
    if of["interpreted"]:
        return f"{counts}. No TPU was used: on a TPU host leave --interpret out."
    return f"{counts}. Paste this into an issue."


def as_json(of: Mapping[str, Any], checks: Sequence[Check], code: int) -> str:
    """One object; keys are only ever added while `schema` stays the same."""
    return json.dumps(
        {
            "schema": SCHEMA,
            **of,
            "exit_code": code,
            "checks": [dataclasses.asdict(check) for check in checks],
        },
        indent=2,
    )
