"""The parts of the page that need no script: every text of a row is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from autotune.analysis.diff import Regret
from autotune.analysis.overview import Rival
from autotune.analysis.report.data import Report
from autotune.analysis.report.entries import Entry
from autotune.analysis.report.provenance import Source
from autotune.analysis.report.regret import Matrix
from autotune.emit import settings_text
from autotune.io.terminal import counted
from autotune.results import schema

_TRUST = {
    schema.MEASURED: "measured on a TPU",
    schema.MODELLED: "modelled from the compiler's schedule, not timed on a TPU",
    schema.INTERPRETED: "interpreted on a CPU: they show that the kernel is right, and are no latencies",
}


def title(report: Report) -> str:
    """Plain text."""
    targets = ", ".join(dict.fromkeys(entry.target for entry in report.keys.entries))
    return f"Block sizes of ragged paged attention on TPU {targets}"


def notice(report: Report) -> str:
    """How far the numbers may be trusted."""
    counts = report.provenance.counts
    said = [
        f"{sum(counts[source].values()):,} rows are {_TRUST[source]}"
        for source in schema.SOURCES
        if source in counts
    ]
    strong = schema.MODELLED in counts and schema.MEASURED not in counts
    lead = "<strong>Modelled, not measured.</strong> " if strong else ""
    return f'<p class="notice" role="note">{lead}{escape("; ".join(said))}.</p>'


def summary(report: Report) -> str:
    """The figures that one asks for first."""
    keys = report.keys.entries
    won = [entry for entry in keys if entry.winner]
    counts = report.provenance.counts
    rows = sum(sum(by_status.values()) for by_status in counts.values())
    failures = rows - sum(by_status.get("ok", 0) for by_status in counts.values())
    facts = [(len(keys), "keys"), (rows, "rows"), (failures, "of them failures")]
    if len(won) < len(keys):
        facts.insert(1, (len(won), "with a winner"))
    if won:
        other = sum(entry.winner != entry.today for entry in won)
        facts.append((other, "keys whose winner is not what JAX's look-up hands out today"))
    for what, (failed, of) in report.failing.items():
        if failed:
            how = ", ".join(failed)
            value = "default" if what == "default" else "published value"
            facts.append((sum(failed.values()), f"of {counted(of, 'key')} where JAX's {value} fails: {how}"))
    items = "".join(f"<li><b>{number:,}</b> {escape(what)}</li>" for number, what in facts)
    return f'<ul class="facts">{items}</ul>'


def winners(report: Report) -> str:
    """All winners as a table."""
    head = [*("generation", "q/kv heads", "page", "tokens", "length", "dtype", "winner", "us", "source")]
    head += ["default", "published"]
    lines = [_winner(entry) for entry in report.keys.entries]
    # What tells equal keys apart: in two folders they may be of two settings.
    if len({entry.setting for entry in report.keys.entries}) > 1:
        settings = [
            settings_text(dict(zip(schema.SETTING_COLUMNS, s, strict=True))) for s in report.keys.settings
        ]
        head.append("setting")
        lines = [
            [*line, settings[entry.setting]] for line, entry in zip(lines, report.keys.entries, strict=True)
        ]
    return _table(head, lines, "Winners, one key a line")


def _winner(entry: Entry) -> list[str]:
    key = entry.key
    return [
        entry.target,
        f"{key.num_q_heads_per_blk}/{key.num_kv_heads_per_blk}",
        *map(str, (key.page_size, key.max_num_batched_tokens, key.max_model_len)),
        key.kv_dtype,
        _pair(entry.winner) or "none",
        f"{entry.us:.4g}" if entry.us else "",
        entry.runs[0].source,
        _cost(entry.default),
        _cost(entry.published) if entry.published else "not listed",
    ]


def _pair(blocks: Sequence[int] | None) -> str:
    return f"{blocks[0]},{blocks[1]}" if blocks else ""


def _cost(rival: Rival) -> str:
    """A pair and what it costs, or why it failed, or that it was not tried."""
    said = _above(rival.cost) if rival.cost is not None else rival.status or "not tried"
    return f"{_pair(rival.blocks)} {said}"


def _above(ratio: float) -> str:
    return f"{(ratio - 1) * 100:+.1f}%"


def agreement(report: Report) -> str:
    """The figures of predicted against measured, or why there are none."""
    figures = report.agreement.figures
    if not figures:
        return (
            "<p>No pair of block sizes was both modelled and measured, so there is nothing to compare. A "
            "sweep on a TPU host records both. How the model does against winners that were timed on TPUs "
            "is in docs/model.md of autotune.</p>"
        )
    head = ["generation", "points", "median error", "keys", "best predicted pair, by the clock"]
    rows = (
        [
            figure.target,
            f"{figure.points:,}",
            f"{figure.error * 100:.1f}%",
            f"{figure.keys:,}",
            "" if figure.regret is None else f"{_above(figure.regret)} above the best timed",
        ]
        for figure in figures
    )
    return _table(head, rows, "A point is one pair on one workload; geometric means over the keys")


def regret(report: Report) -> str:
    """A matrix a setting of the kernel."""
    if not report.regret:
        return "<p>Nothing has won yet.</p>"
    return (
        "<p>What the choices of a line cost on the generation of a column, above the best pair there: the "
        "geometric mean over the keys that all lines have, and the dearest key. A choice that was not tried "
        "there, or does not run, is counted and left out of the mean.</p>"
        + "".join(map(_matrix, report.regret))
    )


def _matrix(matrix: Matrix) -> str:
    heads = [
        f"on {name}, {' and '.join(s)}" for name, s in zip(matrix.generations, matrix.sources, strict=True)
    ]
    lines = []
    for name, cells in zip(matrix.tables, matrix.cells, strict=True):
        inner = "".join(map(_regret, cells))
        lines.append(f'<tr><th scope="row">{escape(name)}</th>{inner}</tr>')
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in ["choices", *heads])
    return (
        f'<div class="box" role="region" aria-label="Regret matrix" tabindex="0"><table class="matrix">'
        f"<caption>{escape(matrix.setting)}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _regret(cell: Regret | None) -> str:
    if cell is None or cell.mean is None:
        said = "no rows" if cell is None else _left_out(cell) or "no key in common"
        return f"<td>{escape(said)}</td>"
    shade = min(1.0, (cell.mean - 1) / 0.15) * 0.4  # a colour for the eye; the number in it says it all
    notes = [f"worst {_above(cell.worst or 1.0)}", f"{cell.keys:,} keys", _left_out(cell)]
    small = "".join(f"<br><small>{escape(note)}</small>" for note in notes if note)
    style = f"background: rgba(var(--cost), {shade:.2f})"
    return f'<td style="{style}"><b>{_above(cell.mean)}</b>{small}</td>'


def _left_out(cell: Regret) -> str:
    parts = [f"{cell.failed:,} do not run"] if cell.failed else []
    parts += [f"{cell.unknown:,} not tried"] if cell.unknown else []
    return ", ".join(parts)


def provenance(report: Report) -> str:
    """Files, versions, hosts, times and counts."""
    known = report.provenance
    made = f"{known.first} UTC" if known.first == known.last else f"{known.first} to {known.last} UTC"
    items = [*((name, ", ".join(values)) for name, values in known.facts), ("rows made", made)]
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in items)
    held = {status for by_status in known.counts.values() for status in by_status}
    statuses = [*(s for s in schema.STATUSES if s in held), *sorted(held.difference(schema.STATUSES))]
    rows = (
        [source, *(f"{by_status.get(s, 0):,}" for s in statuses)]
        for source, by_status in known.counts.items()
    )
    counts = _table(["source", *statuses], rows, "Rows by source and status")
    return f"<dl>{facts}</dl>{counts}{''.join(map(_folder, known.sources))}"


def _folder(source: Source) -> str:
    names = [f"<li>{escape(name)}</li>" for name in source.names]
    if source.files > len(names):
        names.append(f"<li>and {source.files - len(names):,} more</li>")
    files = f"{source.files:,} {'file' if source.files == 1 else 'files'}"
    return f"<details><summary>{escape(source.folder)}: {files}</summary><ul>{''.join(names)}</ul></details>"


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]], caption: str) -> str:
    names = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    lines = []
    for first, *rest in rows:
        cells = "".join(f"<td>{escape(str(cell))}</td>" for cell in rest)
        lines.append(f'<tr><th scope="row">{escape(str(first))}</th>{cells}</tr>')
    return (
        f'<div class="box" role="region" aria-label="{escape(caption)}" tabindex="0"><table>'
        f"<caption>{escape(caption)}</caption><thead><tr>{names}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )
