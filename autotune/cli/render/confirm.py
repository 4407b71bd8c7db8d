"""What `autotune confirm` found, as text to paste and as JSON."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Sequence

from autotune.analysis.confirm import FAILED, NAMES, NOT_APPLICABLE, Check, Head
from autotune.io.terminal import WIDTH, folded, printable

SCHEMA = 1
STATE_WIDTH = len(NOT_APPLICABLE)
NAME_WIDTH = max(map(len, NAMES))


def head(of: Head) -> str:
    """The first line, with all the versions, folded."""
    where = f"on {of.generation} ({of.device_kind!r})" if of.generation else "on a TPU that cannot be used"
    if of.interpreted:
        where = f"on the CPU, interpreting for {of.generation}"
    versions = ", ".join(f"{name} {getattr(of, name) or 'missing'}" for name in ("jax", "jaxlib", "libtpu"))
    return folded(
        printable(f"autotune {of.autotune} {where}; {versions}, Python {of.python}, {of.system}"), WIDTH
    )


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


def end(of: Head, checks: Sequence[Check]) -> str:
    """The last line: how many failed, and what to do with the text."""
    failed = sum(check.state == FAILED for check in checks)
    counts = f"{failed} failed" if failed else "None failed"
    if of.interpreted:
        return f"{counts}. No TPU was used: on a TPU host leave --interpret out."
    return f"{counts}. Paste this into an issue."


def as_json(of: Head, checks: Sequence[Check], code: int) -> str:
    """One object; keys are only ever added while `schema` stays the same."""
    return json.dumps(
        {
            "schema": SCHEMA,
            **dataclasses.asdict(of),
            "exit_code": code,
            "checks": [dataclasses.asdict(check) for check in checks],
        },
        indent=2,
    )
