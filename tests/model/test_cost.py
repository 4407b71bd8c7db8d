from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.kernel.problem import BlockSizes, Problem
from autotune.kernel.workload import Sequence, Workload, generate
from autotune.model.cost import (
    CALIBRATIONS,
    CONSTANTS,
    ISSUE_CYCLES,
    LoopCounts,
    latency_seconds,
    loop_counts,
    period,
)
from autotune.tpu.generations import GENERATIONS, V6E, hardware

CALIBRATION = CALIBRATIONS["v6e"]
PROBLEM = Problem(
    num_q_heads=8, num_kv_heads=2, head_dim=128, page_size=16, max_num_batched_tokens=256, pages_per_seq=32
)


def walk(problem: Problem, blocks: BlockSizes, batch: Workload) -> LoopCounts:
    """The kernel's own control flow, step by step: a carried sequence index, one grid step a query block."""
    cu_q_lens = [0]
    for s in batch.sequences:
        cu_q_lens.append(cu_q_lens[-1] + s.q_len)
    num_seqs, size = len(batch.sequences), blocks.num_queries_per_blk
    kv_per_blk = blocks.num_kv_pages_per_blk * problem.page_size
    steps = used = visits = kv_blks = seq = 0
    for start in range(0, problem.max_num_batched_tokens, size):
        steps += 1
        before = visits
        done = False
        while not done and start < cu_q_lens[num_seqs] and seq < num_seqs:
            visits += 1
            at = 0
            while at * kv_per_blk < batch.sequences[seq].kv_len:
                kv_blks += 1
                at += 1
            end = cu_q_lens[seq + 1]
            done = end >= start + size
            seq += end <= start + size
        used += visits > before
    return LoopCounts(steps, used, visits, kv_blks)


batches = st.lists(
    st.tuples(st.integers(1, 60), st.integers(0, 400)).map(lambda t: Sequence(t[0], min(512, t[0] + t[1]))),
    min_size=1,
    max_size=12,
).filter(lambda s: sum(x.q_len for x in s) <= 256)


@given(batches, st.integers(1, 32), st.integers(1, 256))
@settings(max_examples=300, deadline=None)
def test_loop_counts_are_the_kernels_own_walk(sequences: list[Sequence], pages: int, queries: int) -> None:
    batch = Workload("w", tuple(sequences))
    blocks = BlockSizes(pages, queries)
    assert loop_counts(PROBLEM, blocks, batch) == walk(PROBLEM, blocks, batch)


def test_latency_is_the_schedule_times_the_loops() -> None:
    """One decode over 512 tokens: one visit, four KV blocks of eight pages, one used query block of eight."""
    batch = Workload("one", (Sequence(1, 512),))
    free = dataclasses.replace(CALIBRATION, copy_seconds=0.0, kv_block_seconds=0.0, bandwidth_fraction=1e9)
    seconds = latency_seconds(V6E, PROBLEM, BlockSizes(8, 32), batch, (60, 280, 30, 100_000), free)
    assert seconds == pytest.approx((60 + 280 + 7 * 280 + 30 + 4 * 100_000) / V6E.clock_hz)
    stalled = dataclasses.replace(free, stall=1.5, call_seconds=1e-3, kv_block_seconds=1e-6)
    again = latency_seconds(V6E, PROBLEM, BlockSizes(8, 32), batch, (60, 280, 30, 100_000), stalled)
    assert again == pytest.approx(1.5 * seconds + 1e-3 + 4 * 1e-6)


def test_what_is_copied_and_waited_for() -> None:
    """With no cycles at all: a KV block waits for half of its core's time and a copy's, or for the HBM."""
    c = CALIBRATION
    core = c.kv_block_seconds
    batch = Workload("one", (Sequence(256, 512),))
    one, two = (
        latency_seconds(V6E, PROBLEM, BlockSizes(pages, 256), batch, (0, 0, 0, 0)) for pages in (32, 16)
    )
    bandwidth = hardware(V6E).hbm_bytes_per_second * c.bandwidth_fraction
    copy = {pages: pages * 16 * PROBLEM.layout.kv_bytes_per_token / bandwidth for pages in (32, 16)}
    window = 256 * 8 * 128 * 2 / bandwidth
    unhidden = 3 * c.copy_seconds + 2 * window
    arrival = {n: c.copy_seconds + max(0, copy[n] - n * ISSUE_CYCLES / V6E.clock_hz) for n in copy}
    assert one == pytest.approx(unhidden + copy[32] + max(copy[32], (core + arrival[32]) / 2))
    assert two == pytest.approx(unhidden + copy[16] + 2 * max(copy[16], (core + arrival[16]) / 2))


def test_a_kv_block_costs_the_larger_of_compute_and_copy() -> None:
    batch = generate("decode-heavy", PROBLEM)
    blocks = BlockSizes(32, 32)
    near = dataclasses.replace(CALIBRATION, copy_seconds=0.0, kv_block_seconds=0.0)
    free = latency_seconds(V6E, PROBLEM, blocks, batch, (60, 280, 30, 0), near)
    cheap = latency_seconds(V6E, PROBLEM, blocks, batch, (60, 280, 30, 10), near)
    assert free == cheap, "the copy hides what is shorter than it"
    count = loop_counts(PROBLEM, blocks, batch).kv_blks
    copied = count * 32 * 16 * PROBLEM.layout.kv_bytes_per_token
    assert free > copied / hardware(V6E).hbm_bytes_per_second
    slow = dataclasses.replace(near, bandwidth_fraction=0.45)
    assert latency_seconds(V6E, PROBLEM, blocks, batch, (60, 280, 30, 10), slow) > free


@given(*[st.integers(0, 5000)] * 3)
@settings(max_examples=200, deadline=None)
def test_period_is_that_of_two_buffers(compute: int, copy: int, latency: int) -> None:
    """Step by step: start the next copy, wait for this one, compute. Copies go over one HBM in turn."""
    start = arrived = 0.0
    starts = []
    for _ in range(400):
        starts.append(start)
        following = max(start + latency, arrived) + copy
        start = max(start, arrived) + compute
        arrived = following
    assert (starts[399] - starts[199]) / 200 == pytest.approx(
        float(period(compute, copy, latency + copy)), abs=0.01 * (1 + compute + copy + latency)
    )


def test_another_calibration_has_another_version() -> None:
    for name in CONSTANTS:
        other = dataclasses.replace(CALIBRATION, **{name: getattr(CALIBRATION, name) + 0.5})
        assert other.version != CALIBRATION.version
    assert dataclasses.replace(CALIBRATION, origin="elsewhere").version == CALIBRATION.version


def test_every_generation_says_whose_constants_it_has() -> None:
    assert set(CALIBRATIONS) == set(GENERATIONS)
    for name, calibration in CALIBRATIONS.items():
        fitted = name in ("v5e", "v6e")
        assert calibration.origin.startswith(f"fitted to winners published for {name}" if fitted else "v")
        assert fitted or f"no winner is published for {name}" in calibration.origin
    assert CALIBRATIONS["v5e"].version != CALIBRATIONS["v6e"].version
    assert CALIBRATIONS["v5p"].version == CALIBRATIONS["v5e"].version, "borrowed, so the same model"
