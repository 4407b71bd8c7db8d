"""What a look-up answers today: JAX's published value of a key, and JAX's default where it has none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from autotune.io.terminal import counted
from autotune.kernel.jax_rpa import call
from autotune.kernel.problem import BlockSizes, TableKey
from autotune.results.rows import blocks_of, keys_of, rows_of
from autotune.results.schema import BLOCK_COLUMNS, KEY_COLUMNS, Status
from autotune.results.winners import ENTRY
from autotune.tpu.generations import GENERATIONS, Generation

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
    tables = published if published is not None else call.published_table()
    listed = tables.get(generation.published_name, {}).get(key) if generation.version > 4 else None
    default = call.default_blocks(generation.version).clamped(key.pages_per_seq, key.max_num_batched_tokens)
    clamped = listed.clamped(key.pages_per_seq, key.max_num_batched_tokens) if listed else None
    return Incumbent(clamped, default)


def incumbents_of(scored: pd.DataFrame) -> dict[tuple[str, TableKey], list[BlockSizes]]:
    """What the installed JAX answers, by (target, key), for every entry of scored lines."""
    published = call.published_table()
    lines = scored.drop_duplicates(["target", *KEY_COLUMNS])
    return {
        (target, key): [b for b in incumbent(GENERATIONS[target], key, published) if b]
        for target, key in zip(lines["target"], keys_of(lines), strict=True)
        if target in GENERATIONS
    }


def uncompared(rows: pd.DataFrame, scored: pd.DataFrame, chosen: pd.DataFrame) -> list[BlockSizes]:
    """What a look-up answers today for those winners that were not compared with it, as it was not swept.

    rows: those of the versions that decide, as `versions.deciding` gives them. scored, chosen: as
    `winners.scores` and `winners.choose` do. A pair that failed is no rival, and counts as compared.
    """
    answers = {entry: pairs[0] for entry, pairs in incumbents_of(chosen).items()}
    today = [answers.get(entry) for entry in zip(chosen["target"], keys_of(chosen), strict=True)]
    pairs = {pair for pair in today if pair}

    columns = [*ENTRY, *BLOCK_COLUMNS]

    def entries(lines: pd.DataFrame) -> set[tuple[object, ...]]:
        for column, values in zip(BLOCK_COLUMNS, zip(*pairs, strict=True), strict=True):
            lines = lines[lines[column].isin(values)]
        return {tuple(row[c] for c in columns) for row in rows_of(lines[columns].drop_duplicates())}

    if not pairs:
        return []
    tried = entries(scored) | entries(rows[rows["status"] != Status.OK])
    return [
        pair
        for won, blocks, pair in zip(rows_of(chosen[ENTRY]), blocks_of(chosen), today, strict=True)
        if pair and pair != blocks and (*(won[c] for c in ENTRY), *pair) not in tried
    ]


def uncompared_text(missing: Sequence[BlockSizes], winners: int) -> str:
    """What to say of `uncompared` pairs, and what to type to have them swept."""
    was, adds = ("was", "it") if len(missing) == 1 else ("were", "them")
    pages, queries = (",".join(map(str, sorted(set(values)))) for values in zip(*missing, strict=True))
    return (
        f"{len(missing)} of {counted(winners, 'winner')} {was} not compared with what JAX's look-up answers "
        "today, as its pair has no row of the same kind (not among the block sizes that were named, "
        "predicted not to win, or of other versions or workloads): "
        f"the same sweep with --kv-pages {pages} --queries {queries} adds {adds}"
    )
