"""Whether keys have room for any candidate at all, and what would make some."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autotune import space
from autotune.kernel.problem import BlockSizes, Problem, Program, Settings, TableKey
from autotune.kernel.rpa import page_table_bytes, scratch_bytes
from autotune.models import recommended_page_size
from autotune.tpu.chips import MIB, Generation, hardware, vmem_limit


def no_room(
    generation: Generation,
    keys: Sequence[TableKey],
    settings: Settings,
    max_num_seqs: int,
    names: tuple[str, str] = ("--page-size ", "--max-model-len "),
) -> tuple[str, str] | None:
    """Why no pair whatever can fit some of the keys, and what to type for the first; None if all may.

    names: what the page size and the longest length are called where they are typed.
    """
    stuck = [key for key in keys if _why(generation, key.canonical_problem(max_num_seqs), settings)]
    if not stuck:
        return None
    key, problem = stuck[0], stuck[0].canonical_problem(max_num_seqs)
    which = "" if len(keys) == 1 else f" for {len(stuck)} of {len(keys)} keys, such as {tuple(key)}"
    why = f"nothing can fit {generation}{which}: {_why(generation, problem, settings)}"
    ways = list(_ways(generation, key, settings, max_num_seqs, names))
    return why, ", or ".join(ways) or f"a smaller {names[1].strip(' =')}"


def _why(generation: Generation, problem: Problem, settings: Settings) -> str | None:
    if space.page_table_overflow(generation, problem):
        rows = f"{problem.max_num_seqs} rows of {problem.pages_per_seq} pages"
        return f"the page table, {rows}, is larger than SMEM"
    limit = vmem_limit(generation, settings.vmem_limit_bytes)
    smallest = Program(layout=problem.layout, blocks=BlockSizes(1, 1), settings=settings)
    if (needed := scratch_bytes(smallest)) > limit:
        return (
            f"one page of {problem.page_size} tokens and one query need {needed / MIB:.2f} MiB of VMEM, and "
            f"the limit is {limit / MIB:g} MiB"
        )
    return None


def _ways(
    generation: Generation, key: TableKey, settings: Settings, max_num_seqs: int, names: tuple[str, str]
) -> Iterator[str]:
    """Other pages, or else a shorter length, with which something should fit; and a larger limit."""
    page_name, length_name = names
    limit = vmem_limit(generation, settings.vmem_limit_bytes)

    def fits(changed: TableKey) -> bool:
        problem = changed.canonical_problem(max_num_seqs)
        blocks = space.candidates(problem)[0]
        # Half of the limits: the program's own scalars, the compiler's windows and its spills come on top.
        needed = scratch_bytes(Program(layout=problem.layout, blocks=blocks, settings=settings))
        return 2 * needed <= limit and 2 * page_table_bytes(problem) <= hardware(generation).smem_bytes

    pages = [1 << i for i in range(4, key.max_model_len.bit_length())]
    other = [page for page in pages if fits(key._replace(page_size=page))]
    if other:
        yield f"{page_name}{min(other, key=lambda page: max(page / key.page_size, key.page_size / page))}"
        return
    for length in (key.max_model_len >> i for i in range(1, key.max_model_len.bit_length() - 4)):
        page = recommended_page_size(length, max_num_seqs)
        if fits(key._replace(page_size=page, max_model_len=length)):
            yield f"{length_name}{length} or less with {page_name}{page}"
            break
    most = hardware(generation).vmem_bytes
    if limit < most and not space.page_table_overflow(generation, key.canonical_problem(max_num_seqs)):
        yield f"a larger --vmem-limit, up to {most // MIB}MiB"
