"""Simplified keys and device names of each dialect, beside the look-ups they stand for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import tuned_block_sizes

from autotune.kernel.problem import TableKey
from autotune.tables import load, lookups
from autotune.tables.dialects import INFERENCE, JAX, SGLANG
from autotune.tables.keys import InferenceKey
from autotune.tpu.generations import GENERATIONS

numbers = st.integers(1, 1 << 20)


@given(st.tuples(numbers, numbers, numbers, st.integers(1, 512), numbers), st.integers(1, 512))
def test_jax_keys_simplify_as_jax_does(parts, pages_per_seq):
    dtypes = ("bfloat16", "float8_e5m2")
    page_size = parts[3]
    key = TableKey(*dtypes, *parts, page_size * pages_per_seq)
    assert load("jax").rule.simplify(key) == tuned_block_sizes.simplify_key((*dtypes, *parts, pages_per_seq))


@given(st.sampled_from(list(lookups.RULES.values())), st.lists(numbers, min_size=6, max_size=6))
def test_simplifying_twice_changes_nothing(rule, parts):
    fields = rule.dialect.key_type._fields
    if rule.dialect is INFERENCE:
        return
    once = rule.simplify(rule.dialect.key_type("bfloat16", "bfloat16", *parts[: len(fields) - 2]))
    assert once is None if rule.dialect is SGLANG and parts[0] < parts[1] else rule.simplify(once) == once


def test_tpu_inference_pads_heads_to_the_packing():
    from autotune.tables.keys import padded_heads

    assert padded_heads(2, 2, False, "bfloat16", "bfloat16") == (4, 2)
    assert padded_heads(4, 1, False, "bfloat16", "float8_e4m3fn") == (4, 2)
    assert padded_heads(28, 4, False, "bfloat16", "bfloat16") == (32, 4)
    assert padded_heads(8, 1, True, "bfloat16", "bfloat16") == (8, 2)


def test_a_key_without_parts_has_no_dimensions():
    assert INFERENCE.dimensions(InferenceKey(128, "", "", "")) == {}


def test_device_names():
    assert JAX.generations("TPU v5") == ("v5e", "v5p")
    assert JAX.generations("TPU v5 lite") == ("v5e",)
    assert JAX.generations("TPU v6") == ("v6e",)
    assert JAX.generations("TPU7x") == JAX.generations("TPU v7") == ("v7x",)
    assert INFERENCE.generations("TPU v5") == SGLANG.generations("TPU v5p") == ("v5p",)
    assert INFERENCE.generations("TPU v6") == SGLANG.generations("TPU v6e") == ("v6e",)
    assert JAX.generations("TPU v2") == ()
    for dialect in (JAX, INFERENCE, SGLANG):
        assert {dialect.generations(dialect.written[g]) for g in GENERATIONS} == {(g,) for g in GENERATIONS}
