"""Which head counts the installed kernel tiles, the key of a problem, and what to do about the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from autotune.errors import UsageError
from autotune.kernel.problem import Problem, TableKey, next_power_of_2


@dataclasses.dataclass(frozen=True)
class HeadLayout:
    """A head layout that the kernel does tile, and how to get to it."""

    num_q_heads: int
    num_kv_heads: int
    how: str


def heads_per_blk(num_q_heads: int, num_kv_heads: int, q_dtype: str, kv_dtype: str) -> tuple[int, int] | None:
    """(num_q_heads_per_blk, num_kv_heads_per_blk) as the installed kernel chooses them; None if it cannot."""
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel

    try:
        num_q_heads_per_blk, num_combined_kv_heads_per_blk = kernel.get_min_heads_per_blk(
            num_q_heads, 2 * num_kv_heads, jnp.dtype(q_dtype), jnp.dtype(kv_dtype)
        )
    except ValueError:
        return None
    return num_q_heads_per_blk, num_combined_kv_heads_per_blk // 2


def table_key(problem: Problem) -> TableKey:
    """The simplified key under which JAX looks up a call of this shape.

    Raises:
      UsageError: the kernel cannot tile the heads; the message names layouts that do tile.
    """
    heads = heads_per_blk(problem.num_q_heads, problem.num_kv_heads, problem.q_dtype, problem.kv_dtype)
    if heads is None:
        raise UsageError(explain_untileable(problem))
    numbers = problem.head_dim, problem.page_size, problem.max_num_batched_tokens, problem.max_model_len
    return TableKey(problem.q_dtype, problem.kv_dtype, *heads, *numbers).rounded()


def is_canonical(key: TableKey) -> bool:
    """Whether a look-up for the key's own canonical problem asks for this very key."""
    return canonical_key(key) == key


def canonical_key(key: TableKey) -> TableKey | None:
    """The canonical key that a key stands for, or None where the kernel tiles no such heads.

    The key's numbers are rounded as a look-up rounds them, its heads split into blocks as the kernel splits
    them; what comes out is its own canonical key.
    """
    if key.num_q_heads_per_blk % key.num_kv_heads_per_blk:
        return None
    try:
        return table_key(key.rounded().canonical_problem())
    except UsageError:
        return None


def sweep_key(problem: Problem) -> TableKey:
    """The canonical key to tune for a call of this shape.

    Raises:
      UsageError: the kernel cannot tile the heads, or looks this shape up under a key that no padded shape
        has (it splits power-of-two heads into blocks, but not these); the message says what to sweep.
    """
    key = table_key(problem)
    if is_canonical(key):
        return key
    group = next_power_of_2(problem.num_q_heads // problem.num_kv_heads)
    kv_heads = next_power_of_2(problem.num_kv_heads)
    raise UsageError(
        f"{why_not(problem)}; pad to q_heads={group * kv_heads}, kv_heads={kv_heads} and sweep that"
    )


def why_not(problem: Problem) -> str:
    """Why no key can be tuned for a call of this shape, for one that `sweep_key` refuses."""
    heads = f"q_heads={problem.num_q_heads}, kv_heads={problem.num_kv_heads}"
    if heads_per_blk(problem.num_q_heads, problem.num_kv_heads, problem.q_dtype, problem.kv_dtype) is None:
        return (
            f"{heads} with {problem.kv_dtype} KV: the kernel raises "
            f"'num_combined_kv_heads={2 * problem.num_kv_heads} can not be XLA fully tiled', as 2 * kv_heads "
            "over the dtype's packing in 32 bits must be 1, 2, 4, 8 or a multiple of 8"
        )
    key = table_key(problem)
    return (
        f"{heads}: the kernel puts all heads of this shape in one block and looks it up as "
        f"({key.num_q_heads_per_blk}, {key.num_kv_heads_per_blk}), a key that no padded shape has"
    )


def supported_layouts(problem: Problem) -> Iterator[HeadLayout]:
    """Head layouts near the problem's own that the installed kernel tiles.

    Padded: whole groups of a KV head and its query heads are added and their output dropped. Repeated: each
    KV head is stored several times, and its query heads are shared out among the copies.
    """
    q_heads, kv_heads = problem.num_q_heads, problem.num_kv_heads
    group = q_heads // kv_heads

    def tiles(q: int, kv: int) -> bool:
        return heads_per_blk(q, kv, problem.q_dtype, problem.kv_dtype) is not None

    for padded in range(kv_heads + 1, 2 * kv_heads + 9):
        if tiles(padded * group, padded):
            yield HeadLayout(padded * group, padded, "padded")
            break
    # Whether heads tile hangs on the powers of two in them, of which 64 are enough for any dtype.
    for copies in range(2, min(group, 64) + 1):
        if group % copies == 0 and tiles(q_heads, kv_heads * copies):
            yield HeadLayout(q_heads, kv_heads * copies, f"each KV head stored {copies} times")
            break


def explain_untileable(problem: Problem, target: str = "v6e") -> str:
    """Why the kernel refuses these heads, which layouts it takes, and what sweeps the cheapest."""
    layouts = (
        f"{layout.num_kv_heads} KV and {layout.num_q_heads} query heads ({layout.how})"
        for layout in supported_layouts(problem)
    )
    dtypes = "".join(
        f",{name}={dtype}"
        for name, dtype in (("q_dtype", problem.q_dtype), ("kv_dtype", problem.kv_dtype))
        if dtype != "bfloat16"
    )
    return (
        f"{why_not(problem)}; lay the heads out as {' or as '.join(layouts)}. To sweep the cheapest:\n"
        f"  autotune sweep --target {target} --out results/padded --pad-heads --shape "
        f"q_heads={problem.num_q_heads},kv_heads={problem.num_kv_heads},head_dim={problem.head_dim},"
        f"page_size={problem.page_size},max_num_batched_tokens={problem.max_num_batched_tokens},"
        f"max_model_len={problem.max_model_len}{dtypes}"
    )
