"""What is wrong with a table: rows that no call finds, that do not fit, that are slow."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from autotune.errors import UsageError
from autotune.kernel.problem import DTYPE_BITS, BlockSizes, Program, Settings, TableKey, next_power_of_2
from autotune.scoreboard import Scoreboard
from autotune.tables.dialects import JAX
from autotune.tables.table import Key, Table
from autotune.tpu.chips import GENERATIONS, MIB
from autotune.tpu.compiler import Compiled

# Kinds of findings in the order of a report, each with what it says of one or of several.
KINDS = {
    "shared-name": "names that two generations share: each gets the rows meant for the other",
    "unknown-device": "names that no generation's look-up asks for",
    "unreachable": "keys that no call finds: a look-up rounds them to another key",
    "malformed": "keys that no look-up builds",
    "untileable": "keys with heads that the kernel never has in one block",
    "repeated": "keys written more than once, with one value",
    "above-call": "values above what their call has, which a look-up cuts down",
    "does-not-compile": "entries that do not compile",
    "slow": "entries slower than the best candidate, by the rows",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong.

    key is None for what concerns a whole device. replacement: the key that this one should be. line: of the
    table's file, where there is one. detail: further values, for json.
    """

    kind: str
    device: str
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
    """What can be said without compiling: of names, keys that no call finds, repeats, values too large."""
    for device, rows in table.devices.items():
        generations = table.dialect.generations(device)
        if len(generations) > 1:
            yield Finding(
                kind="shared-name",
                device=device,
                message=f"{device!r} is what the look-up asks for on {' and '.join(generations)}: their "
                f"kernels compile differently, and one of them gets {len(rows)} rows not tuned for it",
                detail={"generations": list(generations), "rows": len(rows)},
            )
        elif not generations:
            yield Finding(
                kind="unknown-device",
                device=device,
                message=f"{device!r} is the name of no generation in the {table.dialect} dialect: it knows "
                + ", ".join(map(repr, table.dialect.written.values())),
            )
        rounded = Counter(simple for key in rows if (simple := table.dialect.simplify(key)) != key)
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


def _row_findings(
    table: Table, device: str, key: Key, blocks: BlockSizes, rounded: Counter[Key | None]
) -> Iterator[Finding]:
    """Of one row. rounded: by simplified key, how many rows of the device are not it but rounded to it."""
    line = table.lines.get((device, key))
    make = functools.partial(Finding, device=device, key=key, line=line)
    simple = table.dialect.simplify(key)
    if simple is None or not _known_dtypes(table, key):
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
    elif isinstance(key, TableKey) and not _heads_in_one_block(*key[:4]):
        yield make(
            kind="untileable",
            message=f"{tuple(key)}: no call has {key[2]} query and {key[3]} KV heads in one block",
        )
    dimensions = table.dialect.dimensions(key)
    for position, name, bound in (
        (0, "pages_per_seq", _pages(dimensions)),
        (1, "max_num_batched_tokens", _tokens(dimensions)),
    ):
        if bound is not None and blocks[position] > bound:
            yield make(
                kind="above-call",
                message=f"{tuple(key)}: {BlockSizes._fields[position]}={blocks[position]} is more than "
                f"{name}={bound}",
                detail={"value": blocks[position], "bound": bound},
            )


def _known_dtypes(table: Table, key: Key) -> bool:
    dimensions = table.dialect.dimensions(key)
    return dimensions["q_dtype"] in DTYPE_BITS and dimensions["kv_dtype"] in DTYPE_BITS


def _pages(dimensions: dict[str, Any]) -> int | None:
    length = dimensions.get("max_model_len")
    return None if length is None else max(1, -(-length // dimensions["page_size"]))


def _tokens(dimensions: dict[str, Any]) -> int | None:
    return dimensions.get("max_num_batched_tokens", dimensions.get("max_num_tokens"))


@functools.cache
def _heads_in_one_block(q_dtype: str, kv_dtype: str, q_heads: int, kv_heads: int) -> bool:
    """Whether the installed kernel puts heads that round up to these in one block, for some call."""
    from autotune.kernel.tiling import heads_per_blk

    if q_heads > 4096 or kv_heads > 4096:
        return False
    for kv in range(kv_heads // 2 + 1, kv_heads + 1):
        for group in range(max(1, q_heads // (2 * kv)), q_heads // kv + 1):
            blk = heads_per_blk(group * kv, kv, q_dtype, kv_dtype)
            if blk and (next_power_of_2(blk[0]), next_power_of_2(blk[1])) == (q_heads, kv_heads):
                return True
    return False


def programs_of(table: Table, generation: str, settings: Settings) -> dict[Program, list[TableKey]]:
    """The distinct programs behind a generation's entries that calls find, each with its keys.

    Entries of a shared name count for each of its generations.
    """
    out: dict[Program, list[TableKey]] = {}
    for key, blocks in table.rows_of(generation).items():
        if JAX.simplify(key) != key or not _known_dtypes(table, key) or not _heads_in_one_block(*key[:4]):
            continue
        if key.num_q_heads_per_blk % key.num_kv_heads_per_blk:
            continue
        problem = key.canonical_problem()
        clamped = blocks.clamped(problem.pages_per_seq, problem.max_num_batched_tokens)
        out.setdefault(Program(layout=problem.layout, blocks=clamped, settings=settings), []).append(key)
    return out


Compile = Callable[[list[Any]], Iterable[tuple[Any, Compiled]]]


def sample(programs: list[Program], limit: int | None) -> list[Program]:
    """At most `limit` of the programs, evenly spaced, in their order."""
    if limit is None or limit >= len(programs):
        return programs
    return [programs[i * len(programs) // limit] for i in range(limit)]


def compile_findings(
    table: Table, generation: str, programs: dict[Program, list[TableKey]], verdicts: dict[Program, Compiled]
) -> Iterator[Finding]:
    """One finding for each entry whose program the compiler refuses."""
    device = table.device_of(generation)
    assert device is not None
    for program, verdict in verdicts.items():
        if verdict.status == "ok":
            continue
        for key in programs[program]:
            value = tuple(table.devices[device][key])
            yield Finding(
                kind="does-not-compile",
                device=device,
                key=key,
                line=table.lines.get((device, key)),
                message=f"{tuple(key)}: {value} on {generation}: {said(verdict)}",
                detail={
                    "target": generation,
                    "status": verdict.status,
                    "needed_bytes": verdict.needed_bytes,
                    "limit_bytes": verdict.limit_bytes,
                    "error": verdict.error,
                },
            )


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
        device = table.device_of(generation)
        for key, blocks in table.rows_of(generation).items():
            if JAX.simplify(key) != key:
                continue
            best = board.best(generation, key)
            score = board.score(generation, key, blocks)
            if best is None or score is None:
                unscored += 1
                continue
            assert device is not None
            ratio = score.score / best[1].score
            if ratio > 1 + slower_than:
                findings.append(
                    Finding(
                        kind="slow",
                        device=device,
                        key=key,
                        line=table.lines.get((device, key)),
                        message=f"{tuple(key)}: {tuple(blocks)} on {generation} takes "
                        f"{score.latency_us:.4g} us, {(ratio - 1) * 100:.0f}% more than {tuple(best[0])} "
                        f"({best[1].source})",
                        detail={
                            "target": generation,
                            "ratio": ratio,
                            "best": list(best[0]),
                            "source": best[1].source,
                        },
                    )
                )
    return findings, unscored


def targets_of(table: Table, target: str | None) -> list[str]:
    """The generations that a table is checked for: the one asked for, or all that it has rows for.

    Raises:
      UsageError: it has no rows for the one asked for.
    """
    if target is None:
        return table.generations()
    if not table.rows_of(target):
        have = ", ".join(table.generations()) or "none"
        raise UsageError(f"{table.shown} has no rows for {target}: it has rows for {have}")
    return [GENERATIONS[target].name]
