from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel, tuned_block_sizes

from autotune.errors import UsageError
from autotune.kernel.jax_rpa.tiling import (
    canonical_key,
    explain_untileable,
    heads_per_blk,
    is_canonical,
    supported_layouts,
    sweep_key,
    table_key,
)
from autotune.kernel.problem import Problem, TableKey


def problem(q_heads: int, kv_heads: int, **changes: object) -> Problem:
    return Problem(
        **{  # type: ignore[arg-type]
            "num_q_heads": q_heads,
            "num_kv_heads": kv_heads,
            "head_dim": 128,
            "page_size": 128,
            "max_num_batched_tokens": 1024,
            "pages_per_seq": 16,
            **changes,
        }
    )


problems = st.builds(
    lambda kv, group, dim, page, tokens, pages, q_dtype, kv_dtype: problem(
        kv * group,
        kv,
        head_dim=dim,
        page_size=page,
        max_num_batched_tokens=tokens,
        pages_per_seq=pages,
        q_dtype=q_dtype,
        kv_dtype=kv_dtype,
    ),
    st.integers(1, 64),
    st.integers(1, 16),
    st.integers(1, 512),
    st.integers(1, 512),
    st.integers(1, 16384),
    st.integers(1, 512),
    st.sampled_from(["bfloat16", "float32"]),
    st.sampled_from(["bfloat16", "float32", "float8_e5m2", "float8_e4m3fn"]),
)


@given(problems)
@settings(max_examples=400, deadline=None)
def test_no_swept_key_is_one_that_simplifying_would_change(p: Problem) -> None:
    try:
        key = sweep_key(p)
    except UsageError:
        return
    again = key.canonical_problem()
    q, combined = kernel.get_min_heads_per_blk(
        again.num_q_heads, 2 * again.num_kv_heads, key.q_dtype, key.kv_dtype
    )
    looked_up = tuned_block_sizes.simplify_key(
        (key.q_dtype, key.kv_dtype, q, combined // 2, *key[4:7], again.pages_per_seq)
    )
    assert looked_up == tuple(key)
    assert table_key(p) == key, "the key that is tuned is not the one that this shape looks up"


@given(problems)
@settings(max_examples=200, deadline=None)
def test_advice_for_heads_that_do_not_tile_is_true(p: Problem) -> None:
    for layout in supported_layouts(p):
        kernel.get_min_heads_per_blk(layout.num_q_heads, 2 * layout.num_kv_heads, p.q_dtype, p.kv_dtype)
        assert layout.num_q_heads % layout.num_kv_heads == 0
        assert layout.num_q_heads >= p.num_q_heads


@given(problems)
@settings(max_examples=200, deadline=None)
def test_what_does_not_tile_is_always_told_what_would(p: Problem) -> None:
    if heads_per_blk(p.num_q_heads, p.num_kv_heads, p.q_dtype, p.kv_dtype) is None:
        assert list(supported_layouts(p))
        with pytest.raises(UsageError, match="can not be XLA fully tiled"):
            table_key(p)


def test_twelve_query_and_six_kv_heads() -> None:
    """Padding to 8 and 16 tiles; repeating each KV head twice gives 12, which does not: not advised."""
    said = explain_untileable(problem(12, 6))
    assert "num_combined_kv_heads=12 can not be XLA fully tiled" in said
    assert "8 KV and 16 query heads (padded)" in said
    assert "autotune sweep --target v6e --out results/padded --pad-heads --shape q_heads=12," in said
    assert not re.search(r"\b12 KV", said)
    assert heads_per_blk(12, 12, "bfloat16", "bfloat16") is None


def test_repeating_is_advised_where_it_tiles() -> None:
    said = explain_untileable(problem(24, 3))
    assert "4 KV and 32 query heads (padded)" in said
    assert "24 KV and 24 query heads (each KV head stored 8 times)" in said


def test_28_query_and_4_kv_heads_are_looked_up_as_32_and_4() -> None:
    assert sweep_key(problem(28, 4))[2:4] == (32, 4)


def test_a_shape_that_no_padded_shape_shares_a_key_with_is_refused() -> None:
    """48 query heads cannot be split into tiled blocks, so the kernel asks for (64, 16), where 64 heads would
    be split and ask for (32, 8)."""
    assert table_key(problem(48, 16))[2:4] == (64, 16)
    assert table_key(problem(64, 16))[2:4] == (32, 8)
    with pytest.raises(UsageError, match="pad to q_heads=64, kv_heads=16"):
        sweep_key(problem(48, 16))


def test_published_keys_stand_for_476_canonical_ones_in_40_layouts() -> None:
    """The counts are those that were found in jax 0.10.2; its table has not changed since."""
    keys = {TableKey(*key) for table in tuned_block_sizes.TUNED_BLOCK_SIZES.values() for key in table}
    canonical = {canonical_key(key) for key in keys}
    assert None not in canonical
    assert len(canonical) == 476
    assert len({key[:6] for key in canonical if key}) == 40
    assert all(is_canonical(key) for key in canonical if key)
    unreachable = [k for k in tuned_block_sizes.TUNED_BLOCK_SIZES["TPU v6"] if not is_canonical(TableKey(*k))]
    assert len(unreachable) == 320
