"""JAX's ragged paged attention kernel: what it is called with, its table, its reference, its fingerprint."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autotune.kernel.problem import BlockSizes, Layout, Problem, Program, Settings, TableKey, next_power_of_2

# The shape at which a program is compiled. Its schedule is the same at every other (see Layout), with one
# exception that these numbers avoid: with a single query block the compiler removes the grid's loop.
COMPILE_TOKENS = 1024
COMPILE_PAGES_PER_SEQ = 16
COMPILE_NUM_SEQS = 128
LEAST_COMPILE_PAGES = 1024
# XLA may move a pool that fits VMEM there, which makes another program of the kernel. No TPU has this much.
LEAST_COMPILE_POOL_BYTES = 256 << 20


def compile_problem(layout: Layout, blocks: BlockSizes) -> Problem:
    """The problem at which a program is compiled: at least two query blocks and one whole KV block."""
    return Problem(
        **dataclasses.asdict(layout),
        max_num_batched_tokens=max(COMPILE_TOKENS, 2 * blocks.num_queries_per_blk),
        pages_per_seq=max(COMPILE_PAGES_PER_SEQ, blocks.num_kv_pages_per_blk),
        max_num_seqs=COMPILE_NUM_SEQS,
    )


def compile_total_pages(layout: Layout) -> int:
    """Pages of the pool at which a layout's programs are compiled."""
    page_bytes = layout.page_size * layout.kv_bytes_per_token
    return max(LEAST_COMPILE_PAGES, -(-LEAST_COMPILE_POOL_BYTES // page_bytes))


def static_arguments(blocks: BlockSizes | None, settings: Settings) -> dict[str, Any]:
    """The kernel's static arguments, by its own names; without blocks it asks its own table."""
    static = dataclasses.asdict(settings)
    if blocks is not None:
        static["num_kv_pages_per_block"] = blocks.num_kv_pages_per_blk
        static["num_queries_per_block"] = blocks.num_queries_per_blk
    return static


def kernel_call(blocks: BlockSizes | None, settings: Settings) -> Callable[..., Any]:
    """The kernel with its static arguments filled in; without blocks it asks its own table."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel

    return functools.partial(kernel.ragged_paged_attention, **static_arguments(blocks, settings))


def program_name(blocks: BlockSizes) -> str:
    """What a candidate's program is called in a profile, where its kernel has the name of every other's."""
    return f"rpa_p{blocks.num_kv_pages_per_blk}_q{blocks.num_queries_per_blk}"


def named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The function under another name; jax.jit calls the program 'jit_' and that name."""

    def call(*arguments: Any) -> Any:
        return function(*arguments)

    call.__name__ = call.__qualname__ = name
    return call


def abstract_arguments(problem: Problem, total_num_pages: int, sharding: Any) -> tuple[Any, ...]:
    """The kernel's six array arguments as ShapeDtypeStructs, for tracing and compiling without data."""
    import jax
    import jax.numpy as jnp

    tokens, seqs = problem.max_num_batched_tokens, problem.max_num_seqs
    shapes = [
        ((tokens, problem.num_q_heads, problem.head_dim), problem.q_dtype),
        ((total_num_pages, problem.page_size, 2 * problem.num_kv_heads, problem.head_dim), problem.kv_dtype),
        ((seqs,), "int32"),  # kv_lens
        ((seqs, problem.pages_per_seq), "int32"),  # page_indices
        ((seqs + 1,), "int32"),  # cu_q_lens
        ((1,), "int32"),  # num_seqs
    ]
    return tuple(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding) for shape, dtype in shapes)


def reference(arguments: tuple[Any, ...], settings: Settings) -> Any:
    """JAX's own reference of the kernel: f[sum of q_lens, num_q_heads, head_dim]."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel

    static = dataclasses.asdict(settings)
    del static["vmem_limit_bytes"]
    return kernel.ref_ragged_paged_attention(*arguments, **static)


def scratch_bytes(program: Program) -> int:
    """VMEM bytes that the program cannot do without: a lower bound of what the compiler allocates.

    The kernel's own scratch: two buffers of a KV block, the running maximum and sum (128 lanes of float32 a
    query and head) and the float32 accumulator. Padding to the hardware's tiles, the double-buffered windows
    of q and output, and register spills come on top; the compiler's verdict counts them.
    """
    layout, blocks = program.layout, program.blocks
    kv_buffers = 2 * blocks.num_kv_pages_per_blk * layout.page_size * layout.kv_bytes_per_token
    rows = blocks.num_queries_per_blk * layout.num_q_heads
    return kv_buffers + 2 * rows * 128 * 4 + rows * layout.head_dim * 4


def smem_bytes(problem: Problem) -> int:
    """SMEM bytes that a call needs: its five prefetched operands, in tiles, and the compiler's own.

    By the listings and the overflow messages of libtpu 0.0.42: rows of one or two dimensions are padded to
    128 int32, those of the page table to a tile of 8, or to a power of two below that. With 2,048 bytes left
    a call does not fit v5e, v6e and v7x, by 912 bytes at most; with 3,072 left it fits all generations.
    """
    seqs, pages = problem.max_num_seqs, problem.pages_per_seq
    rows = -(-seqs // 8) * 8 if seqs > 8 else next_power_of_2(seqs)

    def row(numbers: int) -> int:
        return -(-numbers // 128) * 128 * 4

    # kv_lens, the page table, cu_q_lens, the next sequence and buffer, num_seqs
    operands = row(seqs) + rows * row(pages) + row(seqs + 1) + row(2) + row(1)
    return operands + 2048 + 912


def published_table() -> Mapping[str, Mapping[TableKey, BlockSizes]]:
    """The installed JAX's tuned block sizes, by the device names that its own look-up uses."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import tuned_block_sizes

    return {
        name: {TableKey(*key): BlockSizes(*value) for key, value in rows.items()}
        for name, rows in tuned_block_sizes.TUNED_BLOCK_SIZES.items()
    }


def jax_device_name(device_kind: str) -> str:
    """The name under which the installed JAX's look-up finds a device's rows, as it says itself.

    'TPU v5' for both v5e and v5p; for v7x 'TPU7x' by jax 0.10 and 'TPU v7' by jax 0.12.
    """
    import types

    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import tuned_block_sizes

    own = tuned_block_sizes.get_device_name
    device = types.SimpleNamespace(device_kind=device_kind)
    # The same code, with a jax in its module's place whose first device is this one.
    asked = types.SimpleNamespace(devices=lambda: [device])
    name: str = types.FunctionType(
        own.__code__, {**own.__globals__, "jax": asked}, argdefs=own.__defaults__
    )()
    return name


def default_blocks(tpu_version: int) -> BlockSizes:
    """What JAX's look-up answers for a key that its table does not hold, before clamping.

    From get_tuned_block_sizes of jax 0.10.2; a test asks the installed one.
    """
    return BlockSizes(32, 32) if tpu_version == 4 else BlockSizes(128, 32)


def fingerprint() -> str:
    """The first 12 hex digits of the SHA-256 of the installed kernel's source."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel

    assert kernel.__file__ is not None
    return hashlib.sha256(Path(kernel.__file__).read_bytes()).hexdigest()[:12]
