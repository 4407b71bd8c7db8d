"""Winners into an older table: what was not re-tuned stays, what is not clearly faster stays too."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from autotune.errors import UsageError
from autotune.kernel.problem import BlockSizes, TableKey
from autotune.results import winners
from autotune.results.rows import blocks_of, keys_of
from autotune.tables.dialects import JAX
from autotune.tables.table import Table

if TYPE_CHECKING:
    import pandas as pd

Tables = dict[str, dict[TableKey, BlockSizes]]  # by generation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Merged:
    """A table, and what became of each entry, in counts.

    changed: the winner is faster than the base's pair by more than asked, or the base's pair does not run.
    new: the base has no such key. kept: the winner is the base's pair, or not enough faster. untold: kept
    too, as the rows do not hold the base's pair. untouched: entries that the rows say nothing of. taken: the
    changed and new ones, by generation and key.
    """

    tables: Tables
    taken: frozenset[tuple[str, TableKey]]
    changed: int
    new: int
    kept: int
    untold: int
    untouched: int

    def __str__(self) -> str:
        counts = (
            (self.changed, "changed"),
            (self.new, "new"),
            (self.kept, "kept as not slower"),
            (self.untold, "kept as the rows do not hold the base's pair"),
            (self.untouched, "not in the sweep and kept"),
        )
        return ", ".join(f"{number} {fate}" for number, fate in counts if number) or "no keys"


def tables_of(lines: pd.DataFrame) -> Tables:
    """Winning lines by generation and key."""
    tables: Tables = {}
    for target, key, blocks in zip(lines["target"], keys_of(lines), blocks_of(lines), strict=True):
        tables.setdefault(target, {})[key] = blocks
    return tables


def incumbents(
    base: Table, others: Mapping[tuple[str, TableKey], list[BlockSizes]]
) -> dict[tuple[str, TableKey], list[BlockSizes]]:
    """The pairs that a tie goes to, the base's before the others, cut to their calls as rows have them."""
    out = {}
    for (target, key), pairs in others.items():
        own = base.rows_of(target).get(key)
        clamped = [own.clamped(key.pages_per_seq, key.max_num_batched_tokens)] if own else []
        out[target, key] = clamped + pairs
    return out


def merge(
    frame: pd.DataFrame, scored: pd.DataFrame, lines: pd.DataFrame, base: Table, min_gain: float = 0.0
) -> Merged:
    """Winning lines into a base table of the jax dialect.

    frame: the rows; scored: their `winners.scores`; lines: those that win, ties having gone to the base.
    min_gain: how much slower than the winner, as a fraction, the base's pair must be to be replaced.

    Raises:
      UsageError: the base is of another dialect.
    """
    if base.dialect is not JAX:
        raise UsageError(
            f"--base {base.shown} is a table of the {base.dialect} dialect, whose keys are not JAX's: "
            "name one of the jax dialect"
        )
    scores = dict(
        zip(
            zip(scored["target"], keys_of(scored), blocks_of(scored), strict=True),
            scored["score"],
            strict=True,
        )
    )
    failed = winners.refuted(frame, lines)
    failures = set(zip(failed["target"], keys_of(failed), blocks_of(failed), strict=True))
    tables: Tables = {generation: dict(base.rows_of(generation)) for generation in base.generations()}
    counts = dict.fromkeys(("changed", "new", "kept", "untold"), 0)
    before = sum(map(len, tables.values()))
    taken = set()
    for target, rows in tables_of(lines).items():
        for key, winner in rows.items():
            held = tables.setdefault(target, {}).get(key)
            if held is None:
                fate = "new"
            else:
                own = held.clamped(key.pages_per_seq, key.max_num_batched_tokens)
                own_score = scores.get((target, key, own))
                if own == winner:
                    fate = "kept"
                elif own_score is not None:
                    faster = own_score / scores[target, key, winner] - 1 > min_gain
                    fate = "changed" if faster else "kept"
                else:
                    fate = "changed" if (target, key, own) in failures else "untold"
            counts[fate] += 1
            if fate in ("new", "changed"):
                tables[target][key] = winner
                taken.add((target, key))
    touched = counts["changed"] + counts["kept"] + counts["untold"]
    return Merged(tables=tables, taken=frozenset(taken), untouched=before - touched, **counts)
