"""The host's reference against JAX's own, and which rows it is computed for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Rows

import jax
import numpy as np
import pytest

from autotune.kernel.jax_rpa import call, inputs, reference
from autotune.kernel.problem import DTYPE_BITS, NO_SETTINGS, Problem, Settings
from autotune.kernel.workload import GENERATORS, Sequence, Workload, generate

PROBLEM = Problem(
    num_q_heads=8,
    num_kv_heads=2,
    head_dim=128,
    page_size=16,
    max_num_batched_tokens=128,
    pages_per_seq=8,
    max_num_seqs=8,
)
# A decode, a chunk with context, a whole prompt, and a chunk that fills its last page.
BATCH = Workload("four", (Sequence(1, 100), Sequence(41, 77), Sequence(20, 20), Sequence(30, 128)))
# With scales, keys and values have q's dtype before they are used, and JAX's reference does not round
# probabilities to 8 bits.
SCALED = Settings(k_scale=1.0, v_scale=1.0)
ALL = Settings(sliding_window=24, soft_cap=10.0, k_scale=0.5, v_scale=2.0)


def differences(problem: Problem, settings: Settings) -> np.ndarray:
    """Of all the batch's new tokens, as the CPU runs JAX's reference."""
    data = inputs.InputMaker(jax.devices()[0]).make(problem, [BATCH], interpreted=True)
    want = inputs.expected(problem, BATCH, data.batches[0], data, settings)
    assert want.tokens.tolist() == list(range(92)) and want.values.std() > 0.3
    b = data.batches[0]
    ragged = (b.kv_lens, b.page_indices, b.cu_q_lens, b.num_seqs)  # constants: it slices by them
    run = jax.jit(lambda q, kv_pages: call.reference((q, kv_pages, *ragged), settings))
    jaxs = np.asarray(run(*data.arguments[0][:2])).astype(np.float32)
    return np.abs(jaxs[want.tokens] - want.values)


@pytest.mark.parametrize(
    ("kv_dtype", "settings"),
    [*((name, ALL) for name in DTYPE_BITS), ("bfloat16", SCALED), ("int8", SCALED)],
    ids=lambda value: value if isinstance(value, str) else f"window {value.sliding_window}",
)
def test_agrees_with_jaxs_reference_in_every_dtype(kv_dtype: str, settings: Settings) -> None:
    exact = differences(dataclasses.replace(PROBLEM, q_dtype="float32", kv_dtype=kv_dtype), settings)
    assert exact.max() < 2e-5
    rounded = differences(dataclasses.replace(PROBLEM, kv_dtype=kv_dtype), settings)
    assert rounded.max() < 0.06 and rounded.mean() < 0.003


@pytest.mark.parametrize("settings", [NO_SETTINGS, Settings(sliding_window=1), Settings(soft_cap=-5.0)])
def test_agrees_with_jaxs_reference_without_scales(settings: Settings) -> None:
    exact = dataclasses.replace(PROBLEM, q_dtype="float32", kv_dtype="float32")
    assert differences(exact, settings).max() < 2e-5
    assert differences(PROBLEM, settings).max() < 0.03


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz"])
def test_jaxs_reference_rounds_probabilities_of_unscaled_float8(kv_dtype: str) -> None:
    """So the two differ by more, but little on average. (Probabilities as int8 are 0 or 1.)"""
    differ = differences(dataclasses.replace(PROBLEM, kv_dtype=kv_dtype), NO_SETTINGS)
    assert 0.005 < differ.mean() < 0.03


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(4, 4), (8, 1), (12, 2)])
def test_agrees_with_jaxs_reference_however_many_queries_share_a_head(q_heads: int, kv_heads: int) -> None:
    problem = dataclasses.replace(PROBLEM, q_dtype="float32", num_q_heads=q_heads, num_kv_heads=kv_heads)
    assert differences(problem, ALL).max() < 2e-5


def borders(rows: Rows[int], start: int, size: int) -> list[tuple[bool, bool]]:
    """For each border of blocks of a size inside a sequence, whether both rows beside it are among these."""
    first = -(-(start + 1) // size) * size - start
    return [(b - 1 in rows, b in rows) for b in range(first, max(rows) + 1, size)]


def test_rows_are_in_the_order_of_what_they_tell() -> None:
    rows = reference.rows_by_interest(start=100, count=5000).tolist()
    assert sorted(rows) == list(range(5000))
    assert rows[:2] == [4999, 0] and max(np.diff(sorted(rows[:8]))) < 800  # the ends, then evenly spread
    assert borders(rows[:60], 100, 256) == [(True, True)] * 19
    assert borders(rows[:400], 100, 32) == [(True, True)] * 156
    few = np.sort(rows[8:18])  # five borders out of nineteen
    assert few[0] < 2500 < few[-1] and np.all(np.diff(few)[::2] == 1)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_short_sequences_have_all_their_rows(count: int) -> None:
    assert sorted(reference.rows_by_interest(255, count)) == list(range(count))


def test_the_sample_has_every_sequence_where_they_are_short() -> None:
    taken = reference.sample(PROBLEM, BATCH, NO_SETTINGS)
    assert [(s.sequence, s.rows.tolist()) for s in taken] == [
        (i, list(range(s.q_len))) for i, s in enumerate(BATCH.sequences)
    ]


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("window", [None, 512])
def test_the_sample_of_a_long_batch_is_bounded_and_tells(name: str, window: int | None) -> None:
    problem = Problem(
        num_q_heads=32,
        num_kv_heads=8,
        head_dim=128,
        page_size=128,
        max_num_batched_tokens=4096,
        pages_per_seq=64,
    )
    workload = generate(name, problem)
    settings = Settings(sliding_window=window)
    taken = reference.sample(problem, workload, settings)
    logits = 0
    for i, rows in taken:
        assert {0, workload.sequences[i].q_len - 1} <= set(rows.tolist()) and np.all(np.diff(rows) > 0)
        seen = workload.sequences[i].kv_len - reference.first_column(workload.sequences[i], settings)
        logits += seen * (32 * len(rows) + 8 * reference.FETCH_LOGITS)
    assert reference.MAX_LOGITS / 2 < logits <= reference.MAX_LOGITS
    sequences = [workload.sequences[i] for i, _ in taken]
    assert max(workload.sequences) in sequences and min(s.kv_len for s in workload.sequences) in {
        s.kv_len for s in sequences
    }
    longest = max(range(len(workload.sequences)), key=lambda i: workload.sequences[i].q_len)
    rows = next(rows for i, rows in taken if i == longest)
    start = sum(s.q_len for s in workload.sequences[:longest])
    found = borders(rows.tolist(), start, 256)
    assert found and sum(a and b for a, b in found) >= min(len(found), 4)


def test_the_telling_sequences_are_compared_however_long_they_are() -> None:
    """131,072 tokens of context, as Llama 3.1 has: the last row of each, which sees all of it."""
    chunk, decode = Sequence(8192, 131072), Sequence(1, 131072)
    long = Workload("long", (decode, *(Sequence(1, n) for n in range(1, 200)), chunk, Sequence(1, 90000)))
    problem = dataclasses.replace(PROBLEM, num_q_heads=32, num_kv_heads=8, pages_per_seq=8192)
    taken = {s.sequence: s.rows.tolist() for s in reference.sample(problem, long, NO_SETTINGS)}
    assert {0, 1, 200, 201} <= set(taken) and taken[200] == [8191]
