"""Predicted latency of a candidate on a batch: the compiler's schedule, the kernel's loops, and HBM.

This is a model, not a measurement: rows made from it say `modelled`. It knows the schedule exactly and the
loop counts exactly. What it adds is how two buffers hide, or do not hide, the copies from HBM;
docs/dev/model.md has the equations and how well they rank.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from autotune.kernel.problem import DTYPE_BITS, BlockSizes, Problem
from autotune.kernel.workload import Workload
from autotune.tpu.generations import Generation, hardware

if TYPE_CHECKING:
    import numpy.typing as npt

# Bundles with which the scalar core starts the copy of one page: counted in the listings of KV blocks of 4, 8
# and 16 pages (v6e 20, v5e 18 a page; libtpu 0.0.42). They are part of the KV block's cycles.
ISSUE_CYCLES = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """What the schedule does not show.

    call_seconds: of one call, whatever it does: it moves all candidates alike.
    copy_seconds: from starting a copy between HBM and VMEM to its end, for the first byte.
    bandwidth_fraction: share of the HBM bandwidth that copies reach.
    stall: core cycles that a bundle of the schedule takes, 1 if nothing stalls.
    kv_block_seconds: of the core, a KV block, beside its bundles.
    origin: where the constants come from.
    """

    call_seconds: float
    copy_seconds: float
    bandwidth_fraction: float
    stall: float
    kv_block_seconds: float
    origin: str

    @property
    def version(self) -> str:
        """What a modelled row calls this calibration; other constants give another name."""
        constants = [getattr(self, name) for name in CONSTANTS]
        return "schedule3-" + hashlib.sha256(repr(constants).encode()).hexdigest()[:8]


CONSTANTS = tuple(f.name for f in dataclasses.fields(Calibration) if f.name != "origin")


def _built_in(constants: tuple[float, float], origin: str) -> Calibration:
    """constants: copy_seconds and kv_block_seconds in us. Published winners say nothing of the others: the
    bandwidth is assumed, the rest is neutral."""
    copy_us, kv_block_us = constants
    return Calibration(
        call_seconds=0.0,
        copy_seconds=copy_us * 1e-6,
        bandwidth_fraction=0.92,
        stall=1.0,
        kv_block_seconds=kv_block_us * 1e-6,
        origin=origin,
    )


# By maximum likelihood of published winners: `python -m bench.fidelity --fit`. docs/model.md has intervals.
_V6E, _V5E = (0.54, 0.14), (0.29, 0.0)
_FITTED = "fitted to winners published for {}: JAX's tables of April, June and July 2025, the fitting half"
CALIBRATIONS = {
    "v4": _built_in(_V5E, "v5e's: no winner is published for v4"),
    "v5e": _built_in(_V5E, _FITTED.format("v5e")),
    "v5p": _built_in(_V5E, "v5e's: no winner is published for v5p"),
    "v6e": _built_in(_V6E, _FITTED.format("v6e")),
    "v7x": _built_in(_V6E, "v6e's: no winner is published for v7x"),
}


class LoopCounts(NamedTuple):
    """How often one call runs each loop of the kernel, all blocks of heads together.

    used_query_blks: the query blocks that have a token in them.
    """

    query_blks: int
    used_query_blks: int
    visits: int
    kv_blks: int


@functools.lru_cache(maxsize=1 << 17)  # a search asks again and again for the same few thousand
def loop_counts(problem: Problem, blocks: BlockSizes, workload: Workload) -> LoopCounts:
    """The loops of one call, counted as the kernel walks kv_lens and cu_q_lens.

    The grid has a step for each query block of max_num_batched_tokens, used or not. A step visits every
    sequence with a query in its block, and each visit reads all KV blocks of the sequence: the kernel skips
    none for the causal mask.
    """
    q_lens, kv_lens = workload.lengths
    ends = np.cumsum(q_lens)
    size = blocks.num_queries_per_blk
    visits = (ends - 1) // size - (ends - q_lens) // size + 1
    kv_blks = -(-kv_lens // (blocks.num_kv_pages_per_blk * problem.page_size))
    return LoopCounts(
        query_blks=-(-problem.max_num_batched_tokens // size),
        used_query_blks=-(-int(ends[-1]) // size),
        visits=int(visits.sum()),
        kv_blks=int((visits * kv_blks).sum()),
    )


class Terms(NamedTuple):
    """What a prediction is made of, before any constant: numbers, or arrays of them, one a candidate.

    Loop counts; core seconds of the schedule by loop depth, and of starting the copies of a KV block;
    seconds of a KV block's copy, and of one query block's window of q, at the full HBM bandwidth.
    """

    query_blks: Any
    used_query_blks: Any
    visits: Any
    kv_blks: Any
    call: Any
    query_blk: Any
    visit: Any
    kv_blk: Any
    issue: Any
    kv_copy: Any
    q_copy: Any


def terms(
    generation: Generation,
    problem: Problem,
    blocks: BlockSizes,
    workload: Workload,
    cycles: tuple[int, ...],
) -> Terms:
    """The terms of one call of a problem whose heads are all in one block.

    cycles: of the schedule by loop depth: once a call, a query block, a visit, a KV block. A KV block's copy
    is always of all its pages, whatever the sequence still has.
    """
    bandwidth = hardware(generation).hbm_bytes_per_second
    kv_bytes = blocks.num_kv_pages_per_blk * problem.page_size * problem.layout.kv_bytes_per_token
    rows = blocks.num_queries_per_blk * problem.num_q_heads
    count = loop_counts(problem, blocks, workload)
    once, query_blk, visit, kv_blk = (bundles / generation.clock_hz for bundles in cycles)
    return Terms(
        query_blks=count.query_blks,
        used_query_blks=count.used_query_blks,
        visits=count.visits,
        kv_blks=count.kv_blks,
        call=once,
        query_blk=query_blk,
        visit=visit,
        kv_blk=kv_blk,
        issue=blocks.num_kv_pages_per_blk * ISSUE_CYCLES / generation.clock_hz,
        kv_copy=kv_bytes / bandwidth,
        q_copy=rows * problem.head_dim * DTYPE_BITS[problem.q_dtype] / 8 / bandwidth,
    )


def stack(several: Iterable[Terms]) -> Terms:
    """Terms of many candidates as arrays, to predict them at once."""
    return Terms(*np.array(list(several), dtype=np.float64).T)


def seconds(t: Terms, calibration: Calibration) -> Any:
    """Modelled seconds of a call, of numbers or of arrays.

    Both loops of the kernel have two buffers: a step starts the copy of the next one's data, then waits for
    its own. So a KV block takes the longest of three: its compute; its copy; and half of a round in which a
    copy is started, arrives, and lets the core go on (`period`). The grid's loop of query blocks is the same
    with the windows of q (in) and output (out), which only shows where a step has nothing to compute.
    """
    c = calibration
    kv_copy, q_copy = t.kv_copy / c.bandwidth_fraction, t.q_copy / c.bandwidth_fraction
    kv_blk, query_blk = t.kv_blk * c.stall + c.kv_block_seconds, t.query_blk * c.stall
    # Pages that have been asked for arrive while others are still being asked for.
    kv_arrival = c.copy_seconds + np.maximum(0.0, kv_copy - t.issue * c.stall)
    idle = period(query_blk, 2 * q_copy, c.copy_seconds + q_copy)
    # Nothing hides the first q window, the first KV block and the last output window.
    unhidden = 3 * c.copy_seconds + 2 * q_copy + kv_copy
    return (
        c.call_seconds
        + unhidden
        + t.call * c.stall
        + t.used_query_blks * query_blk
        + (t.query_blks - t.used_query_blks) * idle
        + t.visits * t.visit * c.stall
        + t.kv_blks * period(kv_blk, kv_copy, kv_arrival)
    )


def period(compute: Any, copy: Any, arrival: Any) -> npt.NDArray[np.float64] | np.float64:
    """Steady seconds of a step of a loop with two buffers.

    compute: seconds of the core in a step. copy: seconds that HBM is busy with a step's data. arrival:
    seconds from the start of a copy to its end. A copy is started a step ahead, before the wait for this
    step's own: over two steps the core waits for one arrival and computes once.
    """
    result: npt.NDArray[np.float64] | np.float64 = np.maximum(
        np.maximum(compute, copy), (compute + arrival) / 2
    )
    return result


def latency_seconds(
    generation: Generation,
    problem: Problem,
    blocks: BlockSizes,
    workload: Workload,
    cycles: tuple[int, ...],
    calibration: Calibration | None = None,
) -> float:
    """Modelled seconds of one call of a problem whose heads are all in one block.

    calibration: the generation's built-in one if None.
    """
    calibration = calibration or CALIBRATIONS[generation.name]
    return float(seconds(terms(generation, problem, blocks, workload, cycles), calibration))
