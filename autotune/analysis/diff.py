"""What changed between tables, along which dimension, and what each one's choices cost by the rows."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from autotune.errors import UsageError
from autotune.kernel.problem import BlockSizes, TableKey
from autotune.results.baselines import incumbent
from autotune.results.scores import Scoreboard
from autotune.tables.dialects import JAX
from autotune.tables.keys import Key, Rows
from autotune.tables.table import Table
from autotune.tpu.generations import GENERATIONS


class Change(NamedTuple):
    """A key whose pair differs."""

    key: Key
    before: BlockSizes
    after: BlockSizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceDiff:
    """One device of each table, compared; before and after are its names, None where a table lacks it."""

    before: str | None
    after: str | None
    added: dict[Key, BlockSizes]
    removed: dict[Key, BlockSizes]
    changed: list[Change]
    same: int

    @property
    def differs(self) -> bool:
        return bool(self.added or self.removed or self.changed)


class Dimension(NamedTuple):
    """How much of a change one part of the key explains.

    bits: mutual information between this part and whether a common key's pair changed; 0 explains nothing.
    shares: by value, (changed, common).
    """

    name: str
    bits: float
    shares: dict[Any, tuple[int, int]]


def compare(before: Table, after: Table) -> list[DeviceDiff]:
    """The tables' devices side by side: by name, else by generation; a single one of each whatever its name.

    Raises:
      UsageError: the tables are of two dialects.
    """
    if before.dialect is not after.dialect:
        raise UsageError(
            f"{before.shown} is of the {before.dialect} dialect and {after.shown} of {after.dialect}, "
            "whose keys are different things: compare tables of one dialect"
        )
    if len(before.devices) == len(after.devices) == 1:
        pairs: list[tuple[str | None, str | None]] = [(next(iter(before.devices)), next(iter(after.devices)))]
    else:
        pairs = list(_paired(before, after))
    return [_compare_rows(before, after, *pair) for pair in pairs]


def answers_for(published: Table, others: Sequence[Table]) -> Table:
    """What JAX answers today for the keys of other tables: its published value, or else its default.

    published: the installed JAX's own table. Of a generation of which no other table has rows it holds none.
    """
    devices: dict[str, dict[TableKey, BlockSizes]] = {}
    for name in dict.fromkeys(name for table in others for name in table.generations()):
        keys = dict.fromkeys(key for table in others for key in table.rows_of(name))
        now = {key: incumbent(GENERATIONS[name], key) for key in keys}
        devices[JAX.written[name]] = {key: pairs.published or pairs.default for key, pairs in now.items()}
    return dataclasses.replace(published, devices=devices, lines={}, repeats=())


def _paired(before: Table, after: Table) -> Iterable[tuple[str | None, str | None]]:
    left = dict.fromkeys(after.devices)
    for device in before.devices:
        same = device if device in left else None
        if same is None:
            wanted = before.dialect.generations(device)
            same = next((d for d in left if wanted and after.dialect.generations(d) == wanted), None)
        if same is not None:
            del left[same]
        yield device, same
    for device in left:
        yield None, device


def _compare_rows(before: Table, after: Table, old_name: str | None, new_name: str | None) -> DeviceDiff:
    old: Rows = before.devices[old_name] if old_name else {}
    new: Rows = after.devices[new_name] if new_name else {}
    common = [key for key in old if key in new]
    changed = [Change(key, old[key], new[key]) for key in common if old[key] != new[key]]
    return DeviceDiff(
        before=old_name,
        after=new_name,
        added={key: blocks for key, blocks in new.items() if key not in old},
        removed={key: blocks for key, blocks in old.items() if key not in new},
        changed=changed,
        same=len(common) - len(changed),
    )


def dimensions(before: Table, device: DeviceDiff) -> list[Dimension]:
    """The parts of a key by how much of the change they explain, the most first.

    A part that has one value in all keys explains nothing, and is left out.
    """
    if device.before is None or not device.changed:
        return []
    changed = {change.key for change in device.changed}
    common = [key for key in before.devices[device.before] if key not in device.removed]
    parts = [(before.dialect.dimensions(key), key in changed) for key in common]
    names = dict.fromkeys(name for part, _ in parts for name in part)
    out = []
    for name in names:
        total = Counter(part.get(name) for part, _ in parts)
        if len(total) < 2:
            continue
        hits = Counter(part.get(name) for part, is_changed in parts if is_changed)
        shares = {value: (hits[value], total[value]) for value in sorted(total, key=str)}
        if all(isinstance(value, int) for value in shares):
            shares = dict(sorted(shares.items()))
        out.append(Dimension(name, _mutual_information(shares), shares))
    return sorted(out, key=lambda dimension: -dimension.bits)


def _mutual_information(shares: dict[Any, tuple[int, int]]) -> float:
    """Bits that the value tells about whether a key changed."""

    def entropy(hits: int, total: int) -> float:
        p = hits / total
        return -sum(q * math.log2(q) for q in (p, 1 - p) if q)

    hits = sum(changed for changed, _ in shares.values())
    total = sum(common for _, common in shares.values())
    rest = sum(common * entropy(changed, common) for changed, common in shares.values()) / total
    return max(0.0, entropy(hits, total) - rest)


def directions(changed: Sequence[Change]) -> dict[str, tuple[int, int]]:
    """By block size, how many changes make it larger and how many smaller."""
    return {
        name: (
            sum(change.after[i] > change.before[i] for change in changed),
            sum(change.after[i] < change.before[i] for change in changed),
        )
        for i, name in enumerate(BlockSizes._fields)
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Regret:
    """What one table's choices cost on one generation, relative to the best pairs of the rows.

    mean: geometric mean over the keys, 1.0 being the best; None where no key can be told. worst: the dearest
    key's. keys: how many were compared. failed: choices that do not run there. unknown: choices that the rows
    say nothing of.
    """

    mean: float | None
    worst: float | None
    keys: int
    failed: int
    unknown: int


def regret_matrix(tables: Sequence[Table], board: Scoreboard) -> dict[tuple[int, str], Regret]:
    """By table (its position) and generation of the rows: what the table's choices cost there.

    A table with rows for the generation is asked for those; another, if it has one device, for that one's:
    what a table of one generation costs on another. Only keys that all tables hold are compared, so that the
    numbers of one column are of the same calls.

    Raises:
      UsageError: a table is not of the jax dialect.
    """
    for table in tables:
        if table.dialect is not JAX:
            raise UsageError(
                f"{table.shown} is of the {table.dialect} dialect: what its choices cost JAX's kernel is "
                "not known"
            )
    out = {}
    for generation in sorted(board.generations()):
        rows = [_rows_on(table, generation) for table in tables]
        keys = [key for key in rows[0] or {} if all(r is None or key in r for r in rows)]
        for position, own in enumerate(rows):
            if own is not None:
                out[position, generation] = _regret(own, keys, generation, board)
    return out


def _rows_on(table: Table, generation: str) -> Rows | None:
    rows = table.rows_of(generation)
    if not rows and len(table.devices) == 1:
        return next(iter(table.devices.values()))
    return rows or None


def _regret(rows: Rows, keys: Iterable[TableKey], generation: str, board: Scoreboard) -> Regret:
    ratios = []
    failed = unknown = 0
    for key in keys:
        best = board.best(generation, key)
        score = board.score(generation, key, rows[key])
        if best and score:
            ratios.append(score.score / best[1].score)
        elif board.failure(generation, key, rows[key]):
            failed += 1
        else:
            unknown += 1
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None
    return Regret(
        mean=mean, worst=max(ratios, default=None), keys=len(ratios), failed=failed, unknown=unknown
    )
