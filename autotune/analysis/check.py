"""What is wrong with a table: rows that no call finds, that do not fit, that are slow."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from autotune.kernel.jax_rpa.call import default_blocks
from autotune.kernel.problem import BlockSizes, Program, Settings, TableKey, next_power_of_2
from autotune.results.scores import Scoreboard
from autotune.tables import lookups
from autotune.tables.dialects import JAX
from autotune.tables.keys import Key, call_of
from autotune.tables.table import Table
from autotune.tpu.compiler import Compiled
from autotune.tpu.generations import GENERATIONS, MIB

# Kinds of findings in the order of a report, each with what it says of one or of several.
KINDS = {
    "unread": "a table that nothing reads any more",
    "empty": "no rows",
    "no-rows-there": "a generation without rows: every call there gets the default",
    "shared-name": "names that two generations share: each gets the rows meant for the other",
    "unknown-device": "names that the look-up never asks for",
    "not-consulted": "names that the look-up asks for where it never consults the rows",
    "unreachable": "keys that no call finds: a look-up rounds them to another key",
    "malformed": "keys that no look-up builds",
    "untileable": "keys with heads that the kernel never has in one block",
    "repeated": "keys written more than once, with one value",
    "above-call": "values above what their call has, which a look-up cuts down",
    "edge": "page sizes whose values all have the most pages that the table has: larger ones were not tried",
    "does-not-compile": "entries that do not compile",
    "slow": "entries slower than the best candidate, by the rows",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong.

    key is None for what concerns a whole device, and device too for the whole table. replacement: the key
    that this one should be. line: of the table's file, where there is one. detail: further values, for json.
    """

    kind: str
    device: str | None
    message: str
    key: Key | None = None
    line: int | None = None
    replacement: Key | None = None
    detail: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Report:
    """The findings on a table, and how much of it was looked at.

    compiled: programs by verdict, for each generation compiled for. programs: distinct ones that there are.
    unscored: entries whose pair the rows hold no latency of.
    """

    table: Table
    findings: list[Finding]
    compiled: dict[str, Counter[str]] = dataclasses.field(default_factory=dict)
    programs: dict[str, int] = dataclasses.field(default_factory=dict)
    unscored: int = 0

    def by_kind(self) -> dict[str, list[Finding]]:
        """The findings of each kind that there is one of, in the order of KINDS."""
        groups: dict[str, list[Finding]] = {kind: [] for kind in KINDS}
        for finding in self.findings:
            groups[finding.kind].append(finding)
        return {kind: found for kind, found in groups.items() if found}


def static_findings(table: Table) -> Iterator[Finding]:
    """What can be said without compiling: of names, keys that no call finds, repeats, values too large.

    Where the table's look-up is not known, nothing is said of what only a look-up decides.
    """
    if table.rule and table.rule.unread:
        yield Finding(
            kind="unread",
            device=None,
            message=f"{table.rule.whose} reads it no more since {table.rule.unread}",
            detail={"since": table.rule.unread},
        )
    if not table.devices:
        yield Finding(kind="empty", device=None, message="the table has no device, and so no row")
    for device, rows in table.devices.items():
        yield from _device_findings(table, device)
        yield from _edges(table, device)
        rounded = Counter(simple for key in rows if (simple := _simplified(table, key)) != key)
        for key, blocks in rows.items():
            yield from _row_findings(table, device, key, blocks, rounded)
    for repeat in table.repeats:
        yield Finding(
            kind="repeated",
            device=repeat.device,
            key=repeat.key,
            line=repeat.line,
            message=f"{tuple(repeat.key)} is in line {repeat.first_line} already, with this value",
        )


def _device_findings(table: Table, device: str) -> Iterator[Finding]:
    """Of one name: what it is asked for on, and whether there is anything under it."""
    make = functools.partial(Finding, device=device)
    rows, rule, meant = table.devices[device], table.rule, table.dialect.generations(device)
    if not rows:
        yield make(kind="empty", message=f"{device!r} has no rows")
    if rule is None:
        if not meant:
            known = ", ".join(map(repr, table.dialect.written.values()))
            yield make(
                kind="unknown-device",
                message=f"{device!r} is the name of no generation in the {table.dialect} dialect: it knows "
                + known,
            )
        return
    owners = rule.owners(device)
    if not owners:
        asked = ", ".join(f"{' or '.join(map(repr, names))} on {g}" for g, names in rule.asks.items())
        means = f" (it means {' or '.join(meant)})" if meant else ""
        yield make(
            kind="unknown-device",
            message=f"the look-up {rule} never asks for {device!r}{means}: it asks for {asked}",
        )
    elif rule.skips.issuperset(owners):
        yield make(
            kind="not-consulted",
            message=f"{device!r}: the look-up {rule} never consults rows on {' and '.join(owners)}",
        )
    elif len(owners) > 1 and not rule.nearest:
        yield make(
            kind="shared-name",
            message=f"{device!r} is what the look-up asks for on {' and '.join(owners)}: their "
            f"kernels compile differently, and one of them gets {len(rows)} rows not tuned for it",
            detail={"generations": list(owners), "rows": len(rows)},
        )


# Of a page size: fewer keys than this say nothing of its grid, and a grid to this many pages is not small.
LEAST_KEYS, SMALL_GRID = 4, 16


def _edges(table: Table, device: str) -> Iterator[Finding]:
    """Page sizes at which longer calls all have the most pages in a block that any value has.

    In JAX's table of April 2025 such keys had 32 to 128 pages, and the best of up to 16 is by the model up to
    69% slower: docs/model.md.
    """
    by_page: dict[int, list[tuple[int, int]]] = {}
    for key, blocks in table.devices[device].items():
        dimensions = table.dialect.dimensions(key)
        page = dimensions.get("page_size", 0)  # of a malformed key there may be none
        if page > 0 and (pages := _pages(dimensions)):
            by_page.setdefault(page, []).append((pages, blocks.num_kv_pages_per_blk))
    for page, lines in sorted(by_page.items()):
        most = max(value for _, value in lines)
        longer = [value for pages, value in lines if pages > most]
        if most <= SMALL_GRID and len(longer) >= LEAST_KEYS and set(longer) == {most}:
            yield Finding(
                kind="edge",
                device=device,
                message=f"page size {page}: all {len(longer)} keys of more than {most} pages have {most}",
                detail={"page_size": page, "keys": len(longer), "num_kv_pages_per_blk": most},
            )


def _simplified(table: Table, key: Key) -> Key | None:
    """The key that its look-up makes of a key. Where that is not known: JAX's newest for a table in JAX's
    form, which is how rows are shared; for others the key itself."""
    if table.rule or table.dialect is JAX:
        return table.look_up.simplify(key)
    return None if call_of(key) is None else key


def _row_findings(
    table: Table, device: str, key: Key, blocks: BlockSizes, rounded: Counter[Key | None]
) -> Iterator[Finding]:
    """Of one row. rounded: by simplified key, how many rows of the device are not it but rounded to it."""
    line = table.lines.get((device, key))
    make = functools.partial(Finding, device=device, key=key, line=line)
    simple = _simplified(table, key)
    if simple is None:
        yield make(kind="malformed", message=f"{tuple(key)}: a part of it is nothing that a look-up writes")
        return
    if simple != key:
        other = table.devices[device].get(simple)
        there = "free" if other is None else f"there already, with {tuple(other)}"
        if other is None and rounded[simple] > 1:
            there += f" but for {rounded[simple] - 1} more that round to it"
        yield make(
            kind="unreachable",
            replacement=simple,
            message=f"{tuple(key)} is looked up as {tuple(simple)}, which is {there}",
            detail={"replacement_value": list(other) if other else None},
        )
    elif isinstance(key, TableKey) and not _tiled(table, key):
        yield make(
            kind="untileable",
            message=f"{tuple(key)}: no call has {key[2]} query and {key[3]} KV heads in one block",
        )
    parts = table.dialect.dimensions(key)
    tokens = parts.get("max_num_batched_tokens", parts.get("max_num_tokens"))
    for position, name, bound in (
        (0, "pages_per_seq", _pages(parts)),
        (1, "max_num_batched_tokens", tokens),
    ):
        if bound is not None and blocks[position] > bound:
            yield make(
                kind="above-call",
                message=f"{tuple(key)}: {BlockSizes._fields[position]}={blocks[position]} is more than "
                f"{name}={bound}",
                detail={"value": blocks[position], "bound": bound},
            )


def _pages(dimensions: dict[str, Any]) -> int | None:
    length = dimensions.get("max_model_len")
    return None if length is None else max(1, -(-length // dimensions["page_size"]))


def _tiled(table: Table, key: TableKey) -> bool:
    """Whether some call has a key's heads in one block, as its look-up rounds them."""
    return _in_one_block(*key[:4], rounded=table.rule is not lookups.UNROUNDED)


@functools.cache
def _in_one_block(q_dtype: str, kv_dtype: str, q_heads: int, kv_heads: int, *, rounded: bool) -> bool:
    """Whether the installed kernel puts these very heads in one block, or if rounded, for some call, heads
    that round up to these."""
    from autotune.kernel.jax_rpa.tiling import heads_per_blk

    if q_heads > 4096 or kv_heads > 4096:
        return False
    heads = q_heads, kv_heads
    if q_heads % kv_heads == 0 and heads_per_blk(*heads, q_dtype, kv_dtype) == heads:
        return True
    for kv in range(kv_heads // 2 + 1, kv_heads + 1) if rounded else ():
        for group in range(max(1, q_heads // (2 * kv)), q_heads // kv + 1):
            block = heads_per_blk(group * kv, kv, q_dtype, kv_dtype)
            if block and tuple(map(next_power_of_2, block)) == heads:
                return True
    return False


def programs_of(table: Table, generation: str, settings: Settings) -> dict[Program, list[TableKey]]:
    """The distinct programs behind a generation's entries that calls find, each with its keys.

    Entries of a shared name count for each of its generations.
    """
    out: dict[Program, list[TableKey]] = {}
    for key, blocks in table.rows_of(generation).items():
        if _simplified(table, key) != key or not _tiled(table, key):
            continue
        if key.num_q_heads_per_blk % key.num_kv_heads_per_blk:
            continue
        problem = key.canonical_problem()
        clamped = blocks.clamped(problem.pages_per_seq, problem.max_num_batched_tokens)
        out.setdefault(Program(layout=problem.layout, blocks=clamped, settings=settings), []).append(key)
    return out


def sample(programs: list[Program], limit: int | None) -> list[Program]:
    """At most `limit` of the programs, evenly spaced, in their order."""
    if limit is None or limit >= len(programs):
        return programs
    return [programs[i * len(programs) // limit] for i in range(limit)]


def _of_entry(table: Table, generation: str, kind: str, key: TableKey, text: str, **detail: Any) -> Finding:
    """What is wrong with the value that a generation has for a key. text: goes on after both."""
    device = table.device_of(generation)
    assert device is not None
    return Finding(
        kind=kind,
        device=device,
        key=key,
        line=table.lines.get((device, key)),
        message=f"{tuple(key)}: {tuple(table.devices[device][key])} on {generation}{text}",
        detail={"target": generation, **detail},
    )


def compile_findings(
    table: Table, generation: str, programs: dict[Program, list[TableKey]], verdicts: dict[Program, Compiled]
) -> Iterator[Finding]:
    """One finding for each entry whose program the compiler refuses."""
    shown = ("status", "needed_bytes", "limit_bytes", "error")
    for program, verdict in verdicts.items():
        if verdict.status != "ok":
            detail = {name: getattr(verdict, name) for name in shown}
            for key in programs[program]:
                yield _of_entry(table, generation, "does-not-compile", key, f": {said(verdict)}", **detail)


def said(verdict: Any) -> str:
    """A verdict that is not ok in a few words, with the bytes where it has them."""
    if verdict.needed_bytes and verdict.limit_bytes:
        what = "VMEM" if verdict.status == "vmem_oom" else "SMEM"
        needed, limit = verdict.needed_bytes / MIB, verdict.limit_bytes / MIB
        return f"{verdict.status}, needs {needed:.2f} MiB of {what}, limit {limit:.2f}"
    return f"{verdict.status}, {verdict.error}"


def slow_findings(
    table: Table, generations: Iterable[str], board: Scoreboard, slower_than: float
) -> tuple[list[Finding], int]:
    """Entries that cost more than (1 + slower_than) times the best pair of the rows.

    Also, how many entries the rows say nothing of.
    """
    findings, unscored = [], 0
    for generation in generations:
        for key, blocks in table.rows_of(generation).items():
            if _simplified(table, key) != key:
                continue
            best, score = board.best(generation, key), board.score(generation, key, blocks)
            if best is None or score is None:
                unscored += 1
                continue
            fastest, source = best[0], best[1].source
            ratio = score.score / best[1].score
            if ratio > 1 + slower_than:
                text = (
                    f" takes {score.latency_us:.4g} us, {(ratio - 1) * 100:.0f}% more than "
                    f"{tuple(fastest)} ({source})"
                )
                detail = {"ratio": ratio, "best": list(fastest), "source": source}
                findings.append(_of_entry(table, generation, "slow", key, text, **detail))
    return findings, unscored


def targets_of(table: Table, target: str | None) -> list[str]:
    """The generations that a table is checked for: the one asked for, or all that it has rows for; none if
    it has no rows for the one asked for."""
    if target is None:
        return table.generations()
    return [target] if table.rows_of(target) else []


def without_rows(table: Table, target: str) -> Finding:
    """What calls get on a generation that a table has no rows for."""
    rule = table.look_up
    default = f", {tuple(default_blocks(GENERATIONS[target].version))}" if table.dialect is JAX else ""
    never = f", and its look-up {rule} never consults rows there" if target in rule.skips else ""
    have = ", ".join(table.generations()) or "no generation"
    return Finding(
        kind="no-rows-there",
        device=None,
        message=f"no rows for {target}{never}: every call there gets the default{default}; it has rows for "
        f"{have}",
        detail={"target": target},
    )
