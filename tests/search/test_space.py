from __future__ import annotations

import dataclasses

import pytest

from autotune.errors import UsageError
from autotune.kernel.jax_rpa.call import smem_bytes
from autotune.kernel.problem import BlockSizes, Problem, Settings
from autotune.search import space
from autotune.tpu.generations import GENERATIONS, MIB, V4, V5E, V6E, V7X, beyond_vmem, vmem_limit
from tests.conftest import program


def problem(page_size: int = 128, tokens: int = 1024, length: int = 2048, seqs: int = 128) -> Problem:
    return Problem(
        num_q_heads=8,
        num_kv_heads=2,
        head_dim=128,
        page_size=page_size,
        max_num_batched_tokens=tokens,
        pages_per_seq=length // page_size,
        max_num_seqs=seqs,
    )


@pytest.mark.parametrize(
    ("page_size", "length", "pages"),
    [
        (128, 2048, [1, 2, 4, 8, 16]),
        (128, 512, [1, 2, 4]),
        (16, 4096, [8, 16, 32, 64, 128]),
        (16, 64, [4]),
        (4096, 8192, [1]),
    ],
)
def test_default_kv_pages(page_size: int, length: int, pages: list[int]) -> None:
    assert space.default_kv_pages(problem(page_size, length=length)) == pages


def test_default_candidates_are_possible_and_hold_the_incumbents() -> None:
    p = problem(tokens=64)
    found = space.candidates(p, incumbents=[BlockSizes(128, 32), BlockSizes(3, 256)])
    assert BlockSizes(16, 32) in found
    assert BlockSizes(3, 64) in found
    assert all(space.ruled_out(p, blocks) is None for blocks in found)
    assert space.default_queries(problem(tokens=8)) == [8]


def test_named_candidates_are_all_tried_and_the_impossible_say_why() -> None:
    p = problem(tokens=64, length=512)
    found = space.candidates(p, (4, 8), (32, 128), [BlockSizes(1, 1)])
    assert found == [(4, 32), (4, 128), (8, 32), (8, 128)]
    said = [verdict and verdict.error for verdict in (space.ruled_out(p, blocks) for blocks in found)]
    assert said[0] is None
    assert said[1] == "num_queries_per_blk=128 is more than max_num_batched_tokens=64"
    assert said[2] == "num_kv_pages_per_blk=8 is more than pages_per_seq=4"


def test_scratch_beyond_the_limit_needs_no_compile() -> None:
    big = program(128, 128, q_heads=32, kv_heads=8, page_size=16)
    verdict = space.scratch_overflow(V5E, big, named=False)
    assert verdict
    assert (verdict.status, verdict.needed_bytes, verdict.limit_bytes) == ("vmem_oom", 22 * MIB, 16 * MIB)
    assert verdict.seconds is None
    assert space.scratch_overflow(V5E, big, named=True) is None, "a named pair gets the compiler's own figure"
    roomy = dataclasses.replace(big, settings=Settings(vmem_limit_bytes=100 * MIB))
    assert space.scratch_overflow(V5E, roomy, named=False) is None
    assert space.scratch_overflow(V4, roomy, named=True), "v4's core has 16 MiB, whatever is asked for"


def test_page_tables_beyond_smem() -> None:
    assert space.page_table_overflow(V6E, problem(16, length=16 * 1024, seqs=128)) is None
    verdict = space.page_table_overflow(V6E, problem(16, length=16 * 4096, seqs=128))
    assert verdict
    operands = 512 + 128 * 4096 * 4 + 1024 + 512 + 512
    assert (verdict.status, verdict.needed_bytes) == ("smem_oom", operands + 2960)


@pytest.mark.parametrize(
    ("seqs", "pages", "operands"),
    [
        (128, 16, 68096),  # the sums of the tiles in listings of libtpu 0.0.42
        (256, 256, 266240 - 512),
        (100, 200, 108544),
        (1, 16, 2560),
        (3, 16, 4096),
        (5, 300, 14336),
        (1000, 130, 1033216),
        (248, 1024, 1018880),
    ],
)
def test_smem_is_counted_as_the_compiler_lists_it(seqs: int, pages: int, operands: int) -> None:
    assert smem_bytes(problem(16, length=16 * pages, seqs=seqs)) == operands + 2960


@pytest.mark.parametrize(
    ("seqs", "pages", "fits"),
    [(248, 1024, True), (250, 1024, False), (136, 1920, False), (120, 2176, False), (2008, 128, True)],
)
def test_the_border_of_smem_is_the_compilers(seqs: int, pages: int, fits: bool) -> None:
    """As libtpu 0.0.42 compiled these for v6e."""
    found = space.page_table_overflow(V6E, problem(16, length=16 * pages, seqs=seqs))
    assert (found is None) == fits


def test_a_compiled_program_may_still_be_too_large_for_a_keys_page_table() -> None:
    used = 68_208  # q8 kv2 page128 (8, 32) on v6e, with a page table of 128 rows
    fits, too_large = problem(16, length=16 * 1024), problem(16, length=16 * 2048)
    assert space.smem_overflow(V6E, fits, program(8, 32), used) is None
    verdict = space.smem_overflow(V6E, too_large, program(8, 32), used)
    assert verdict
    assert verdict.needed_bytes is not None
    assert verdict.needed_bytes > 1024 * 1024


def test_vmem_limits() -> None:
    assert vmem_limit(V6E, None) == 32 * MIB
    assert vmem_limit(V7X, 100 * MIB) == 64 * MIB
    assert beyond_vmem(V6E, None) == beyond_vmem(V6E, 128 * MIB) == ""
    assert beyond_vmem(V4, 100 * MIB) == "v4 has 16 MiB of VMEM, so --vmem-limit of 100 MiB is as 16 MiB"
    with pytest.raises(UsageError, match=r"129 MiB is more VMEM than any TPU has: v6e has 128 MiB"):
        beyond_vmem(V6E, 129 * MIB)
    assert {g.scoped_vmem_bytes // MIB for g in GENERATIONS.values()} == {16, 32}


def test_expected_compile_seconds_grow_with_the_program() -> None:
    sizes = [program(4, 32), program(8, 32), program(8, 64), program(8, 64, kv_heads=2)]
    seconds = [space.expected_compile_seconds(p) for p in sizes]
    assert seconds == sorted(seconds)
    assert 0 < seconds[0] < 2
