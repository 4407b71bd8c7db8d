"""Predicted latency of a candidate on a batch: the compiler's schedule times how often its loops run.

This is a model, not a measurement: rows made from it say `modelled`. It knows the schedule exactly and the
loop counts exactly; memory traffic, and what the schedule does not show, are a few constants.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from typing import NamedTuple

import numpy as np

from autotune.kernel.problem import BlockSizes, Problem
from autotune.kernel.workload import Workload
from autotune.tpu.chips import Generation, hardware


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """Constants for what the schedule does not show.

    kv_blk_cycles, visit_cycles, query_blk_cycles: core cycles on top of the schedule for each KV block, each
    visit of a sequence to a query block, and each query block: waiting for copies to start and to finish.
    bandwidth_fraction: share of the HBM bandwidth that page copies reach.
    """

    kv_blk_cycles: float
    visit_cycles: float
    query_blk_cycles: float
    bandwidth_fraction: float
    origin: str

    @property
    def version(self) -> str:
        """What a modelled row calls this calibration; other constants give another name."""
        constants = [getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "origin"]
        return "schedule1-" + hashlib.sha256(repr(constants).encode()).hexdigest()[:8]


CALIBRATION = Calibration(
    kv_blk_cycles=4000.0,
    visit_cycles=300.0,
    query_blk_cycles=2000.0,
    bandwidth_fraction=0.9,
    origin=(
        "random search on half of the head-and-page layouts of JAX's published 'TPU v6' table; on the other "
        "half the published winner is the model's first for 67% of the keys, among its first three for 96%"
    ),
)


class LoopCounts(NamedTuple):
    """How often one call runs each loop of the kernel, all blocks of heads together."""

    query_blks: int
    visits: int
    kv_blks: int


@functools.lru_cache(maxsize=1 << 17)  # a search asks again and again for the same few thousand
def loop_counts(problem: Problem, blocks: BlockSizes, workload: Workload) -> LoopCounts:
    """The loops of one call, counted as the kernel walks kv_lens and cu_q_lens.

    The grid has a step for each query block of max_num_batched_tokens, used or not. A step visits every
    sequence with a query in its block, and each visit reads all KV blocks of the sequence: the kernel skips
    none for the causal mask.
    """
    q_lens, kv_lens = np.array(workload.sequences, dtype=np.int64).T
    ends = np.cumsum(q_lens)
    size = blocks.num_queries_per_blk
    visits = (ends - 1) // size - (ends - q_lens) // size + 1
    kv_blks = -(-kv_lens // (blocks.num_kv_pages_per_blk * problem.page_size))
    return LoopCounts(
        query_blks=-(-problem.max_num_batched_tokens // size),
        visits=int(visits.sum()),
        kv_blks=int((visits * kv_blks).sum()),
    )


def latency_seconds(
    generation: Generation,
    problem: Problem,
    blocks: BlockSizes,
    workload: Workload,
    cycles: tuple[int, ...],
    calibration: Calibration = CALIBRATION,
) -> float:
    """Modelled seconds of one call of a problem whose heads are all in one block.

    cycles: of the schedule by loop depth: once a call, a query block, a visit, a KV block. While one KV block
    is computed, the copy of the next is under way: a KV block costs the longer of the two. A copy is always
    of all pages of a block, whatever the sequence still has.
    """
    count = loop_counts(problem, blocks, workload)
    once, query_blk, visit, kv_blk = cycles
    copied = blocks.num_kv_pages_per_blk * problem.page_size * problem.layout.kv_bytes_per_token
    copy_seconds = copied / (hardware(generation).hbm_bytes_per_second * calibration.bandwidth_fraction)
    overhead = (
        once
        + count.query_blks * (query_blk + calibration.query_blk_cycles)
        + count.visits * (visit + calibration.visit_cycles)
        + count.kv_blks * calibration.kv_blk_cycles
    )
    return overhead / generation.clock_hz + count.kv_blks * max(kv_blk / generation.clock_hz, copy_seconds)
