"""What the winners of one generation cost on another, and what JAX's answers cost on each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from autotune.analysis import diff
from autotune.emit import settings_text
from autotune.kernel.jax_rpa.call import published_table
from autotune.kernel.problem import BlockSizes, TableKey
from autotune.results import schema, scores
from autotune.results.baselines import incumbent
from autotune.results.rows import rows_of
from autotune.tables.dialects import JAX
from autotune.tables.merge import tables_of
from autotune.tables.table import Table
from autotune.tpu.generations import GENERATIONS

if TYPE_CHECKING:
    import pandas as pd


class Matrix(NamedTuple):
    """One setting of the kernel. cells: a table each, a generation each; None where a table has no rows.

    sources: a generation each, where the latencies that its column is made of come from.
    """

    setting: str
    tables: list[str]
    generations: list[str]
    sources: list[list[str]]
    cells: list[list[diff.Regret | None]]


def matrices(timed: pd.DataFrame, chosen: pd.DataFrame) -> list[Matrix]:
    """A matrix for each setting of the kernel's static arguments, as costs of two cannot be compared.

    timed: rows, none of them interpreted. chosen: their winners, as `winners.choose` gives them.
    """
    columns = schema.SETTING_COLUMNS
    return [
        _matrix(scores.of(timed.merge(won[columns].head(1), on=columns), "these rows"), won)
        for _, won in chosen.groupby(columns, dropna=False, sort=False)
    ]


def _matrix(board: scores.Scoreboard, won: pd.DataFrame) -> Matrix:
    published = published_table()
    by_generation = tables_of(won)
    today, default = (
        {
            target: {key: answer(incumbent(GENERATIONS[target], key, published)) for key in rows}
            for target, rows in by_generation.items()
        }
        for answer in (lambda now: now.published or now.default, lambda now: now.default)
    )
    tables = [_table(f"winners of {target}", {target: rows}) for target, rows in by_generation.items()]
    tables += [_table("JAX's look-up today", today), _table("JAX's default alone", default)]
    matrix = diff.regret_matrix(tables, board)
    generations = [name for name in GENERATIONS if name in board.generations()]
    sources: dict[str, set[str]] = {}
    for (target, _), pairs in board.scores.items():
        sources.setdefault(target, set()).update(score.source for score in pairs.values())
    return Matrix(
        settings_text(rows_of(won[schema.SETTING_COLUMNS].head(1))[0]),
        [table.origin for table in tables],
        generations,
        [sorted(sources[name]) for name in generations],
        [[matrix.get((i, name)) for name in generations] for i in range(len(tables))],
    )


def _table(name: str, rows: Mapping[str, Mapping[TableKey, BlockSizes]]) -> Table:
    """A table under the jax dialect's device names."""
    return Table(
        dialect=JAX, devices={JAX.written[target]: held for target, held in rows.items()}, origin=name
    )
