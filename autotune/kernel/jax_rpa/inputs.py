"""The data of a problem's calls, made once for all its candidates, and the output that they must have."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from autotune.kernel.jax_rpa import reference
from autotune.kernel.problem import DTYPE_BITS, Problem, Settings
from autotune.kernel.workload import Batch, Workload, pages_needed, place

# By bits of the KV pages' dtype, absolute and relative at once: the tolerance of JAX's own test of this
# kernel, tests/pallas/tpu_ragged_paged_attention_test.py. Outputs are about 1.0 for standard normal inputs.
TOLERANCES = {32: 0.15, 16: 0.2, 8: 0.2, 4: 0.2}

# The pool on a TPU: larger than any VMEM, as serving's is, and of one size for all keys of a layout, which so
# share the pool and its program. Sequences that need more pages than it has share pages, which costs the
# kernel the same reads.
POOL_BYTES = 1 << 30
# Random numbers that the pool's pages repeat (32 MiB of bfloat16), and those that the queries do. The second
# is a prime, so that no two rows of the queries are equal.
BLOCK_VALUES = 1 << 24
QUERY_VALUES = 1_048_573


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The arguments of one problem's calls on a device, a batch a workload, and what the host keeps of them.

    The queries and the pool of pages are the same arrays for all of them.
    q: [max_num_batched_tokens, num_q_heads, head_dim] in q's dtype, the queries.
    block: float32[n, page_size, 2 * num_kv_heads, head_dim], the distinct pages, of values that the KV dtype
      has. Page p of the pool is block[p % n].
    """

    batches: tuple[Batch, ...]
    arguments: tuple[tuple[Any, ...], ...]
    q: Any
    block: Any


@dataclasses.dataclass(frozen=True)
class _Pool:
    """A pool on a device, and its distinct pages on the host; equal `made_for`, equal pools."""

    made_for: tuple[tuple[int, ...], str, int]
    block: Any
    pages: Any


@dataclasses.dataclass(frozen=True)
class Expected:
    """What the reference says for some tokens of a batch.

    tokens: their places in the output, int64[n], ascending. values: float32[n, num_q_heads, head_dim].
    """

    tokens: Any
    values: Any
    tolerance: float

    def mismatch(self, output: Any) -> str | None:
        """Why an output is not the expected one; None where it is within the tolerance."""
        # All of it comes to the host: to pick the tokens on the device, a program would have to be compiled.
        found = np.asarray(output)[self.tokens].astype(np.float32)
        error = np.abs(found - self.values)
        # Not `error > allowed`: that is false for a NaN.
        wrong = ~(error <= self.tolerance + self.tolerance * np.abs(self.values))
        if not wrong.any():
            return None
        rows = wrong.any(axis=(1, 2))
        at = np.unravel_index(np.argmax(np.where(np.isnan(error), np.inf, error)), error.shape)
        return (
            f"{int(rows.sum())} of {len(rows)} compared tokens differ from the reference by more than "
            f"{self.tolerance:g}: {found[at]:.4g} for {self.values[at]:.4g} "
            f"at token {int(self.tokens[at[0]])}"
        )


def pool_pages(problem: Problem, workloads: Sequence[Workload], interpreted: bool) -> int:
    """Pages of the pool that all of a problem's workloads share.

    For a TPU the same for every problem of a layout. For the interpreter as few as the batches need.
    """
    page_bytes = problem.page_size * problem.layout.kv_bytes_per_token
    most = max(1, POOL_BYTES // page_bytes)
    if not interpreted:
        return most
    return min(most, max(problem.pages_per_seq, *(pages_needed(problem, batch) for batch in workloads)))


def block_shape(problem: Problem, total: int) -> tuple[int, int, int, int]:
    """Shape of the distinct pages of a pool of `total`: [n, page_size, 2 * num_kv_heads, head_dim].

    n is odd where they are repeated, so that repeated pages line up with nothing.
    """
    page = (problem.page_size, 2 * problem.num_kv_heads, problem.head_dim)
    count = max(1, BLOCK_VALUES // math.prod(page))
    return (count - 1 + count % 2 if count < total else total, *page)


class InputMaker:
    """Makes the inputs of one problem after the other on a device; keeps the last pool for the next one."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._pool: _Pool | None = None

    def make(
        self, problem: Problem, workloads: Sequence[Workload], seed: int = 0, *, interpreted: bool
    ) -> Inputs:
        """The data of a problem's calls.

        Queries and pages are standard normal from the seed, rounded to their dtypes (float32 to bfloat16's
        values). Nothing else may hold on to the inputs before, if memory is to be free for a new pool.
        """
        pool = self._pool_of(problem, pool_pages(problem, workloads, interpreted), seed)
        total = pool.pages.shape[0]
        batches = tuple(place(problem, workload, total, seed) for workload in workloads)
        q = _queries(problem, seed)
        q_there = self._put(q)
        arguments = tuple(
            (q_there, pool.pages, *map(self._put, (b.kv_lens, b.page_indices, b.cu_q_lens, b.num_seqs)))
            for b in batches
        )
        return Inputs(batches, arguments, q, pool.block)

    def _put(self, array: Any) -> Any:
        import jax

        return jax.device_put(array, self._device)  # compiles nothing, as jnp's functions would

    def _pool_of(self, problem: Problem, total: int, seed: int) -> _Pool:
        import jax

        shape = block_shape(problem, total)
        made_for = ((total, *shape[1:]), problem.kv_dtype, seed)
        if self._pool is None or self._pool.made_for != made_for:
            self._pool = None  # its memory is needed
            block = _normal(shape, problem.kv_dtype, [seed, 1])
            pages = self._put(block)
            if len(block) < total:
                pages = jax.jit(functools.partial(repeated, total=total))(pages)
            self._pool = _Pool(made_for, block.astype(np.float32), pages)
        return self._pool


def _normal(shape: tuple[int, ...], dtype: str, seed: Sequence[int]) -> Any:
    import jax.numpy as jnp  # knows the names of ml_dtypes; computes nothing here

    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    if dtype == "float32":
        # A TPU may multiply float32 in one pass of bfloat16. Of numbers with more bits that alone would take
        # up to 0.78 of the tolerance: measured by rounding in numpy, 15,360 rows of one head, 512 tokens.
        values = values.astype(jnp.bfloat16)
    return values.astype(jnp.dtype(dtype))


def _queries(problem: Problem, seed: int) -> Any:
    shape = (problem.max_num_batched_tokens, problem.num_q_heads, problem.head_dim)
    values = _normal((min(QUERY_VALUES, math.prod(shape)),), problem.q_dtype, [seed, 0])
    return np.resize(values, shape)


def repeated(block: Any, total: int) -> Any:
    """[total, ...]: page p is block[p % n]; traced.

    A loop over single pages: libtpu compiles it in half a CPU second at most, for every published layout and
    every dtype, and without any temporary. A concatenation takes up to 18 s for an int4 pool, and what tiles
    and cuts takes the pool's memory twice.
    """
    import jax.numpy as jnp
    from jax import lax

    def put(p: Any, pool: Any) -> Any:
        page = lax.dynamic_slice_in_dim(block, lax.rem(p, np.int32(block.shape[0])), 1)
        return lax.dynamic_update_slice_in_dim(pool, page, p, axis=0)

    pool = jnp.zeros((total, *block.shape[1:]), block.dtype)
    return lax.fori_loop(np.int32(0), np.int32(total), put, pool)


def expected(
    problem: Problem, workload: Workload, batch: Batch, inputs: Inputs, settings: Settings
) -> Expected:
    """What the reference gives for the sampled tokens of a batch, computed on the host."""
    tokens, values = [], []
    for i, rows in reference.sample(problem, workload, settings):
        q_len, kv_len = workload.sequences[i]
        # Whole pages from the one on that holds the first token that is seen.
        start = reference.first_column(workload.sequences[i], settings) // problem.page_size
        pages = batch.page_indices[i, start : -(-kv_len // problem.page_size)] % len(inputs.block)
        at = batch.cu_q_lens[i] + rows
        q = inputs.q[at].astype(np.float32)
        positions = kv_len - q_len + rows - start * problem.page_size
        tokens.append(at)
        values.append(reference.attention(q, inputs.block, pages, positions, inputs.q.dtype, settings))
    return Expected(np.concatenate(tokens), np.concatenate(values), TOLERANCES[DTYPE_BITS[problem.kv_dtype]])
