"""Rows of the jax dialect into another one, and what it cannot hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from autotune.kernel.problem import BlockSizes, TableKey
from autotune.tables.dialects import INFERENCE, SGLANG, Dialect
from autotune.tables.keys import SglangKey, inference_key
from autotune.tables.table import Key, Table


@dataclasses.dataclass(frozen=True)
class Converted:
    """A table of the other dialect, and what became of the rows.

    merged: rows that went into another one's key. disagreeing: those of them whose value was another, and is
    lost. refused: rows whose heads that stack never looks up so.
    """

    table: Table
    merged: int
    disagreeing: int
    refused: int

    def __str__(self) -> str:
        dialect = self.table.dialect
        return (
            f"{len(self.table)} rows of the {dialect} dialect; {self.merged} more were merged, as it has no "
            f"{dialect.missing}, the largest one's value going first ({self.disagreeing} of them had another "
            f"value); {self.refused} refused, as it looks their heads up under another key"
        )


def convert(
    tables: Mapping[str, Mapping[TableKey, BlockSizes]], dialect: Dialect, provenance: Mapping[str, Any]
) -> Converted:
    """Tables by generation into the tpu-inference or sglang-jax dialect, sorted.

    Of rows that differ only in the dimension that the dialect leaves out, the one with the largest is kept:
    both stacks cut a value down to the call's own pages and tokens. A row whose key the stack's own look-up
    would round to another is refused, for no call of the stack has it.
    """
    devices: dict[str, dict[Key, BlockSizes]] = {}
    merged = disagreeing = refused = 0
    for generation in sorted(tables):
        rows: dict[Key, BlockSizes] = {}
        for key in sorted(tables[generation], key=lambda key: (key[:6], -_missing(key, dialect))):
            blocks = tables[generation][key]
            other = _converted(key, dialect)
            if dialect.asked(other) != other:
                refused += 1
            elif other in rows:
                merged += 1
                disagreeing += rows[other] != blocks
            else:
                rows[other] = blocks
        devices[dialect.written[generation]] = dict(
            sorted(rows.items(), key=lambda row: _order(dialect, row[0]))
        )
    return Converted(
        Table(dialect=dialect, devices=devices, provenance=dict(provenance)), merged, disagreeing, refused
    )


def _missing(key: TableKey, dialect: Dialect) -> int:
    return key.max_model_len if dialect is SGLANG else key.max_num_batched_tokens


def _converted(key: TableKey, dialect: Dialect) -> Key:
    if dialect is SGLANG:
        return SglangKey(*key[:7])
    assert dialect is INFERENCE
    return inference_key(*key[:6], key.max_model_len, None)


def _order(dialect: Dialect, key: Key) -> tuple[Any, ...]:
    """Numbers in a tpu-inference key count as numbers, so that 128 comes before 1024."""
    return (
        key
        if dialect is SGLANG
        else tuple(str(v) if v is None else v for v in dialect.dimensions(key).values())
    )
