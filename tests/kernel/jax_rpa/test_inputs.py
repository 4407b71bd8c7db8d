"""The pool of pages, what the host knows of it, and what is found to be a mismatch."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import jax
import numpy as np
import pytest

from autotune.kernel.jax_rpa import inputs
from autotune.kernel.problem import DTYPE_BITS, NO_SETTINGS, Problem, Settings
from autotune.kernel.workload import GENERATORS, Sequence, Workload, generate, place

PROBLEM = Problem(
    num_q_heads=8,
    num_kv_heads=2,
    head_dim=128,
    page_size=16,
    max_num_batched_tokens=128,
    pages_per_seq=8,
    max_num_seqs=8,
)
BATCH = Workload("three", (Sequence(1, 100), Sequence(41, 77), Sequence(60, 128)))


@pytest.fixture
def small_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool of 64 bfloat16 pages, of which 9 are distinct: as on a TPU, with less of everything."""
    monkeypatch.setattr(inputs, "POOL_BYTES", 64 * 16 * PROBLEM.layout.kv_bytes_per_token)
    monkeypatch.setattr(inputs, "BLOCK_VALUES", 10 * 16 * 4 * 128)


def made(problem: Problem = PROBLEM, seed: int = 0, interpreted: bool = False) -> inputs.Inputs:
    return inputs.InputMaker(jax.devices()[0]).make(problem, [BATCH], seed, interpreted=interpreted)


@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_the_host_knows_every_page_and_query_of_the_device(small_pool: None, dtype: str) -> None:
    data = made(dataclasses.replace(PROBLEM, q_dtype=dtype, kv_dtype=dtype))
    q, pool = (np.asarray(array) for array in data.arguments[0][:2])
    assert (
        q.dtype == pool.dtype == np.dtype(jax.numpy.dtype(dtype)) and len(pool) == 1024 // DTYPE_BITS[dtype]
    )
    assert len(data.block) == 9
    for p, page in enumerate(pool):
        assert np.array_equal(page.astype(np.float32), data.block[p % 9])
    assert np.array_equal(q, data.q)
    # Standard normal: int8 and int4 cut it to whole numbers.
    assert abs(data.block.mean()) < 0.02 and 0.65 < data.block.std() < 1.05
    # No page and no row of queries is another one.
    assert len(np.unique(data.block.reshape(9, -1), axis=0)) == 9
    assert len(np.unique(q.reshape(128, -1).astype(np.float32), axis=0)) == 128


def test_rows_of_queries_differ_where_there_are_more_than_random_numbers() -> None:
    data = made(dataclasses.replace(PROBLEM, max_num_batched_tokens=2048), interpreted=True)
    assert data.q.size > inputs.QUERY_VALUES
    assert len(np.unique(data.q[:, 0, :8].astype(np.float32), axis=0)) == 2048


def test_another_seed_is_other_data(small_pool: None) -> None:
    one, two, again = made(seed=1), made(seed=2), made(seed=1)
    assert not np.array_equal(one.block, two.block) and not np.array_equal(one.q, two.q)
    assert np.array_equal(one.block, again.block) and np.array_equal(one.q, again.q)


def test_on_a_tpu_the_pool_has_one_size_for_all_keys_of_a_layout() -> None:
    small, large = (
        dataclasses.replace(PROBLEM, max_num_batched_tokens=tokens, pages_per_seq=pages, max_num_seqs=128)
        for tokens, pages in ((128, 1), (4096, 8192))
    )
    sizes = {inputs.pool_pages(p, [generate(name, p) for name in GENERATORS], False) for p in (small, large)}
    assert sizes == {(1 << 30) // (16 * 2 * 2 * 128 * 2)}
    placed = place(large, generate("decode-heavy", large), *sizes)
    assert placed.page_indices.max() < placed.total_num_pages and placed.page_indices[0].max() > 1000


def test_for_the_interpreter_the_pool_is_small_and_serves_all_workloads() -> None:
    batches = [generate(name, PROBLEM) for name in GENERATORS]
    pages = inputs.pool_pages(PROBLEM, batches, True)
    data = inputs.InputMaker(jax.devices()[0]).make(PROBLEM, batches, interpreted=True)
    assert pages == max(sum(-(-s.kv_len // 16) for s in batch.sequences) for batch in batches)
    assert all(arguments[1] is data.arguments[0][1] for arguments in data.arguments)
    assert data.arguments[0][1].shape == (pages, 16, 4, 128)
    for batch, placed, arguments in zip(batches, data.batches, data.arguments, strict=True):
        assert np.array_equal(arguments[3], placed.page_indices)
        assert np.array_equal(arguments[3], place(PROBLEM, batch, pages).page_indices)


def compiled(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The programs compiled since the last call."""
    said = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return [line for line in said if line.startswith("Finished XLA compilation of")]


def test_one_program_is_compiled_a_layout_and_none_for_its_next_key(
    small_pool: None, caplog: pytest.LogCaptureFixture
) -> None:
    maker = inputs.InputMaker(jax.devices()[0])

    def check(problem: Problem, settings: Settings) -> Any:
        data = maker.make(problem, [BATCH], interpreted=False)
        output = jax.device_put(np.zeros_like(data.q))
        want = inputs.expected(problem, BATCH, data.batches[0], data, settings)
        assert want.mismatch(output) is not None
        return data.arguments[0][1]

    with caplog.at_level(logging.WARNING), jax.log_compiles():
        pool = check(PROBLEM, NO_SETTINGS)
        assert len(compiled(caplog)) == 1
        # Another key, other settings, another number of query heads.
        other = dataclasses.replace(PROBLEM, num_q_heads=4, max_num_batched_tokens=256, pages_per_seq=16)
        assert check(other, Settings(sliding_window=8)) is pool
        assert compiled(caplog) == []
        assert check(dataclasses.replace(PROBLEM, page_size=32, kv_dtype="int8"), NO_SETTINGS) is not pool
        assert len(compiled(caplog)) == 1


@pytest.mark.parametrize("window", [None, 40])
def test_what_is_wrong_is_found(small_pool: None, window: int | None) -> None:
    data = made()
    settings = Settings(sliding_window=window)
    want = inputs.expected(PROBLEM, BATCH, data.batches[0], data, settings)
    assert want.tokens.tolist() == list(range(102))
    assert want.mismatch(want.values.astype(data.q.dtype)) is None

    # A page of the decode's that another is read for.
    batch = data.batches[0]
    swapped = batch.page_indices.copy()
    swapped[0, 5] += 1
    other = inputs.expected(PROBLEM, BATCH, dataclasses.replace(batch, page_indices=swapped), data, settings)
    said = want.mismatch(other.values)
    assert said is not None and said.startswith("1 of 102 compared tokens differ") and "token 0" in said

    # The last row before a border of query blocks holds the row after it.
    output = want.values.copy()
    output[31] = output[32]
    said = want.mismatch(output)
    assert said is not None and said.startswith("1 of 102") and "token 31" in said

    output = want.values.copy()
    output[64, 3, 7] = np.nan
    said = want.mismatch(output)
    assert said is not None and "nan for" in said and "token 64" in said
