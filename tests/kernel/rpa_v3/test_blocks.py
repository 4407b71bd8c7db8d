from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.errors import UsageError
from autotune.kernel.problem import Problem
from autotune.kernel.rpa_v3.blocks import (
    DECODE,
    MIXED,
    Blocks,
    broken_rule,
    from_environment,
    scratch_bytes,
    smaller,
    smallest,
)

SIZES = st.integers(1, 4096)


def test_the_environment_sets_block_sizes_of_cases() -> None:
    given = {"RPA_V3_DECODE_BLOCK_SIZES": "1,2048, 1,512", "RPA_V3_MIXED_BLOCK_SIZES": ""}
    assert from_environment(given) == {DECODE: Blocks(1, 2048, 1, 512)}
    assert from_environment({"RPA_V3_MIXED_BLOCK_SIZES": str(Blocks(32, 512, 32, 256))}) == {
        MIXED: Blocks(32, 512, 32, 256)
    }


@pytest.mark.parametrize("text", ["1,2", "1,2,3,x", "1,2,3,4,5", "0,128,1,128", "-1,2,3,4", "9" * 30])
def test_block_sizes_that_are_not_four_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="four block sizes: type bq_sz"):
        from_environment({"RPA_V3_MIXED_BLOCK_SIZES": text})


@pytest.mark.parametrize(
    ("blocks", "page_size", "rule"),
    [
        # The kernel's own defaults with 3, 5 and 7 pages of 128, and 5 of 16.
        (Blocks(256, 384, 128, 256), 128, "bkv_sz=384 is not a multiple of bkv_csz=256"),
        (Blocks(256, 640, 128, 384), 128, "bkv_sz=640 is not a multiple of bkv_csz=384"),
        (Blocks(256, 896, 128, 512), 128, "bkv_sz=896 is not a multiple of bkv_csz=512"),
        (Blocks(256, 80, 128, 48), 16, "bkv_sz=80 is not a multiple of bkv_csz=48"),
        (Blocks(256, 512, 96, 512), 128, "bq_sz=256 is not a multiple of bq_csz=96"),
        (Blocks(32, 192, 32, 192), 128, "bkv_sz=192 is not a multiple of page_size=128"),
        (Blocks(8, 512, 16, 512), 128, None),  # the kernel takes no more of bq_csz than there is of bq_sz
        (Blocks(32, 1024, 32, 512), 128, None),
    ],
)
def test_rules_that_block_sizes_break(blocks: Blocks, page_size: int, rule: str | None) -> None:
    assert broken_rule(blocks, page_size) == rule


@given(SIZES, SIZES, SIZES, SIZES, st.sampled_from([1, 16, 48, 128, 256]))
def test_smaller_block_sizes_keep_the_rules_and_are_smaller(
    bq: int, bkv: int, bq_csz: int, bkv_csz: int, page_size: int
) -> None:
    blocks = Blocks(bq, bkv, bq_csz, bkv_csz)
    found = smaller(blocks, page_size)
    for each in found:
        assert broken_rule(each, page_size) is None
        assert each.bq_sz <= bq
        assert each.bkv_sz <= max(bkv, page_size)
        assert each.bq_csz <= bq_csz
    tokens = [each.bq_sz * each.bkv_sz for each in found]
    assert tokens == sorted(tokens, reverse=True)
    assert smallest(page_size) in [*found, blocks]


def test_scratch_is_a_lower_bound_of_what_was_compiled() -> None:
    """VMEM of 32 query and 8 KV heads of 128 in bfloat16 on v7x, libtpu 0.0.42.1."""
    problem = Problem(
        num_q_heads=32,
        num_kv_heads=8,
        head_dim=128,
        page_size=256,
        max_num_batched_tokens=2048,
        pages_per_seq=32,
    )
    for blocks, vmem in ((Blocks(64, 2048, 64, 512), 27283456), (Blocks(128, 2048, 128, 512), 34795520)):
        assert vmem / 1.5 < scratch_bytes(problem, blocks) < vmem
