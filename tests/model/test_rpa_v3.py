from __future__ import annotations

import pytest

from autotune.kernel.problem import Problem
from autotune.kernel.rpa_v3.blocks import DECODE, MIXED, Blocks
from autotune.kernel.workload import Sequence
from autotune.model.cost import Calibration
from autotune.model.rpa_v3 import Bundles, bundles, latency_seconds
from autotune.tpu.generations import V6E
from autotune.tpu.loops import Loop

PROBLEM = Problem(
    num_q_heads=4, num_kv_heads=1, head_dim=128, page_size=16, max_num_batched_tokens=256, pages_per_seq=64
)
# Copies take no time, so that only the loops count.
CORE_ALONE = Calibration(
    call_seconds=0.0,
    copy_seconds=0.0,
    bandwidth_fraction=1e9,
    stall=1.0,
    kv_block_seconds=0.0,
    origin="test",
)


def _cycles(case: str, blocks: Blocks, counted: Bundles, *sequences: tuple[int, int]) -> float:
    batch = tuple(Sequence(*lengths) for lengths in sequences)
    return latency_seconds(V6E, PROBLEM, case, blocks, batch, counted, CORE_ALONE) * V6E.clock_hz


def test_loops_have_their_meaning() -> None:
    leaves = [Loop(16), Loop(506)]
    assert bundles(DECODE, Loop(29, [Loop(192, [Loop(182, leaves)])])) == Bundles(29, 192, 0, 182, 16, 506)
    mixed = Loop(33, [Loop(163, [Loop(122, [Loop(191, leaves)])])])
    assert bundles(MIXED, mixed) == Bundles(33, 163, 122, 191, 16, 506)
    assert bundles(MIXED, Loop(29, [Loop(178, [Loop(547, [Loop(207, [*leaves, Loop(5)])])])])) == Bundles(
        29, 178, 547, 212, 16, 506
    )


@pytest.mark.parametrize(
    "loops",
    [Loop(1), Loop(1, [Loop(1, [Loop(1)])]), Loop(1, [Loop(1, [Loop(1, [Loop(1), Loop(1, [Loop(1)])])])])],
)
def test_other_loops_are_not_modelled(loops: Loop) -> None:
    assert bundles(DECODE, loops) is None
    assert bundles(MIXED, loops) is None


@pytest.mark.parametrize(
    ("counted", "times"),
    [
        # Two decodes of 100 and 300 tokens, blocks of 128 tokens, tiles of 64, pages of 16.
        (Bundles(1, 0, 0, 0, 0, 0), 1),
        (Bundles(0, 1, 0, 0, 0, 0), 2),
        (Bundles(0, 0, 0, 1, 0, 0), 1 + 3),
        (Bundles(0, 0, 0, 0, 1, 0), 2),  # each writes its token to one page
        (Bundles(0, 0, 0, 0, 0, 1), 2 + 5),
    ],
)
def test_loops_of_decodes_are_counted(counted: Bundles, times: int) -> None:
    assert _cycles(DECODE, Blocks(1, 128, 1, 64), counted, (1, 100), (1, 300)) == pytest.approx(times)


@pytest.mark.parametrize(
    ("counted", "times"),
    [
        # 40 new tokens of 300, in blocks of 32: the first sees 292 tokens, the second all.
        (Bundles(0, 0, 1, 0, 0, 0), 2),
        (Bundles(0, 0, 0, 1, 0, 0), 3 + 3),
        (Bundles(0, 0, 0, 0, 0, 1), 5 + 5),
        (Bundles(0, 0, 0, 0, 1, 0), 3),  # tokens 260 to 299 lie in pages 16, 17 and 18
    ],
)
def test_loops_of_a_prompt_are_counted(counted: Bundles, times: int) -> None:
    assert _cycles(MIXED, Blocks(32, 128, 32, 64), counted, (40, 300)) == pytest.approx(times)


def test_a_block_waits_for_its_copy() -> None:
    slow = Calibration(
        call_seconds=0.0,
        copy_seconds=1.0,
        bandwidth_fraction=1e9,
        stall=1.0,
        kv_block_seconds=0.0,
        origin="test",
    )
    batch = (Sequence(1, 300),)
    nothing = Bundles(0, 0, 0, 0, 0, 0)
    seconds = latency_seconds(V6E, PROBLEM, DECODE, Blocks(1, 128, 1, 128), batch, nothing, slow)
    assert seconds == pytest.approx(3 + 3 * 0.5)  # nothing hides three copies; a round of two waits for one
