"""Problem, TableKey and BlockSizes: one call's static shape, its simplified key, and a candidate.

Nothing here imports jax, so that keys can be parsed, printed and compared at once. What only the installed
kernel can say (its heads per block, and which head counts it tiles) is asked of it in `tiling`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

# Bits of the dtypes that the kernel's q and KV pages may have, by the names that table keys use.
DTYPE_BITS = {
    "float32": 32,
    "bfloat16": 16,
    "float8_e4m3fn": 8,
    "float8_e5m2": 8,
    "float8_e4m3b11fnuz": 8,
    "int8": 8,
    "int4": 4,
}

# Rows of the page table, and so the most sequences of a batch. It is no part of a key and does not change the
# kernel's schedule; it bounds the batches and what the page table takes of SMEM.
DEFAULT_MAX_NUM_SEQS = 128

# The least and the most of what keys and static settings hold, the same where they are typed and where rows
# are read: a sweep must not record what its own reader refuses. A soft cap may have either sign.
MOST = 2**32  # a length below 2**31, rounded up to pages and then to a power of two
SETTING_RANGES: dict[str, tuple[float, float]] = {
    "sliding_window": (1, 2**30),
    "soft_cap": (1e-30, 1e30),
    "k_scale": (1e-30, 1e30),
    "v_scale": (1e-30, 1e30),
    "vmem_limit_bytes": (1, 2**40),
}


# Depths of the kernel's schedule: a call, a query block, a sequence's visit to it, a KV block. A schedule
# with more or fewer is of another program than the cost model knows.
LOOP_DEPTHS = 4


def next_power_of_2(x: int) -> int:
    """The smallest power of two that is at least x; x must be positive."""
    if x <= 0:
        raise ValueError(f"expected a positive number, got {x}")
    return 1 << (x - 1).bit_length()


class BlockSizes(NamedTuple):
    """A candidate: KV pages and queries that one step of the kernel works on."""

    num_kv_pages_per_blk: int
    num_queries_per_blk: int

    def clamped(self, pages_per_seq: int, max_num_batched_tokens: int) -> BlockSizes:
        """These block sizes as a look-up hands them out: no larger than the call they are for."""
        return BlockSizes(
            min(self.num_kv_pages_per_blk, pages_per_seq),
            min(self.num_queries_per_blk, max_num_batched_tokens),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """What, with the block sizes and the static settings, fixes the kernel's program.

    Calls that differ only in max_num_batched_tokens, pages_per_seq or max_num_seqs run the same loops more or
    less often; their schedule is the same.
    """

    q_dtype: str
    kv_dtype: str
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token, all heads."""
        return 2 * self.num_kv_heads * self.head_dim * DTYPE_BITS[self.kv_dtype] // 8

    def __str__(self) -> str:
        dtypes = self.q_dtype if self.q_dtype == self.kv_dtype else f"{self.q_dtype}/{self.kv_dtype}"
        return f"q{self.num_q_heads} kv{self.num_kv_heads} dim{self.head_dim} page{self.page_size} {dtypes}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """One call's static shape.

    q: [max_num_batched_tokens, num_q_heads, head_dim]; KV pages: [pages, page_size, 2 * num_kv_heads,
    head_dim]; page table: [max_num_seqs, pages_per_seq].
    """

    q_dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    max_num_batched_tokens: int
    pages_per_seq: int
    max_num_seqs: int = DEFAULT_MAX_NUM_SEQS

    def __post_init__(self) -> None:
        """Refuses what no call of the kernel can have, as ValueError."""
        for name in ("q_dtype", "kv_dtype"):
            if getattr(self, name) not in DTYPE_BITS:
                known = ", ".join(DTYPE_BITS)
                raise ValueError(f"{name}={getattr(self, name)} is not a dtype the kernel takes: use {known}")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and (not isinstance(value, int) or isinstance(value, bool) or value <= 0):
                raise ValueError(f"{field.name}={value} must be a positive whole number")
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(f"q_heads={self.num_q_heads} must be a multiple of kv_heads={self.num_kv_heads}")

    @property
    def max_model_len(self) -> int:
        """Tokens that one sequence can hold."""
        return self.page_size * self.pages_per_seq

    @property
    def layout(self) -> Layout:
        return Layout(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Layout)})


class TableKey(NamedTuple):
    """The simplified key of a look-up, in the order in which JAX's table writes it."""

    q_dtype: str
    kv_dtype: str
    num_q_heads_per_blk: int
    num_kv_heads_per_blk: int
    head_dim: int
    page_size: int
    max_num_batched_tokens: int
    max_model_len: int

    def rounded(self) -> TableKey:
        """The key under which a look-up with these numbers finds its block sizes.

        Both head counts, page_size, max_num_batched_tokens and max_model_len go up to a power of two,
        head_dim to a multiple of 128: the rule of JAX's simplify_key, held to it by a test.
        """
        return TableKey(
            self.q_dtype,
            self.kv_dtype,
            next_power_of_2(self.num_q_heads_per_blk),
            next_power_of_2(self.num_kv_heads_per_blk),
            math.ceil(self.head_dim / 128) * 128,
            next_power_of_2(self.page_size),
            next_power_of_2(self.max_num_batched_tokens),
            next_power_of_2(self.max_model_len),
        )

    @property
    def pages_per_seq(self) -> int:
        """Pages of a sequence in the canonical problem; at least one."""
        return max(1, self.max_model_len // self.page_size)

    def canonical_problem(self, max_num_seqs: int = DEFAULT_MAX_NUM_SEQS) -> Problem:
        """The padded shape that this key stands for, as a call whose every head is in one block."""
        return Problem(
            q_dtype=self.q_dtype,
            kv_dtype=self.kv_dtype,
            num_q_heads=self.num_q_heads_per_blk,
            num_kv_heads=self.num_kv_heads_per_blk,
            head_dim=self.head_dim,
            page_size=self.page_size,
            max_num_batched_tokens=self.max_num_batched_tokens,
            pages_per_seq=self.pages_per_seq,
            max_num_seqs=max_num_seqs,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The kernel's other static arguments.

    They change the schedule and what fits, but are no part of a key: one table holds one setting of them.
    vmem_limit_bytes of None is the compiler's own scoped limit. sm_scale and mask_value are left at the
    kernel's defaults: they are constants in the program and cost no cycles (1,645 cycles a KV block with
    sm_scale 1.0 and 1,656 with 128 ** -0.5 on v6e).
    """

    sliding_window: int | None = None
    soft_cap: float | None = None
    k_scale: float | None = None
    v_scale: float | None = None
    vmem_limit_bytes: int | None = None

    def __post_init__(self) -> None:
        """Refuses what the kernel refuses, and what no float32 of its holds, as ValueError."""
        for name, (least, most) in SETTING_RANGES.items():
            value = getattr(self, name)
            size = abs(value) if name == "soft_cap" and value is not None else value
            if size is not None and not least <= size <= most:  # nor NaN
                either = ", or both below 0" if name == "soft_cap" else ""
                raise ValueError(f"{name}={value} must be from {least:g} to {most:g}{either}")


NO_SETTINGS = Settings()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """One distinct compile for a target: a layout, a pair of block sizes and the static settings."""

    layout: Layout
    blocks: BlockSizes
    settings: Settings = NO_SETTINGS
