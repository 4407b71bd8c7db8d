"""Make JAX's own kernel take its block sizes from another table: in a `with` block, or in the whole process.

JAX's kernel asks for its block sizes while it is traced, and jax.jit keeps what it traced. So the table in
force is part of what jax.jit tells calls apart by (jax.make_user_context): a function traced before is traced
again, and goes back to its earlier program afterwards, from the cache. A program that was already compiled
ahead of time keeps the block sizes it was compiled with.

What JAX tells calls apart by is the thread's. Tasks of asyncio share a thread, so a context variable says
which table a task is in, and the thread's follows it whenever the event loop goes from one task to another.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel

from autotune.errors import UsageError
from autotune.tables.dialects import JAX
from autotune.tables.load import load
from autotune.tables.lookup import LookUp, current_device_kind, look_up_for
from autotune.tables.table import Table
from autotune.tpu import generations


@dataclasses.dataclass(frozen=True)
class _Choice:
    """A table in force. Two are equal, and share what jax.jit traced, if table and target are the same."""

    table: Table
    target: str | None


# The `use` blocks of this task, or of this thread, the innermost last.
_mine = contextvars.ContextVar[tuple[_Choice, ...]]("autotune.tables.use", default=())
# The same, as jax.jit sees it: of this thread. Outside of blocks, that of the process.
_in_force = jax.make_user_context(None)


class _Thread(threading.local):
    """What this thread has in `_in_force`. outside: the way back to having nothing there."""

    choice: _Choice | None = None
    outside: contextlib.AbstractContextManager[None] | None = None


_thread = _Thread()
_lock = threading.Lock()
_entered = 0  # `use` blocks, and one for an installed table
_installed = False
_own: Callable[..., tuple[int, int]] | None = None


@functools.lru_cache(maxsize=64)
def _look_up(choice: _Choice, device_kind: str) -> LookUp:
    return look_up_for(device_kind, choice.table)


def _block_sizes(*args: Any, **kwargs: Any) -> tuple[int, int]:
    """Stands in for the kernel's get_tuned_block_sizes; with no table in force, JAX's own."""
    choice: _Choice | None = _in_force.value
    if choice is None:
        own = _own or kernel.get_tuned_block_sizes
        return own(*args, **kwargs)
    kind = generations.by_name(choice.target).device_kinds[0] if choice.target else current_device_kind()
    return _look_up(choice, kind).blocks(*args, **kwargs)


def _put(blocks: tuple[_Choice, ...]) -> None:
    """Has jax.jit see the innermost block's choice in this thread; without a block, that of the process."""
    choice = blocks[-1] if blocks else None
    if choice is _thread.choice:
        return
    if _thread.outside is not None:
        _thread.outside.__exit__(None, None, None)
        _thread.outside = None
    if choice is not None:
        _thread.outside = _in_force(choice)
        _thread.outside.__enter__()
    _thread.choice = choice


_run_step = asyncio.Handle._run


def _run_in_step(handle: asyncio.Handle) -> None:
    """Stands in for what runs each step of asyncio's event loops: in the table of the step's own task."""
    _put(handle._context.get(_mine, ()))  # type: ignore[attr-defined]
    try:
        _run_step(handle)
    finally:
        _put(_mine.get())  # of whoever runs the loop


def _replace() -> None:
    """Puts `_block_sizes` into the kernel's module, and `_run_in_step` into asyncio, the first time; with the
    lock held."""
    global _entered, _own
    if not _entered:
        asyncio.Handle._run = _run_in_step  # type: ignore[assignment]
        _own = kernel.get_tuned_block_sizes
        kernel.get_tuned_block_sizes = _block_sizes
    _entered += 1


def _restore() -> None:
    """Undoes one `_replace`; with the lock held."""
    global _entered, _own
    _entered -= 1
    if not _entered:
        kernel.get_tuned_block_sizes = _own
        asyncio.Handle._run = _run_step  # type: ignore[method-assign]
        _own = None


def _checked(table: Table | str | os.PathLike[str], target: str | None) -> _Choice:
    if not isinstance(table, Table):
        table = load(table)
    if table.dialect is not JAX:
        raise UsageError(
            f"{table.shown} is a table of the {table.dialect} dialect, which JAX's kernel cannot use"
        )
    if target is not None:
        generations.by_name(target)
    return _Choice(table, target)


@contextlib.contextmanager
def use(table: Table | str | os.PathLike[str], target: str | None = None) -> Iterator[Table]:
    """JAX's kernel looks its block sizes up in this table until the block is left: in this thread, and of
    the tasks of an event loop in this one and those that it starts meanwhile.

    table: of the jax dialect, or what `load` takes; it answers as its own look-up does. Entering again with
    the same Table finds what was traced with it, a name is loaded anew. target: the generation whose rows are
    used; by default that of jax's default device, or of the first one. Blocks may be nested; the innermost
    counts, and goes before a table that is installed.

    A call that names its block sizes keeps them. Functions that were traced before are traced anew inside.
    Threads that are started inside, by asyncio.to_thread too, do not get the table. Event loops that are not
    asyncio's own, such as uvloop's, switch tasks unseen: there, do not await inside of a block.

    Raises:
      UsageError: the table is of another dialect, or cannot be loaded; no such target.
    """
    choice = _checked(table, target)
    with _lock:
        _replace()
    _mine.set((*_mine.get(), choice))
    _put(_mine.get())
    try:
        yield choice.table
    finally:
        # Blocks may be left in another order, or by another task, such as the one that collects garbage.
        _mine.set(tuple(other for other in _mine.get() if other is not choice))
        _put(_mine.get())
        with _lock:
            _restore()


def install(table: Table | str | os.PathLike[str] | None, target: str | None = None) -> Table | None:
    """JAX's kernel looks its block sizes up in this table in every thread of the process, from now on.

    table, target: as `use` takes them; the table is returned. A table that was installed before is replaced;
    None takes it out, and JAX's own answers again. For a server, which may trace in threads that it starts
    itself.

    Raises:
      UsageError: the table is of another dialect, or cannot be loaded; no such target. What was installed
        stays.
    """
    global _installed
    choice = None if table is None else _checked(table, target)
    with _lock:
        if choice and not _installed:
            _replace()
        elif not choice and _installed:
            _restore()
        _installed = choice is not None
        _in_force.set_global(choice)
    return choice.table if choice else None
