"""Run the kernel on a CPU, in Pallas's plain interpreter: the same numbers, at a speed that says nothing.

All that JAX needs to be talked into for it is in this module.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from autotune.kernel.jax_rpa.call import named, static_arguments
from autotune.kernel.problem import BlockSizes, Problem, Settings
from autotune.kernel.workload import Sequence, Workload

# What an interpreted batch is cut to: the interpreter takes seconds for what a TPU does in microseconds.
MAX_SEQUENCES = 4
MAX_QUERIES = 48
MAX_KV_PAGES = 6


def lower_interpreted(name: str, blocks: BlockSizes, settings: Settings, arguments: tuple[Any, ...]) -> Any:
    """The kernel, traced and lowered for a CPU as a program of this name: a jax.stages.Lowered.

    arguments: the kernel's six arrays, or what stands for them. pltpu's TPU interpret mode does not run this
    kernel (it has no reshape of a ref); the plain interpreter does.
    """
    import jax
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel

    # Not the jitted function, whose traces jax keeps: one for the interpreter must not serve a TPU.
    function = kernel.ragged_paged_attention.__wrapped__
    with _typed_int_shape(), _plain_interpreter(kernel):
        call = named(functools.partial(function, **static_arguments(blocks, settings)), name)
        return jax.jit(call).lower(*arguments)


class _Interpreting:
    """A module like jax.experimental.pallas whose pallas_call interprets."""

    def __init__(self, pallas: Any) -> None:
        self._pallas = pallas
        self.pallas_call = functools.partial(pallas.pallas_call, interpret=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pallas, name)


@contextlib.contextmanager
def _plain_interpreter(kernel: Any) -> Iterator[None]:
    """The kernel's own name for Pallas stands for the interpreter; nobody else's does."""
    pallas = kernel.pl
    kernel.pl = _Interpreting(pallas)
    try:
        yield
    finally:
        kernel.pl = pallas


@contextlib.contextmanager
def _typed_int_shape() -> Iterator[None]:
    """Gives jax's whole-number literals the shape that the interpreter asks them for.

    jax 0.10.2 to 0.12.0.1: the interpreter's `cond` reads `.shape` of a constant index, which is a
    jax._src.literals.TypedInt and has none. Where the class is gone or has a shape, nothing is done.
    """
    try:
        from jax._src.literals import TypedInt
    except ImportError:
        yield
        return
    if hasattr(TypedInt, "shape"):
        yield
        return
    TypedInt.shape = ()
    try:
        yield
    finally:
        del TypedInt.shape


def cut(workload: Workload, problem: Problem) -> Workload:
    """A workload small enough for the interpreter: few sequences, short, of every kind that it has.

    The shortest and the longest chunk of queries are among them, and page tables of several lengths. It has a
    name and a fingerprint of its own: rows of it are no rows of the workload.
    """
    by_size = sorted(set(workload.sequences))
    count = min(MAX_SEQUENCES, len(by_size))
    picked = [by_size[round(i * (len(by_size) - 1) / max(1, count - 1))] for i in range(count)]
    # Not a multiple of the page: the mask of a page's unused end is worth checking.
    longest = min(MAX_KV_PAGES * problem.page_size - 3, problem.max_model_len)
    sequences = []
    room = problem.max_num_batched_tokens
    for q_len, kv_len in picked[: problem.max_num_seqs]:
        q_len = min(q_len, MAX_QUERIES, room, longest)
        if q_len:
            sequences.append(Sequence(q_len, max(q_len, min(kv_len, longest))))
        room -= q_len
    return Workload(f"{workload.name} (cut)", tuple(sequences))
