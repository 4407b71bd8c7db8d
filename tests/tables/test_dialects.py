"""Simplified keys and device names of each dialect, beside the look-ups they stand for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import tuned_block_sizes

from autotune.kernel.problem import TableKey
from autotune.tables.dialects import INFERENCE, JAX, SGLANG
from autotune.tables.keys import InferenceKey, SglangKey, inference_key
from autotune.tpu.chips import GENERATIONS

numbers = st.integers(1, 1 << 20)


@given(st.tuples(numbers, numbers, numbers, numbers, numbers), st.integers(1, 512))
def test_jax_keys_simplify_as_jax_does(parts, pages_per_seq):
    dtypes = ("bfloat16", "float8_e5m2")
    page_size = parts[3]
    key = TableKey(*dtypes, *parts, page_size * pages_per_seq)
    assert JAX.simplify(key) == tuned_block_sizes.simplify_key((*dtypes, *parts, pages_per_seq))


@given(st.sampled_from([JAX, SGLANG]), st.lists(numbers, min_size=6, max_size=6))
def test_simplifying_twice_changes_nothing(dialect, parts):
    key = dialect.key_type(*("bfloat16", "bfloat16"), *parts[: len(dialect.key_type._fields) - 2])
    once = dialect.simplify(key)
    assert once is None if dialect is SGLANG and parts[0] < parts[1] else dialect.simplify(once) == once


def test_tpu_inference_pads_heads_to_the_packing():
    def heads(q, kv, kv_dtype="bfloat16"):
        return INFERENCE.dimensions(
            INFERENCE.asked(inference_key("bfloat16", kv_dtype, q, kv, 128, 128, 2048, None))
        )

    assert (heads(2, 2)["num_q_heads"], heads(2, 2)["num_kv_heads"]) == (4, 2)
    assert heads(4, 1, "float8_e4m3fn")["num_kv_heads"] == 2
    assert heads(28, 4)["num_q_heads"] == 32


def test_tpu_inference_has_a_table_of_its_own_for_a_head_dim_of_64():
    key = inference_key("bfloat16", "bfloat16", 16, 2, 64, 256, 2048, 128)
    assert INFERENCE.simplify(key) == key
    one = inference_key("bfloat16", "bfloat16", 8, 1, 64, 256, 2048, None)
    assert INFERENCE.dimensions(INFERENCE.asked(one))["num_kv_heads"] == 2
    narrow = inference_key("bfloat16", "bfloat16", 8, 2, 80, 256, 2048, None)
    assert INFERENCE.dimensions(INFERENCE.simplify(narrow))["head_dim"] == 128


def test_heads_that_only_a_call_with_fewer_asks_for():
    """With 8-bit KV a call of 2 query heads and 1 KV head asks for 2 and 2; one of 2 and 2 for 4 and 2."""
    two = inference_key("bfloat16", "float8_e4m3fn", 2, 2, 128, 128, 2048, None)
    one = inference_key("bfloat16", "float8_e4m3fn", 2, 1, 128, 128, 2048, None)
    assert INFERENCE.asked(one) == two
    assert INFERENCE.asked(two) == two._replace(heads="q_head-4_kv_head-2_head-128")
    assert INFERENCE.simplify(two) == two
    wide = two._replace(dtypes="q_bfloat16_kv_bfloat16")
    assert INFERENCE.simplify(wide) == wide._replace(heads="q_head-4_kv_head-2_head-128")
    assert SGLANG.simplify(SglangKey("bfloat16", "bfloat16", 2, 4, 128, 128, 64)) is None


def test_tpu_inference_keys_that_no_look_up_builds():
    key = inference_key("bfloat16", "bfloat16", 16, 1, 128, 128, 512, None)
    assert INFERENCE.simplify(key._replace(length=512)) == key
    assert INFERENCE.simplify(key._replace(heads="q_head-16")) is None
    assert INFERENCE.simplify(key._replace(dtypes="q_bfloat16_kv_float7")) is None
    assert INFERENCE.dimensions(InferenceKey(128, "", "", "")) == {}


def test_zeros_are_no_key():
    assert JAX.simplify(TableKey("bfloat16", "bfloat16", 0, 2, 128, 128, 1024, 2048)) is None
    assert SGLANG.simplify(SglangKey("bfloat16", "bfloat16", 8, 2, 128, 128, 0)) is None


def test_device_names():
    assert JAX.generations("TPU v5") == ("v5e", "v5p")
    assert JAX.generations("TPU v5 lite") == ("v5e",)
    assert JAX.generations("TPU v6") == ("v6e",)
    assert JAX.generations("TPU7x") == JAX.generations("TPU v7") == ("v7x",)
    assert INFERENCE.generations("TPU v5") == SGLANG.generations("TPU v5p") == ("v5p",)
    assert JAX.generations("TPU v2") == ()
    for dialect in (JAX, INFERENCE, SGLANG):
        assert {dialect.generations(dialect.written[g]) for g in GENERATIONS} == {(g,) for g in GENERATIONS}
