"""Block sizes of ragged paged attention v3: the rules they must keep, and smaller ones than given."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from autotune.errors import UsageError
from autotune.kernel.problem import DTYPE_BITS, Problem

DECODE, MIXED = "decode", "mixed"
CASES = (DECODE, MIXED)
# The variables from which tpu-inference takes the block sizes of a case (tpu_inference/envs.py, 0.32.0).
VARIABLES = {DECODE: "RPA_V3_DECODE_BLOCK_SIZES", MIXED: "RPA_V3_MIXED_BLOCK_SIZES"}

# With this one set the stack runs another kernel, and reads none of VARIABLES.
BATCHED = "USE_BATCHED_RPA_KERNEL"

_SIZES = re.compile(r"\s{0,9}(\d{1,9})\s{0,9}" + r",\s{0,9}(\d{1,9})\s{0,9}" * 3)


class Blocks(NamedTuple):
    """Tokens that one step fetches and computes on: queries and KV fetched, queries and KV computed on.

    The order is that of the kernel's arguments d_block_sizes and m_block_sizes, and of VARIABLES.
    """

    bq_sz: int
    bkv_sz: int
    bq_csz: int
    bkv_csz: int

    def __str__(self) -> str:
        return ",".join(map(str, self))


def from_environment(environment: Mapping[str, str]) -> dict[str, Blocks]:
    """The block sizes that the environment sets, by case.

    Raises:
      UsageError: a variable does not hold four positive whole numbers.
    """
    found = {}
    for case, name in VARIABLES.items():
        text = environment.get(name, "")
        if not text.strip():
            continue
        match = _SIZES.fullmatch(text)
        blocks = Blocks(*map(int, match.groups())) if match else None
        if blocks is None or min(blocks) < 1:
            raise UsageError(
                f"{name}={text[:100]!r} is not four block sizes: type bq_sz,bkv_sz,bq_csz,bkv_csz, such as "
                f"{name}=32,1024,32,512"
            )
        found[case] = blocks
    return found


def broken_rule(blocks: Blocks, page_size: int) -> str | None:
    """The rule of the kernel that block sizes break; None if they keep all.

    The kernel refuses block sizes that are given and break one, and does not check its own defaults: a
    bkv_csz that does not divide bkv_sz then reads past the buffer.
    """
    bq_sz, bkv_sz, _, bkv_csz = blocks
    bq_csz = min(blocks.bq_csz, bq_sz)  # as the kernel does
    if bq_sz % bq_csz:
        return f"bq_sz={bq_sz} is not a multiple of bq_csz={bq_csz}"
    if bkv_sz % bkv_csz:
        return f"bkv_sz={bkv_sz} is not a multiple of bkv_csz={bkv_csz}"
    for name, value in (("bkv_sz", bkv_sz), ("bkv_csz", bkv_csz)):
        if value % page_size:
            return f"{name}={value} is not a multiple of page_size={page_size}"
    return None


def smallest(page_size: int) -> Blocks:
    """Block sizes that every call can have: one query and one page."""
    return Blocks(1, page_size, 1, page_size)


def smaller(blocks: Blocks, page_size: int) -> list[Blocks]:
    """Block sizes to try where these do not fit, the largest first; each keeps the kernel's rules.

    Queries are halved; KV has pages doubled from one. What is computed on at once is no more than before.
    """
    doubled = [page_size << i for i in range(max(1, blocks.bkv_sz // page_size).bit_length())]
    halved = [1 << i for i in range(blocks.bq_sz.bit_length())]
    bq_csz = max(q for q in halved if q <= blocks.bq_csz or q == 1)
    bkv_csz = max(kv for kv in doubled if kv <= max(blocks.bkv_csz, page_size))
    found = {Blocks(q, kv, min(bq_csz, q), min(bkv_csz, kv)) for q in halved for kv in doubled} - {blocks}
    return sorted(found, key=lambda b: (b.bq_sz * b.bkv_sz, b.bkv_sz), reverse=True)


def scratch_bytes(problem: Problem, blocks: Blocks) -> int:
    """VMEM bytes that a case cannot do without: a lower bound of what the compiler allocates.

    Two buffers each of KV, queries and output; the running maximum, sum and accumulator in q's dtype.
    Padding, and registers that spill (30 MiB of 77 in one report), come on top.
    """
    rows = blocks.bq_sz * problem.num_q_heads
    q_bytes = DTYPE_BITS[problem.q_dtype] // 8
    buffers = 2 * blocks.bkv_sz * problem.layout.kv_bytes_per_token + 4 * rows * problem.head_dim * q_bytes
    return buffers + rows * (2 * 128 + problem.head_dim) * q_bytes
