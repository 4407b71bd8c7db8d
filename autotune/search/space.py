"""Candidates of a key, and which of them need no compile to be ruled out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from autotune.kernel.jax_rpa.call import compile_problem, scratch_bytes, smem_bytes
from autotune.kernel.problem import BlockSizes, Problem, Program
from autotune.tpu.compiler import Compiled
from autotune.tpu.generations import MIB, Generation, hardware, vmem_limit

# KV tokens and queries of a block from which a search starts. Smaller blocks of KV are mostly lost in the
# cost of starting a copy; larger ones take minutes to compile and, at the published shapes, mostly overflow
# or lose. Where the best of these lies on their edge, `beyond` has the next.
KV_TOKENS = (128, 2048)
QUERIES = (32, 64, 128, 256)


def default_kv_pages(problem: Problem) -> list[int]:
    """Powers of two within pages_per_seq whose KV blocks hold 128 to 2048 tokens; the nearest if none."""
    low, high = KV_TOKENS
    powers = [1 << i for i in range(problem.pages_per_seq.bit_length())]
    fitting = [p for p in powers if low <= p * problem.page_size <= high]
    return fitting or [powers[0] if problem.page_size > high else powers[-1]]


def default_queries(problem: Problem) -> list[int]:
    """The usual numbers of queries, within max_num_batched_tokens; all tokens if there are fewer than 32."""
    return [q for q in QUERIES if q <= problem.max_num_batched_tokens] or [problem.max_num_batched_tokens]


def candidates(
    problem: Problem,
    kv_pages: Sequence[int] | None = None,
    queries: Sequence[int] | None = None,
    incumbents: Iterable[BlockSizes] = (),
) -> list[BlockSizes]:
    """Candidates to try for a problem, sorted.

    Numbers that are named are all tried, too large ones included (a row says why they cannot be). With both
    dimensions left open, the incumbents are tried too: a winner is only worth committing against them.
    """
    grid = {
        BlockSizes(pages, q)
        for pages in kv_pages or default_kv_pages(problem)
        for q in queries or default_queries(problem)
    }
    if kv_pages is None and queries is None:
        grid |= {b.clamped(problem.pages_per_seq, problem.max_num_batched_tokens) for b in incumbents}
    return sorted(grid)


def beyond(problem: Problem, best: BlockSizes, tried: Collection[BlockSizes]) -> list[BlockSizes]:
    """The pairs around a key's best one that are no candidates yet: half, the same and twice of each number,
    within the call. None where all of them were tried: then the best does not lie on an edge."""
    pages, queries = (
        sorted({max(1, n // 2), n, min(2 * n, most)})
        for n, most in zip(best, (problem.pages_per_seq, problem.max_num_batched_tokens), strict=True)
    )
    around = (BlockSizes(p, q) for p in pages for q in queries)
    return [blocks for blocks in around if blocks not in tried]


def ruled_out(problem: Problem, blocks: BlockSizes) -> Compiled | None:
    """The verdict on a candidate that a call of this shape cannot have; None if it can."""
    if blocks.num_kv_pages_per_blk > problem.pages_per_seq:
        return _invalid("num_kv_pages_per_blk", blocks[0], "pages_per_seq", problem.pages_per_seq)
    if blocks.num_queries_per_blk > problem.max_num_batched_tokens:
        return _invalid(
            "num_queries_per_blk", blocks[1], "max_num_batched_tokens", problem.max_num_batched_tokens
        )
    return None


def _invalid(name: str, value: int, bound: str, limit: int) -> Compiled:
    return Compiled(status="invalid", error=f"{name}={value} is more than {bound}={limit}")


def page_table_overflow(generation: Generation, problem: Problem) -> Compiled | None:
    """The verdict on every candidate of a problem that SMEM cannot hold, whatever the block sizes."""
    needed, limit = smem_bytes(problem), hardware(generation).smem_bytes
    if needed <= limit:
        return None
    return Compiled(
        status="smem_oom",
        needed_bytes=needed,
        limit_bytes=limit,
        error=(
            f"the page table, {problem.max_num_seqs} rows of {problem.pages_per_seq} pages, and what goes "
            "with it are larger than SMEM: use a larger page_size"
        ),
    )


def smem_overflow(generation: Generation, problem: Problem, program: Program, used: int) -> Compiled | None:
    """The verdict on a compiled program at a problem with a larger page table than it was compiled with.

    used: SMEM bytes of the program at its compile shape.
    """
    compiled_at = compile_problem(program.layout, program.blocks)
    needed = smem_bytes(problem) + max(0, used - smem_bytes(compiled_at))
    limit = hardware(generation).smem_bytes
    if needed <= limit:
        return None
    return Compiled(
        status="smem_oom",
        needed_bytes=needed,
        limit_bytes=limit,
        error=f"with {problem.max_num_seqs} rows of {problem.pages_per_seq} pages it is larger than SMEM",
    )


def scratch_overflow(generation: Generation, program: Program, *, named: bool) -> Compiled | None:
    """The verdict on a program whose scratch alone is larger than its VMEM limit; None if it may fit.

    named: the user named these block sizes, and is owed the compiler's own figure where it can give one: then
    only what exceeds the core's VMEM, whatever the limit, is ruled out.
    """
    needed = scratch_bytes(program)
    limit = (
        hardware(generation).vmem_bytes
        if named
        else vmem_limit(generation, program.settings.vmem_limit_bytes)
    )
    if needed <= limit:
        return None
    return Compiled(
        status="vmem_oom",
        needed_bytes=needed,
        limit_bytes=vmem_limit(generation, program.settings.vmem_limit_bytes),
        error=f"not compiled: the kernel's scratch alone needs {needed / MIB:.2f} MiB of VMEM",
    )


def expected_compile_seconds(program: Program) -> float:
    """Roughly how long one core compiles a program: to order the work and to say how long it will take.

    Power laws of a block's query rows, KV tokens and KV heads, fitted to 327 programs of the published v6e
    space on an idle machine (libtpu 0.0.42.1); from four KV heads on, registers spill and the compiler takes
    far longer. Those took 0.5 to 2.4 times as long: `python -m bench.estimate`.
    """
    layout, blocks = program.layout, program.blocks
    rows = layout.num_q_heads * blocks.num_queries_per_blk / 1024
    tokens = blocks.num_kv_pages_per_blk * layout.page_size / 1024
    if layout.num_kv_heads < 4:
        return 0.5 + 1.86 * layout.num_kv_heads**1.05 * rows**1.33 * tokens**1.30
    return 0.7 + 12.8 * (layout.num_kv_heads / 4) ** 0.58 * rows**1.57 * tokens**1.97
