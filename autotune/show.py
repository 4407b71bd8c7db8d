"""The winners of a results folder beside what JAX's look-up answers today, for a terminal of 80 columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from autotune import results, winners
from autotune.folders import Folder
from autotune.incumbents import Incumbent, incumbent, incumbents_of
from autotune.kernel.problem import BlockSizes, TableKey
from autotune.kernel.rpa import published_table
from autotune.tpu.chips import GENERATIONS, MIB

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType


class Line(NamedTuple):
    """One winner. default_cost and published_cost: latency relative to the winner's, None if unknown."""

    target: str
    key: TableKey
    source: str
    blocks: BlockSizes
    latency_us: float
    tied: int
    incumbent: Incumbent
    default_cost: float | None
    published_cost: float | None


class Overview(NamedTuple):
    """The winners, how many candidates have each status, and the keys for which nothing is ok."""

    lines: list[Line]
    statuses: dict[str, int]
    without_winner: list[tuple[str, TableKey, str]]


def overview(folder: Folder, target: str | None = None) -> Overview:
    """What a results folder holds.

    Raises:
      UsageError: the folder cannot be read.
    """
    frame = results.read(folder, winners.READ_COLUMNS)
    if target is not None:
        frame = frame[frame["target"] == target]
    scored = winners.scores(frame)
    chosen = winners.choose(scored, incumbents_of(scored))
    candidate = [*winners.ENTRY, *winners.TOOLS, *results.BLOCK_COLUMNS]
    statuses = frame.drop_duplicates([*candidate, "status"])["status"].value_counts()
    won = set(zip(chosen["target"], winners.keys_of(chosen), strict=True))
    # Of a key without a winner, the candidate that came closest: the smallest overflow, if any.
    closest = frame.sort_values("needed_bytes").drop_duplicates(["target", *results.KEY_COLUMNS])
    lost = [
        (target, key, _why(row))
        for target, key, row in zip(
            closest["target"], winners.keys_of(closest), results.rows_of(closest), strict=True
        )
        if (target, key) not in won
    ]
    counts = {str(status): int(count) for status, count in statuses.items()}
    return Overview(compared(scored, chosen), counts, sorted(lost))


def _why(row: dict[str, Any]) -> str:
    """Why a candidate is not ok."""
    pair = f"{row['num_kv_pages_per_blk']},{row['num_queries_per_blk']}"
    if row["needed_bytes"] is not None and row["limit_bytes"] is not None:
        needed, limit = row["needed_bytes"] / MIB, row["limit_bytes"] / MIB
        return f"{pair} is {row['status']}: needs {needed:.2f} MiB, limit {limit:.2f} MiB"
    said = "".join(c if c.isprintable() else "?" for c in row["error"] or "")  # no escapes to a terminal
    if row["status"] == "ok":
        said = "not on every workload, as yet"
    return f"{pair} is {row['status']}" + (f": {said}" if said else "")


def compared(scored: pd.DataFrame, chosen: pd.DataFrame) -> list[Line]:
    """The winners beside what JAX answers today, a line each of `winners.choose` and in its order.

    scored: what they were chosen from, as `winners.scores` gives it.
    """
    published = published_table()
    entry_columns = [*winners.ENTRY, *results.BLOCK_COLUMNS]
    by_candidate = {
        line: score
        for *line_values, score in zip(
            *(scored[name].astype(object).where(scored[name].notna(), None) for name in entry_columns),
            scored["score"],
            strict=True,
        )
        for line in [tuple(line_values)]
    }
    lines = []
    for *entry, source, pages, queries, score, latency, tied in zip(
        *(chosen[name].astype(object).where(chosen[name].notna(), None) for name in winners.ENTRY),
        *(chosen[n] for n in ("source", *results.BLOCK_COLUMNS, "score", "latency_us", "tied")),
        strict=True,
    ):
        key = TableKey(*entry[1:9])
        now = incumbent(GENERATIONS[entry[0]], key, published)

        def cost(blocks: BlockSizes | None, entry: list[object] = entry, best: float = score) -> float | None:
            other = by_candidate.get((*entry, *blocks)) if blocks else None
            return other / best if other else None

        lines.append(
            Line(
                entry[0],
                key,
                source,
                BlockSizes(pages, queries),
                latency,
                tied,
                now,
                cost(now.default),
                cost(now.published),
            )
        )
    return lines


def display(seen: Overview) -> None:
    """Print an overview to standard output."""
    from rich.console import Console

    console = Console(highlight=False)
    console.width = max(
        console.width, 80
    )  # in a narrower terminal a line goes on in the next; no number is cut
    if seen.lines:
        shared, lines = table(seen.lines)
        console.print(shared)
        console.print(lines)
        console.print(_legend(seen.lines))
    else:
        console.print("no candidate is ok so far: nothing can win yet")
    counts = ", ".join(f"{count} {status}" for status, count in seen.statuses.items())
    console.print(f"candidates: {counts or 'none'}")
    for target, key, why in seen.without_winner:
        console.print(f"no winner on {target} for ({', '.join(map(str, key))}): {why}", markup=False)


def table(lines: list[Line]) -> tuple[str, RenderableType]:
    """What all winners share, and the winners as a rich table that fits 80 columns."""
    from rich import box
    from rich.table import Table

    cells = [
        (
            ("target", line.target),
            ("dtype", _short_dtypes(line.key)),
            ("q/kv", f"{line.key.num_q_heads_per_blk}/{line.key.num_kv_heads_per_blk}"),
            ("head_dim", str(line.key.head_dim)),
            ("page", str(line.key.page_size)),
            ("tokens", str(line.key.max_num_batched_tokens)),
            ("length", str(line.key.max_model_len)),
        )
        for line in lines
    ]
    shared = set.intersection(*(set(row) for row in cells))
    title = ", ".join(f"{name} {value}" for name, value in cells[0] if (name, value) in shared)
    out = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), header_style="")
    columns = [name for name, value in cells[0] if (name, value) not in shared]
    for name in (*columns, "winner", "us", "default", "published"):
        out.add_column(name, justify="right", no_wrap=True)
    for row, line in zip(cells, lines, strict=True):
        out.add_row(
            *(value for name, value in row if (name, value) not in shared),
            f"{line.blocks[0]},{line.blocks[1]}",
            f"{line.latency_us:.4g}",
            _cost(line.blocks, line.incumbent.default, line.default_cost),
            _cost(line.blocks, line.incumbent.published, line.published_cost),
        )
    return title, out


def _legend(lines: list[Line]) -> str:
    """What the columns mean, and how far the numbers may be trusted."""
    sources = sorted({line.source for line in lines})
    trust = {
        results.MEASURED: "measured on a TPU",
        results.MODELLED: "modelled from the compiler's schedule, not timed on a TPU",
        results.INTERPRETED: "interpreted on a CPU, no timing of a TPU",
    }
    return (
        "winner: num_kv_pages_per_blk,num_queries_per_blk. us: one call, geometric mean over the workloads, "
        + " or ".join(trust[source] for source in sources)
        + ". default, published: what JAX's look-up falls back to, and what its table holds; "
        "= is the winner itself, ? was not swept, - is not listed."
    )


_SHORT = {
    "bfloat16": "bf16",
    "float32": "f32",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
    "float8_e4m3b11fnuz": "e4m3b",
    "int8": "i8",
    "int4": "i4",
}


def _short_dtypes(key: TableKey) -> str:
    """The KV dtype, as the queries' follows from it but for rare cases, which name both."""
    q, kv = _SHORT.get(key.q_dtype, key.q_dtype), _SHORT.get(key.kv_dtype, key.kv_dtype)
    return kv if q == kv or q == "bf16" else f"{q}/{kv}"


def _cost(winner: BlockSizes, blocks: BlockSizes | None, cost: float | None) -> str:
    """What another pair costs beside the winner: '=', '+12%', '?' where it was not tried, '-' for none."""
    if blocks is None:
        return "-"
    if blocks == winner:
        return "="
    pair = f"{blocks[0]},{blocks[1]}"
    return f"{pair} ?" if cost is None else f"{pair} +{(cost - 1) * 100:.0f}%"
