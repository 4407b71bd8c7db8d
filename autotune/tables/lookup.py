"""Look-ups: block sizes of a call from a table, and where the answer came from."""

from __future__ import annotations

import functools
import logging
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from autotune.kernel.problem import DTYPE_BITS, BlockSizes, TableKey
from autotune.tables import lookups
from autotune.tables.keys import Call, Rows
from autotune.tables.table import Table
from autotune.tpu.generations import GENERATIONS, TOO_OLD

_LOGGER = logging.getLogger("autotune.tables")
EXACT, NEAREST, DEFAULT = "exact", "nearest", "default"
_REMEMBERED = 4096  # calls whose answer is kept; an engine has some dozens of shapes
_LAYOUT = 6  # the first parts of a key: dtypes, heads, head_dim and page_size


class Answer(NamedTuple):
    """What a look-up answers.

    blocks: no larger than the call. origin: exact, nearest or default. key: the simplified key that was asked
    for. found: the key whose value it is; None for the default. distance: from key to found, in doublings;
    0 if exact. value: as the table has it, before it is cut to the call. passed: a nearer key whose value is
    only a lower bound for the call; found itself where the table has nothing better.
    """

    blocks: BlockSizes
    origin: str
    key: TableKey
    found: TableKey | None
    distance: float
    value: BlockSizes
    passed: TableKey | None = None


def distance(key: TableKey, other: TableKey) -> float:
    """Doublings between two keys of one layout: of max_num_batched_tokens plus of max_model_len.

    Infinite between layouts: another layout is another program, of which nobody says that it fits.
    """
    if key[:_LAYOUT] != other[:_LAYOUT]:
        return math.inf
    return abs(math.log2(key[6] / other[6])) + abs(math.log2(key[7] / other[7]))


class LookUp:
    """Answers calls for one generation out of one table of the jax dialect, as the table's own look-up does.

    table: None for defaults only. generation: None for a device of none that is known, which has defaults.
    version: the TPU's, which decides the default there.
    """

    def __init__(self, table: Table | None, generation: str | None, version: int) -> None:
        self.table = table
        self.generation = generation
        self.version = version
        self.rule = lookups.AUTOTUNE if table is None else table.look_up
        self.device: str | None = None  # the name that it asks for, where the table has it
        self._rows: Rows = {}
        if table is not None and generation is not None:
            self.device, self._rows = self.rule.rows(table.devices, generation)
        self._layouts: dict[tuple[Any, ...], list[TableKey]] | None = None
        self._warn = functools.cache(self._warn_once)
        # Bound once, so that a repeated call costs a hash and nothing else.
        self.blocks: Callable[..., BlockSizes] = functools.lru_cache(maxsize=_REMEMBERED)(self._blocks)

    def _blocks(self, *args: Any, **kwargs: Any) -> BlockSizes:
        """The answer to a call as `call_with` takes it, with a warning where no row of its key is there."""
        answer = self.answer(call_with(*args, **kwargs))
        if answer.origin != EXACT:
            self._warn(answer.key, answer.found, answer.value)
        return answer.blocks

    def _warn_once(self, key: TableKey, found: TableKey | None, value: BlockSizes) -> None:
        """A call that the table does not have may run far slower than it could."""
        instead = f"those of the nearest key {tuple(found)}" if found else "the default"
        device = self.generation or "this device"
        _LOGGER.warning(
            "no tuned block sizes for %s and the key %s: using %s, %s",
            *(device, tuple(key), instead, tuple(value)),
        )

    def answer(self, call: Call) -> Answer:
        """The answer to a call, and where it came from."""
        key = self.rule.key(call)
        assert isinstance(key, TableKey)  # look-ups of the jax dialect refuse no call

        def answered(
            value: BlockSizes, origin: str, found: TableKey | None = None, passed: TableKey | None = None
        ) -> Answer:
            blocks = value.clamped(call.pages_per_seq, call.max_num_tokens)
            return Answer(blocks, origin, key, found, distance(key, found) if found else 0.0, value, passed)

        if (exact := self._rows.get(key)) is not None:
            return answered(exact, EXACT, key)
        default = BlockSizes(*self.rule.default(self.version, call))
        if not self.rule.nearest or not (layout := self._layout(key)):
            return answered(default, DEFAULT)
        # Of two at one distance the longer and larger: a call cuts its value down to its own size.
        near = sorted(
            layout, key=lambda row: (distance(key, row), -row.max_model_len, -row.max_num_batched_tokens)
        )
        first = near[0]
        least = self._rows[first]
        bounds = _lower_bounds(least, first, key)
        if not any(bounds):
            return answered(least, NEAREST, first)

        def reaches(value: BlockSizes) -> bool:
            return all(v >= b for v, b, bound in zip(value, least, bounds, strict=True) if bound)

        for row in near[1:]:
            value = self._rows[row]
            if reaches(value) and not any(_lower_bounds(value, row, key)):
                return answered(value, NEAREST, row, first)
        # The default where the table shows that it fits: a smaller pair needs no more VMEM than a larger one.
        wanted = default.clamped(call.pages_per_seq, call.max_num_tokens)
        held = (self._rows[row] for row in layout)
        if reaches(wanted) and any(pages >= wanted[0] and queries >= wanted[1] for pages, queries in held):
            return answered(default, DEFAULT, passed=first)
        return answered(least, NEAREST, first, first)

    def _layout(self, key: TableKey) -> list[TableKey]:
        """The table's keys of a key's layout."""
        if self._layouts is None:
            self._layouts = {}
            for row in self._rows:
                self._layouts.setdefault(row[:_LAYOUT], []).append(TableKey(*row))
        return self._layouts.get(key[:_LAYOUT], [])


def _lower_bounds(value: BlockSizes, row: TableKey, key: TableKey) -> tuple[bool, bool]:
    """Which numbers of a row's value are as large as the row's own call, where the key's call is larger: they
    say only what is best at least."""
    return (
        value.num_kv_pages_per_blk >= row.pages_per_seq < key.pages_per_seq,
        value.num_queries_per_blk >= row.max_num_batched_tokens < key.max_num_batched_tokens,
    )


def call_with(
    q_dtype: Any,
    kv_dtype: Any,
    num_q_heads_per_blk: int,
    num_kv_heads_per_blk: int,
    head_dim: int,
    page_size: int,
    max_num_batched_tokens: int,
    pages_per_seq: int,
) -> Call:
    """A call from the arguments of JAX's own look-up."""
    heads = num_q_heads_per_blk, num_kv_heads_per_blk
    length = page_size * pages_per_seq
    dtypes = dtype_name(q_dtype), dtype_name(kv_dtype)
    return Call(*dtypes, *heads, head_dim, page_size, max_num_batched_tokens, length)


_DTYPE_NAMES: dict[Any, str] = {name: name for name in DTYPE_BITS}


def dtype_name(dtype: Any) -> str:
    """The name of a dtype, as keys have it."""
    try:
        return _DTYPE_NAMES[dtype]
    except KeyError:
        import jax.numpy as jnp

        return _DTYPE_NAMES.setdefault(dtype, str(jnp.dtype(dtype).name))


def device_version(device_kind: str) -> int:
    """The version number in a device_kind; -1 where it is no TPU."""
    match = re.search(r"TPU\s*v?(\d+)", device_kind)
    return int(match[1]) if match else -1


def generation_of(device_kind: str) -> str | None:
    """The generation's name of a device_kind, None if it is unknown."""
    return next((g.name for g in GENERATIONS.values() if device_kind in g.device_kinds), None)


def look_up_for(device_kind: str, table: Table | None = None) -> LookUp:
    """The look-up of a device: in the table, or by default in the generation's committed one.

    Raises:
      NotImplementedError: it is no TPU, or one before v4; in the words of JAX's own look-up.
    """
    from autotune.tables.load import committed, committed_path

    version, generation = device_version(device_kind), generation_of(device_kind)
    if version < 4:
        raise NotImplementedError(TOO_OLD)
    if table is None and generation is not None and committed_path(generation).is_file():
        table = committed(generation)
    return LookUp(table, generation, version)


@functools.cache
def _first_device_kind() -> str:
    import jax

    return str(jax.devices()[0].device_kind)


def current_device_kind() -> str:
    """The device_kind that a program is traced for: that of jax's default device, or else the first device.

    The first device is asked for once a process.
    """
    import jax

    device = jax.config.jax_default_device
    return getattr(device, "device_kind", None) or _first_device_kind()


@functools.cache
def _committed_look_up(device_kind: str) -> LookUp:
    return look_up_for(device_kind)


_config: Any = None  # jax.config, once jax is imported
_by_device: dict[Any, Callable[..., BlockSizes]] = {}  # by jax's default device, None for the first one


def _current_blocks() -> Callable[..., BlockSizes]:
    """The committed look-up of the current device; what it takes of each call's time is a dict's look-up."""
    global _config
    import jax

    blocks = _committed_look_up(current_device_kind()).blocks
    _config = jax.config
    _by_device[_config.jax_default_device] = blocks
    return blocks


def get_tuned_block_sizes(
    q_dtype: Any,
    kv_dtype: Any,
    num_q_heads_per_blk: int,
    num_kv_heads_per_blk: int,
    head_dim: int,
    page_size: int,
    max_num_batched_tokens: int,
    pages_per_seq: int,
) -> tuple[int, int]:
    """(num_kv_pages_per_blk, num_queries_per_blk) of a call on this process's TPU, by its committed table.

    JAX's own signature. Where the table has no such key, the nearest of the same layout answers, and JAX's
    default where there is none; `explain` says which.

    Raises:
      NotImplementedError: this process has no TPU, or one before v4.
    """
    try:
        blocks = _by_device[_config.jax_default_device]
    except (KeyError, AttributeError):
        blocks = _current_blocks()
    return blocks(
        q_dtype,
        kv_dtype,
        num_q_heads_per_blk,
        num_kv_heads_per_blk,
        head_dim,
        page_size,
        max_num_batched_tokens,
        pages_per_seq,
    )


def explain(*args: Any, table: Table | None = None, device_kind: str | None = None, **kwargs: Any) -> Answer:
    """What get_tuned_block_sizes answers for the same arguments, with where it came from.

    table: to look in; the device's committed one by default. device_kind: of the TPU to answer for; this
    process's by default.

    Raises:
      NotImplementedError: the device is no TPU, or one before v4.
    """
    kind = device_kind or current_device_kind()
    look_up = _committed_look_up(kind) if table is None else look_up_for(kind, table)
    return look_up.answer(call_with(*args, **kwargs))
