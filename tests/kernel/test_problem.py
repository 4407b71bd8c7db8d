from __future__ import annotations

import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import tuned_block_sizes

from autotune.kernel.problem import DTYPE_BITS, BlockSizes, Problem, Settings, TableKey, next_power_of_2

PROBLEM = Problem(
    num_q_heads=8, num_kv_heads=2, head_dim=128, page_size=128, max_num_batched_tokens=1024, pages_per_seq=16
)


def test_rounding_agrees_with_the_installed_simplify_key() -> None:
    rng = np.random.default_rng(0)
    dtypes = [name for name in DTYPE_BITS if name != "int4"]
    for _ in range(1000):
        q_dtype, kv_dtype = (str(d) for d in rng.choice(dtypes, 2))
        numbers = [int(n) for n in rng.integers(1, [200, 200, 1000, 600, 20000, 5000])]
        expected = tuned_block_sizes.simplify_key((q_dtype, kv_dtype, *numbers))
        *own, page_size, tokens, pages = numbers
        key = TableKey(q_dtype, kv_dtype, *own, page_size, tokens, page_size * pages)
        assert tuple(key.rounded()) == expected


def test_dtype_bits_are_those_of_jax() -> None:
    from jax._src import dtypes

    for name, bits in DTYPE_BITS.items():
        assert (
            dtypes.itemsize_bits(np.dtype(name) if name in ("float32", "int8") else dtypes.dtype(name))
            == bits
        )


def test_simplifying_a_keys_canonical_problem_changes_no_number() -> None:
    key = TableKey("bfloat16", "bfloat16", 12, 3, 80, 48, 1000, 7 * 48).rounded()
    assert key == TableKey("bfloat16", "bfloat16", 16, 4, 128, 64, 1024, 512)
    problem = key.canonical_problem()
    assert (problem.num_q_heads, problem.num_kv_heads, problem.max_model_len) == (16, 4, 512)


@pytest.mark.parametrize(("x", "expected"), [(1, 1), (2, 2), (3, 4), (1024, 1024), (1025, 2048)])
def test_next_power_of_2(x: int, expected: int) -> None:
    assert next_power_of_2(x) == expected


def test_next_power_of_2_refuses_zero() -> None:
    with pytest.raises(ValueError, match="got 0"):
        next_power_of_2(0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_q_heads": 7}, "q_heads=7 must be a multiple of kv_heads=2"),
        ({"page_size": 0}, "page_size=0 must be a positive"),
        ({"head_dim": -128}, "head_dim=-128 must be a positive"),
        ({"kv_dtype": "float7"}, "kv_dtype=float7 is not a dtype"),
    ],
)
def test_problem_refuses(changes: dict[str, object], said: str) -> None:
    import dataclasses

    with pytest.raises(ValueError, match=said):
        dataclasses.replace(PROBLEM, **changes)


@pytest.mark.parametrize(
    "bad",
    [
        *({"soft_cap": value} for value in (0.0, float("nan"), 1e308, -1e31, 1e-31)),
        *({"k_scale": value} for value in (-1.0, 1e31)),
        *({"v_scale": value} for value in (1e-31, float("inf"))),
        *({"sliding_window": value} for value in (0, 2**30 + 1)),
        *({"vmem_limit_bytes": value} for value in (0, 2**40 + 1)),
    ],
    ids=str,
)
def test_settings_refuse_what_the_kernel_refuses(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        Settings(**bad)  # type: ignore[arg-type]


def test_clamping_is_that_of_a_look_up() -> None:
    assert BlockSizes(128, 32).clamped(pages_per_seq=16, max_num_batched_tokens=8) == (16, 8)


def test_kv_bytes_per_token() -> None:
    assert PROBLEM.layout.kv_bytes_per_token == 2 * 2 * 128 * 2
