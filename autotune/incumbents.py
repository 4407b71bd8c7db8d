"""What a look-up answers today: JAX's published value of a key, and JAX's default where it has none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from autotune.kernel import rpa
from autotune.kernel.problem import BlockSizes, TableKey
from autotune.results import KEY_COLUMNS
from autotune.tpu.chips import GENERATIONS, Generation
from autotune.winners import keys_of

if TYPE_CHECKING:
    import pandas as pd


class Incumbent(NamedTuple):
    """Clamped to the key's own call, as a look-up hands them out. published is None for an unlisted key."""

    published: BlockSizes | None
    default: BlockSizes


def incumbent(
    generation: Generation,
    key: TableKey,
    published: Mapping[str, Mapping[TableKey, BlockSizes]] | None = None,
) -> Incumbent:
    """What the installed JAX answers for a key on a generation.

    On v4 JAX does not consult its table; v5e and v5p share the name 'TPU v5' there.
    """
    tables = published if published is not None else rpa.published_table()
    listed = tables.get(generation.published_name, {}).get(key) if generation.version > 4 else None
    default = rpa.default_blocks(generation.version).clamped(key.pages_per_seq, key.max_num_batched_tokens)
    clamped = listed.clamped(key.pages_per_seq, key.max_num_batched_tokens) if listed else None
    return Incumbent(clamped, default)


def incumbents_of(scored: pd.DataFrame) -> dict[tuple[str, TableKey], list[BlockSizes]]:
    """What the installed JAX answers, by (target, key), for every entry of scored lines."""
    published = rpa.published_table()
    lines = scored.drop_duplicates(["target", *KEY_COLUMNS])
    return {
        (target, key): [b for b in incumbent(GENERATIONS[target], key, published) if b]
        for target, key in zip(lines["target"], keys_of(lines), strict=True)
        if target in GENERATIONS
    }
