"""A call of the kernel: its arguments, what its own default is, and how it is lowered for a device."""

from __future__ import annotations

from typing import Any

from autotune.kernel.problem import Problem, Settings
from autotune.kernel.rpa_v3.blocks import CASES, DECODE, Blocks, smallest

# XLA may move a pool of pages that fits VMEM there, which makes another program. No TPU has this much.
_POOL_BYTES = 256 << 20
_LETTERS = dict(zip(CASES, "dm", strict=True))


def listing_name(case: str) -> str:
    """How the names of a case's calls begin, in listings and profiles."""
    return f"RPA{_LETTERS[case]}-"


def abstract_arguments(module: Any, problem: Problem, sharding: Any) -> tuple[Any, ...]:
    """The kernel's eight array arguments as ShapeDtypeStructs.

    q: [tokens, q_heads, head_dim]; k, v: [tokens, kv_heads, head_dim]; the cache, as the kernel shapes it;
    kv_lens: [seqs]; page_indices: [seqs * pages_per_seq]; cu_q_lens: [seqs + 1]; distribution: [3].
    """
    import jax
    import jax.numpy as jnp

    tokens, seqs = problem.max_num_batched_tokens, problem.max_num_seqs
    kv_dtype = jnp.dtype(problem.kv_dtype)
    pages = max(1024, -(-_POOL_BYTES // (problem.page_size * problem.layout.kv_bytes_per_token)))
    new = (tokens, problem.num_kv_heads, problem.head_dim)
    cache = module.get_kv_cache_shape(
        pages, problem.page_size, problem.num_kv_heads, problem.head_dim, kv_dtype
    )
    shapes = [
        ((tokens, problem.num_q_heads, problem.head_dim), jnp.dtype(problem.q_dtype)),
        (new, kv_dtype),
        (new, kv_dtype),
        (cache, kv_dtype),
        ((seqs,), jnp.int32),
        ((seqs * problem.pages_per_seq,), jnp.int32),
        ((seqs + 1,), jnp.int32),
        ((3,), jnp.int32),
    ]
    return tuple(jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in shapes)


def default_blocks(module: Any, case: str, problem: Problem) -> Blocks:
    """What the kernel takes by itself on the generation that jax.devices() names.

    Raises:
      NotImplementedError: it has no default for the generation.
    """
    import jax.numpy as jnp

    sizes = module.get_default_block_sizes(
        jnp.dtype(problem.q_dtype),
        jnp.dtype(problem.kv_dtype),
        problem.num_q_heads,
        problem.num_kv_heads,
        problem.head_dim,
        problem.page_size,
        problem.max_num_batched_tokens,
        problem.max_num_seqs,
        problem.pages_per_seq,
        case=module.RpaCase.DECODE if case == DECODE else module.RpaCase.MIXED,
    )
    return Blocks(*(int(sizes[name]) for name in Blocks._fields))


def lower(
    module: Any, case: str, blocks: Blocks | None, problem: Problem, settings: Settings, sharding: Any
) -> Any:
    """The kernel lowered, with the smallest block sizes in the other case: a refusal is about this one.

    blocks: None for the kernel's own default, which it does not check against its rules.
    """
    import jax

    sizes: dict[str, Blocks | None] = dict.fromkeys(CASES, smallest(problem.page_size))
    sizes[case] = blocks
    scales = {"k_scale": settings.k_scale, "v_scale": settings.v_scale}
    if problem.kv_dtype != problem.q_dtype:  # as the stack passes them with a quantized cache
        scales = {name: value or 1.0 for name, value in scales.items()}

    def call(*arguments: Any) -> Any:
        return module.ragged_paged_attention(
            *arguments,
            sm_scale=problem.head_dim**-0.5,
            sliding_window=settings.sliding_window,
            soft_cap=settings.soft_cap,
            vmem_limit_bytes=settings.vmem_limit_bytes,
            **scales,
            **{f"{_LETTERS[name]}_block_sizes": value and tuple(value) for name, value in sizes.items()},
        )

    return jax.jit(call).trace(*abstract_arguments(module, problem, sharding)).lower()
