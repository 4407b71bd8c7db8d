"""What a row is about: its key, block sizes and program; and rows of frames as plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autotune.kernel.problem import BlockSizes, Layout, Program, Settings, TableKey
from autotune.results import schema
from autotune.results.schema import BLOCK_COLUMNS, KEY_COLUMNS

if TYPE_CHECKING:
    import pandas as pd


def key_of(row: Mapping[str, Any]) -> TableKey:
    """The key of a row."""
    return TableKey(*(row[name] for name in KEY_COLUMNS))


def pair_of(row: Mapping[str, Any]) -> BlockSizes:
    """The block sizes of a row."""
    return BlockSizes(*(row[name] for name in BLOCK_COLUMNS))


def program_of(line: Mapping[str, Any]) -> Program:
    """The program behind a row."""
    return Program(
        layout=Layout(**{field.name: line[field.name] for field in dataclasses.fields(Layout)}),
        blocks=pair_of(line),
        settings=Settings(**{name: line[name] for name in schema.SETTING_COLUMNS}),
    )


def keys_of(lines: pd.DataFrame) -> list[TableKey]:
    """The TableKey of each line."""
    columns = (lines[name].tolist() for name in KEY_COLUMNS)
    return [TableKey(*values) for values in zip(*columns, strict=True)]


def blocks_of(lines: pd.DataFrame) -> list[BlockSizes]:
    """The BlockSizes of each line."""
    columns = (lines[name].tolist() for name in BLOCK_COLUMNS)
    return [BlockSizes(*values) for values in zip(*columns, strict=True)]


def rows_of(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The frame's rows as plain Python values, None where a value is missing."""
    import pyarrow as pa

    names = [name for name in schema.arrow().names if name in frame.columns]
    part = pa.schema([schema.arrow().field(name) for name in names])
    return pa.Table.from_pandas(frame[names], schema=part, preserve_index=False).to_pylist()
