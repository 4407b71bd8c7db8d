"""The kernel in the interpreter against JAX's reference, on real batches."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from autotune.kernel.jax_rpa import call, inputs
from autotune.kernel.jax_rpa.interpret import cut, lower_interpreted
from autotune.kernel.problem import NO_SETTINGS, BlockSizes, Problem, Settings
from autotune.kernel.workload import GENERATORS, Sequence, Workload, generate

PROBLEM = Problem(
    num_q_heads=8,
    num_kv_heads=2,
    head_dim=128,
    page_size=16,
    max_num_batched_tokens=64,
    pages_per_seq=8,
    max_num_seqs=8,
)
# A decode, a chunk with context that crosses a query block, and a whole prompt; pages partly filled.
BATCH = Workload("three", (Sequence(1, 100), Sequence(41, 77), Sequence(20, 20)))


@functools.cache
def run(problem: Problem, workload: Workload, blocks: BlockSizes, settings: Settings = NO_SETTINGS) -> Any:
    data = inputs.InputMaker(jax.devices()[0]).make(problem, [workload], interpreted=True)
    want = inputs.expected(problem, workload, data.batches[0], data, settings)
    got = lower_interpreted("rpa", blocks, settings, data.arguments[0]).compile()(*data.arguments[0])
    return got, want, data


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float32", "float8_e5m2"])
def test_agrees_with_the_reference(kv_dtype: str) -> None:
    q_dtype = "float32" if kv_dtype == "float32" else "bfloat16"
    problem = dataclasses.replace(PROBLEM, q_dtype=q_dtype, kv_dtype=kv_dtype)
    got, want, _ = run(problem, BATCH, BlockSizes(2, 32))
    assert want.mismatch(got) is None
    assert len(want.tokens) == 62 and want.values.std() > 0.5  # all tokens, and no zeros


def test_agrees_with_the_reference_under_other_settings() -> None:
    settings = Settings(sliding_window=24, soft_cap=10.0, k_scale=0.5, v_scale=2.0)
    got, want, _ = run(PROBLEM, BATCH, BlockSizes(4, 32), settings)
    assert want.mismatch(got) is None
    plain = run(PROBLEM, BATCH, BlockSizes(2, 32))[1]
    assert plain.mismatch(got) is not None


def test_a_page_table_that_points_a_page_short_is_a_mismatch() -> None:
    _, want, data = run(PROBLEM, BATCH, BlockSizes(2, 32))
    q, kv_pages, kv_lens, page_indices, *rest = data.arguments[0]
    short = page_indices.at[0, 3].set(page_indices[0, 2])  # the decode reads its third page twice
    program = lower_interpreted("rpa", BlockSizes(2, 32), NO_SETTINGS, data.arguments[0]).compile()
    got = program(q, kv_pages, kv_lens, short, *rest)
    said = want.mismatch(got)
    assert said is not None and said.startswith("1 of 62 compared tokens differ") and "token 0" in said


def test_a_nan_is_a_mismatch() -> None:
    got, want, _ = run(PROBLEM, BATCH, BlockSizes(2, 32))
    broken = np.array(got, np.float32)
    broken[41, 3, 7] = np.nan
    said = want.mismatch(broken)
    assert said is not None and "nan for" in said and "token 41" in said


def test_jax_is_left_as_it_was() -> None:
    from jax._src import literals
    from jax.experimental import pallas
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel

    had = hasattr(literals.TypedInt, "shape") if hasattr(literals, "TypedInt") else None
    data = run(PROBLEM, BATCH, BlockSizes(2, 32))[2]
    with pytest.raises(ValueError, match="must be in range"):
        lower_interpreted("rpa", BlockSizes(16, 32), NO_SETTINGS, data.arguments[0])
    assert kernel.pl is pallas
    assert had is None or hasattr(literals.TypedInt, "shape") == had
    with pytest.raises(ValueError, match=r"[Oo]nly interpret mode"):
        jax.jit(call.kernel_call(BlockSizes(2, 32), NO_SETTINGS)).lower(*data.arguments[0])


@pytest.mark.parametrize("name", GENERATORS)
def test_cut_workloads_are_small_and_of_every_kind(name: str) -> None:
    problem = Problem(
        num_q_heads=4,
        num_kv_heads=1,
        head_dim=128,
        page_size=64,
        max_num_batched_tokens=2048,
        pages_per_seq=32,
    )
    full = generate(name, problem)
    small = cut(full, problem)
    assert small.misfit(problem) is None
    assert small.fingerprint != full.fingerprint and small.name == f"{name} (cut)"
    assert len(small.sequences) <= 4 and sum(s.q_len for s in small.sequences) <= 200
    assert any(s.q_len == 1 for s in small.sequences) and any(s.q_len > 1 for s in small.sequences)
    assert all(s.kv_len <= 6 * 64 for s in small.sequences)
