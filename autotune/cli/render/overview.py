"""Winners as text for a terminal of 80 columns, markdown for a pull request, csv and json for other tools."""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autotune.analysis.overview import Line, Overview, Rival
from autotune.io.terminal import WIDTH, cell, counted, folded, printable
from autotune.kernel.problem import BlockSizes, TableKey
from autotune.results import schema, winners
from autotune.results.baselines import uncompared_text
from autotune.tpu.generations import MIB

if TYPE_CHECKING:
    from rich.table import Table

_OVERFLOWS = ("vmem_oom", "smem_oom")
_NARROWED_SHOWN = 5
FORMATS = ("text", "csv", "json", "markdown")
TRUST = {
    schema.MEASURED: "measured on a TPU",
    schema.MODELLED: "modelled from the compiler's schedule, not timed on a TPU",
    schema.INTERPRETED: "interpreted on a CPU, no timing of a TPU",
}


def render(seen: Overview, form: str) -> str:
    """The overview in one of FORMATS; it ends with a newline.

    text and markdown are for people, and round; csv has the winners alone, json all that there is, both with
    every digit and column.
    """
    if form == "csv":
        return _csv(seen)
    if form == "json":
        return json.dumps(_json(seen), indent=1) + "\n"
    return "\n".join(_text(seen, markdown=form == "markdown")) + "\n"


def record(line: Line) -> dict[str, Any]:
    """A winner by column; None where there is no value. A cost of 1.25 is 25% above the winner's latency; a
    status is ok, why the pair failed, or None where it was not tried."""
    won = line.won
    out: dict[str, Any] = {
        "target": line.target,
        **line.key._asdict(),
        **line.settings,
        **line.blocks._asdict(),
        "source": line.source,
        "latency_us": line.latency_us,
        "latency_low_us": line.low_us,
        "latency_high_us": line.high_us,
        **{name: won[name] for name in ("workloads", "of_workloads", "compared", "candidates")},
        **{name: won[name] for name in (*winners.PASSED_OVER, "tied", "vmem_used_bytes")},
    }
    for name, rival in (("default", line.default), ("published", line.published)):
        for column in BlockSizes._fields:
            out[f"{name}_{column}"] = getattr(rival.blocks, column) if rival else None
        out[f"{name}_cost"] = rival.cost if rival else None
        out[f"{name}_status"] = rival.status if rival else None
    return out | {name: won[name] for name in ("model", *schema.TOOL_COLUMNS)}


def _csv(seen: Overview) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    for number, line in enumerate(seen.lines):
        values = record(line)
        if number == 0:
            writer.writerow(values)
        writer.writerow("" if value is None else cell(value) for value in values.values())
    return file.getvalue()


def _json(seen: Overview) -> dict[str, Any]:
    return {
        "winners": [record(line) for line in seen.lines],
        "candidates": seen.statuses,
        "failing": {
            what: {"keys": keys, "statuses": by_status} for what, (by_status, keys) in seen.failing.items()
        },
        "without_winner": [
            {"target": target, **key._asdict(), "why": why} for target, key, why in seen.without_winner
        ],
        "unfinished": [
            {"target": sweep.target, "begun": sweep.time, "keys": len(sweep.keys), "keys_without_rows": keys}
            for sweep, keys in seen.unfinished
        ],
    }


def _text(seen: Overview, *, markdown: bool) -> Iterator[str]:
    for title, lines in _groups(seen.lines):
        yield from (f"### {title}", "") if markdown else (folded(title),)
        yield from _rendered(_table(lines), markdown)
        yield ""
    texts = list(_notes(seen))
    for text in texts:
        yield from [text, ""] if markdown and text is not texts[-1] else [text if markdown else folded(text)]


def _notes(seen: Overview) -> Iterator[str]:
    if seen.lines:
        yield _legend(seen.lines)
        yield seen.compared
        for target, key, said in seen.narrowed[:_NARROWED_SHOWN]:
            yield f"not all rows count on {target} for ({', '.join(map(str, key))}): {said}"
        if (more := len(seen.narrowed) - _NARROWED_SHOWN) > 0:
            yield f"nor on {counted(more, 'key')} more: --format json has the numbers of each"
    else:
        yield "no candidate is ok so far: nothing can win yet"
    for source, by_status in seen.statuses.items():
        counts = ", ".join(f"{count} {printable(status)}" for status, count in by_status.items())
        if source == schema.INTERPRETED:
            yield f"a test of the path, interpreted on a CPU, of no say in the winners: {counts}"
        else:
            yield f"candidates {source}: {counts}"
    if not seen.statuses:
        yield "candidates: none"
    for target, key, why in seen.without_winner:
        yield f"no winner on {target} for ({', '.join(map(str, key))}): {why}"
    for what, (failed, keys) in seen.failing.items():
        yield from _failing(f"JAX's {'default' if what == 'default' else 'published value'}", failed, keys)
    if seen.uncompared:
        yield uncompared_text(seen.uncompared, len(seen.lines))
    for sweep, missing in seen.unfinished:
        without = f"; {counted(missing, 'key')} without rows yet" if missing else ""
        yield (
            f"unfinished: {sweep}{without}. If it is not running, its command goes on with it, and winners "
            "may change till then"
        )


def _failing(what: str, failed: Mapping[str, int], keys: int) -> Iterator[str]:
    """On how many keys JAX's default, or its published value, fails; nothing where it fails on none."""
    overflows = {status: count for status, count in failed.items() if status in _OVERFLOWS}
    others = {status: count for status, count in failed.items() if status not in _OVERFLOWS}
    for fails, by_status in (("does not fit", overflows), ("fails on", others)):
        if by_status:
            counts = ", ".join(f"{count} {printable(status)}" for status, count in by_status.items())
            yield f"{what} {fails} {sum(by_status.values())} of {counted(keys, 'key')}: {counts}"


def _groups(lines: Sequence[Line]) -> Iterator[tuple[str, list[Line]]]:
    """Lines whose numbers may stand in one column, so that a table is narrow; with what they share."""

    def shared(line: Line) -> list[tuple[str, str]]:
        settings = [(name, value) for name, value in line.settings.items() if value is not None]
        return [
            ("target", line.target),
            ("dtype", _short_dtypes(line.key)),
            ("head_dim", str(line.key.head_dim)),
            *(_setting(name, value) for name, value in settings),
            *([] if line.source == schema.MODELLED else [("source", line.source.upper())]),
        ]

    for common, group in itertools.groupby(sorted(lines, key=lambda line: [*map(str, shared(line))]), shared):
        members = list(group)
        same = [*common, *_shared_columns(members)]
        yield ", ".join(f"{name} {value}" for name, value in same), members


def _setting(name: str, value: Any) -> tuple[str, str]:
    if name != "vmem_limit_bytes":
        return name, str(value)
    return "vmem_limit", f"{value // MIB} MiB" if value % MIB == 0 else f"{value / 1024:g} KiB"


def _columns(line: Line) -> list[tuple[str, str]]:
    key = line.key
    return [
        ("q/kv", f"{key.num_q_heads_per_blk}/{key.num_kv_heads_per_blk}"),
        ("page", str(key.page_size)),
        ("tokens", str(key.max_num_batched_tokens)),
        ("length", str(key.max_model_len)),
    ]


def _shared_columns(lines: Sequence[Line]) -> list[tuple[str, str]]:
    found = set.intersection(*(set(_columns(line)) for line in lines))
    return [column for column in _columns(lines[0]) if column in found]


def _table(lines: Sequence[Line]) -> Table:
    from rich import box
    from rich.table import Table

    out = Table(box=box.MARKDOWN)
    shared = _shared_columns(lines)
    names = [name for name, value in _columns(lines[0]) if (name, value) not in shared]
    for name in (*names, "pages,queries", "us", "default", "published"):
        out.add_column(name, justify="right", no_wrap=True)
    for line in lines:
        out.add_row(
            *(value for name, value in _columns(line) if name in names),
            f"{line.blocks[0]},{line.blocks[1]}",
            f"{line.latency_us:.4g}",
            _cost(line.blocks, line.default),
            _cost(line.blocks, line.published),
        )
    return out


def _rendered(table: Table, markdown: bool) -> list[str]:
    """A table as lines of text without any styles."""
    from rich import box
    from rich.console import Console

    if not markdown:
        # A line below the names, and spaces.
        table.box = box.Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)
        table.pad_edge, table.padding = False, (0, 1, 0, 0)
    file = io.StringIO()
    Console(file=file, width=2 * WIDTH if markdown else WIDTH, color_system=None, force_terminal=False).print(
        table
    )
    lines = [line.rstrip() for line in file.getvalue().splitlines() if line.strip()]
    if markdown:  # numbers to the right
        lines[1] = lines[1].replace("-|", ":|")
    return lines


def _legend(lines: Sequence[Line]) -> str:
    """What the columns mean, and how far the numbers may be trusted."""
    sources = sorted({line.source for line in lines})
    return (
        "Each row is a key: query and KV heads of a block, page size, max_num_batched_tokens, max_model_len. "
        "pages,queries: its fastest num_kv_pages_per_blk,num_queries_per_blk. us: one call, geometric mean "
        "over the workloads, "
        + " or ".join(TRUST[source] for source in sources)
        + ". default, published: what JAX's look-up falls back to, and what its table holds; "
        "= the same pair, ! failed, ? was not swept, - is not listed."
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


def _cost(winner: BlockSizes, rival: Rival | None) -> str:
    """What another pair costs beside the winner: '=', '+12%', '!' where it failed, '?' where it was not
    tried, '-' for none."""
    if rival is None:
        return "-"
    if rival.blocks == winner:
        return "="
    pair = f"{rival.blocks[0]},{rival.blocks[1]}"
    if rival.cost is None:
        return f"{pair} !" if rival.status and rival.status != "ok" else f"{pair} ?"
    percent = (rival.cost - 1) * 100
    return f"{pair} +{percent:.0f}%" if round(percent) else f"{pair} <1%"
