"""Whether any candidate at all can compile and fit for a key, and what to change where none can."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from autotune.io.terminal import counted
from autotune.kernel.jax_rpa.call import scratch_bytes, smem_bytes
from autotune.kernel.problem import DTYPE_BITS, BlockSizes, Problem, Program, Settings, TableKey
from autotune.keys.models import recommended_page_size
from autotune.search import space
from autotune.tpu.generations import MIB, Generation, hardware, vmem_limit


@dataclasses.dataclass(frozen=True)
class Words:
    """What is typed to change a call: the page size, the longest length and fewer KV heads on a chip, the
    latter by how many there may be and the key that has too many."""

    page: str = "--page-size "
    length: str = "--max-model-len "
    kv_heads: Callable[[int, TableKey], str] = "--kv-heads {0}".format


def no_room(
    generation: Generation,
    keys: Sequence[TableKey],
    settings: Settings,
    max_num_seqs: int,
    words: Words = Words(),
) -> tuple[str, str] | None:
    """Why no pair whatever can work for some of the keys, and what to type for the first; None if all may."""
    stuck = [key for key in keys if why_none(generation, key.canonical_problem(max_num_seqs), settings)]
    if not stuck:
        return None
    key = stuck[0]
    which = "" if len(keys) == 1 else f" for {len(stuck)} of {len(keys)} keys, such as {tuple(key)}"
    why = why_none(generation, key.canonical_problem(max_num_seqs), settings)
    return f"nothing can run on {generation}{which}: {why}", ways(
        generation, key, settings, max_num_seqs, words
    )


def why_none(generation: Generation, problem: Problem, settings: Settings) -> str | None:
    """Why no pair whatever can work for a call whose heads are all in one block; None if some may."""
    most = most_kv_heads(problem.head_dim, problem.kv_dtype)
    if most is not None and problem.num_kv_heads > most:
        return (
            f"the compiler (libtpu 0.0.42) refuses {counted(problem.num_kv_heads, 'KV head')} of "
            f"{problem.head_dim} with {problem.kv_dtype} KV, whatever the block sizes and the VMEM limit"
        )
    if overflow := space.page_table_overflow(generation, problem):
        needed, limit = told_apart(overflow.needed_bytes or 0, overflow.limit_bytes or 0)
        rows = f"{problem.max_num_seqs} rows of {problem.pages_per_seq} pages"
        return f"the page table, {rows}, needs {needed} of SMEM, and there is {limit}"
    most_vmem = vmem_limit(generation, settings.vmem_limit_bytes)
    smallest = Program(layout=problem.layout, blocks=BlockSizes(1, 1), settings=settings)
    if (scratch := scratch_bytes(smallest)) > most_vmem:
        needed, limit = told_apart(scratch, most_vmem)
        return (
            f"one page of {problem.page_size} tokens and one query need {needed} of VMEM, and the limit is "
            f"{limit}"
        )
    return None


def most_kv_heads(head_dim: int, kv_dtype: str) -> int | None:
    """The most KV heads of a block whose programs compile, where the head_dim limits that; 0: none do.

    Heads of more than 128 are taken out of a KV block with a stride, which libtpu 0.0.42 refuses on every
    generation ("The last dim size is not 128 in original base memref"), unless the keys and values of all
    heads fit the 32 bits of one row: one head of bfloat16, two of 8 bits, four of 4.
    """
    return None if head_dim <= 128 else 32 // DTYPE_BITS[kv_dtype] // 2


def told_apart(needed: int, limit: int) -> tuple[str, str]:
    """Two sizes in MiB with two digits, or in bytes where these would be the same."""
    first, second = (f"{size / MIB:.2f} MiB" for size in (needed, limit))
    return (f"{needed:,} bytes", f"{limit:,} bytes") if first == second else (first, second)


def ways(
    generation: Generation,
    key: TableKey,
    settings: Settings,
    max_num_seqs: int,
    words: Words = Words(),
) -> str:
    """What to type for a key that nothing works for."""
    most = most_kv_heads(key.head_dim, key.kv_dtype)
    if most is not None and key.num_kv_heads_per_blk > most:
        return words.kv_heads(most, key) if most else "a KV dtype of 16 bits or fewer"
    found = list(_ways(generation, key, settings, max_num_seqs, words))
    return ", or ".join(found) or f"a smaller {words.length.strip(' =')}"


def _ways(
    generation: Generation, key: TableKey, settings: Settings, max_num_seqs: int, words: Words
) -> Iterator[str]:
    """Other pages, or else a shorter length, with which something should fit; and a larger limit."""
    limit = vmem_limit(generation, settings.vmem_limit_bytes)

    def fits(changed: TableKey) -> bool:
        problem = changed.canonical_problem(max_num_seqs)
        blocks = space.candidates(problem)[0]
        # Half of the limit: the compiler's windows and its spills come on top.
        needed = scratch_bytes(Program(layout=problem.layout, blocks=blocks, settings=settings))
        return 2 * needed <= limit and smem_bytes(problem) <= hardware(generation).smem_bytes

    pages = [1 << i for i in range(4, key.max_model_len.bit_length())]
    other = [page for page in pages if fits(key._replace(page_size=page))]
    if other:
        yield f"{words.page}{min(other, key=lambda page: max(page / key.page_size, key.page_size / page))}"
        return
    for length in (key.max_model_len >> i for i in range(1, key.max_model_len.bit_length() - 4)):
        page = recommended_page_size(length, max_num_seqs)
        if fits(key._replace(page_size=page, max_model_len=length)):
            yield f"{words.length}{length} or less with {words.page}{page}"
            break
    most = hardware(generation).vmem_bytes
    if limit < most and not space.page_table_overflow(generation, key.canonical_problem(max_num_seqs)):
        yield f"a larger --vmem-limit, up to {most // MIB}MiB"
