"""Modelled latency of a case of ragged paged attention v3: its loops, how often they run, and HBM.

The two-buffer model of `cost` over the tree of loops, with the constants of JAX's kernel. Nothing is
fitted to this kernel, and how well it ranks is not measured yet. Never compare it with the other kernel's.
"""

from __future__ import annotations

import dataclasses

from autotune.kernel.problem import Problem
from autotune.kernel.rpa_v3.blocks import DECODE, Blocks
from autotune.kernel.workload import Sequence
from autotune.model.cost import Calibration, period
from autotune.tpu.generations import Generation, hardware
from autotune.tpu.loops import Loop


@dataclasses.dataclass(frozen=True)
class Bundles:
    """Core cycles of one pass: of the call, a sequence, a block of queries, a block of KV, the start of one
    page's write to the cache, and a tile that is computed on."""

    call: int
    sequence: int
    query_blk: int
    kv_blk: int
    page_write: int
    tile: int


def bundles(case: str, loops: Loop) -> Bundles | None:
    """The cycles by the loops' meaning; None where the loops are not those of the kernel."""
    path = [loops]
    while len(path[-1].inner) == 1:
        path.append(path[-1].inner[0])
    # A decode has one block of queries, so the compiler removes their loop. On v7x a third loop of a few
    # bundles stands in a block of KV; how often it runs is not known, and it counts once.
    if len(path) != (3 if case == DECODE else 4) or len(path[-1].inner) not in (2, 3):
        return None
    write, tile, *others = path[-1].inner
    if any(loop.inner for loop in path[-1].inner):
        return None
    own = [loop.bundles for loop in path]
    query_blk = 0 if case == DECODE else own[2]
    kv_blk = own[-1] + sum(loop.bundles for loop in others)
    return Bundles(own[0], own[1], query_blk, kv_blk, write.bundles, tile.bundles)


def latency_seconds(
    generation: Generation,
    problem: Problem,
    case: str,
    blocks: Blocks,
    sequences: tuple[Sequence, ...],
    counted: Bundles,
    calibration: Calibration,
) -> float:
    """Modelled seconds of one call over the case's own sequences.

    A block of queries reads the KV up to its own last query, in blocks of bkv_sz of which only what is there
    is copied, and computes on bkv_csz of them at a time.
    """
    clock = generation.clock_hz / calibration.stall
    bandwidth = hardware(generation).hbm_bytes_per_second * calibration.bandwidth_fraction
    token_bytes = problem.layout.kv_bytes_per_token
    seconds = calibration.call_seconds + 3 * calibration.copy_seconds + counted.call / clock
    for q_len, kv_len in sequences:
        seconds += counted.sequence / clock
        pages = -(-kv_len // problem.page_size) - (kv_len - q_len) // problem.page_size
        seconds += pages * counted.page_write / clock
        for first in range(0, q_len, blocks.bq_sz):
            seconds += counted.query_blk / clock
            seen = kv_len if case == DECODE else min(kv_len, kv_len - q_len + first + blocks.bq_sz)
            for start in range(0, seen, blocks.bkv_sz):
                tokens = min(blocks.bkv_sz, seen - start)
                tiles = -(-tokens // blocks.bkv_csz)
                compute = (counted.kv_blk + tiles * counted.tile) / clock + calibration.kv_block_seconds
                copy = tokens * token_bytes / bandwidth
                seconds += float(period(compute, copy, calibration.copy_seconds + copy))
    return seconds
