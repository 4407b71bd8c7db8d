"""Trees of listings whose loops were counted by hand, by the addresses at which they begin and end.

The listings are libtpu 0.0.42.1's, for 4 query and 1 KV head of 128 on v6e; what a bundle does is cut out of
them. Addresses are consecutive, so a loop's bundles are differences of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.tpu.loops import Loop, parse_loops
from autotune.tpu.schedule import ListingError, ListingLost, parse_bundles, read_schedule
from tests.conftest import ROOT

LISTINGS = ROOT / "tests" / "data" / "loops"

DECODE = Loop(
    0x17 + (0x23F - 0x239),
    [
        Loop(
            (0x76 - 0x17) + (0x239 - 0x1D8),
            [
                Loop(
                    (0x111 - 0x76) + (0x139 - 0x121) + (0x1D8 - 0x1D5),
                    [Loop(0x121 - 0x111), Loop(0x1D5 - 0x139)],
                )
            ],
        )
    ],
)
MIXED = Loop(
    0x1B + (0x407 - 0x401),
    [
        Loop(
            (0x83 - 0x1B) + (0x401 - 0x3C6),
            [
                Loop(
                    (0xB2 - 0x83) + (0x3C6 - 0x37B),
                    [
                        Loop(
                            (0x156 - 0xB2) + (0x17E - 0x166) + (0x37B - 0x378),
                            [Loop(0x166 - 0x156), Loop(0x378 - 0x17E)],
                        )
                    ],
                )
            ],
        )
    ],
)
JAX = Loop(
    0x1C + (0x2B6 - 0x2AA),
    [
        Loop(
            (0xBB - 0x1C) + (0x2AA - 0x269),
            [Loop((0xCA - 0xBB) + (0x269 - 0x258), [Loop(0x258 - 0xCA)])],
        )
    ],
)


@pytest.mark.parametrize(
    ("name", "tree"), [("rpa_v3_decode_v6e", DECODE), ("rpa_v3_mixed_v6e", MIXED), ("jax_v6e", JAX)]
)
def test_loops_counted_by_hand(name: str, tree: Loop) -> None:
    assert parse_loops(LISTINGS / f"{name}.txt") == tree


def test_a_straight_tree_differs_from_the_depths_in_empty_bundles_alone() -> None:
    """By depth, empty bundles count outside of all loops; in the tree they stand where they are run."""
    path = LISTINGS / "jax_v6e.txt"
    by_depth = parse_bundles(path)
    tree, own = parse_loops(path), []
    loop = tree
    while True:
        own.append(loop.bundles)
        if not loop.inner:
            break
        (loop,) = loop.inner
    moved = [inside - outside for inside, outside in zip(own[1:], by_depth[1:], strict=True)]
    assert by_depth == (60, 209, 28, 397)
    assert moved == [15, 4, 1]
    assert own[0] == by_depth[0] - sum(moved)


def test_two_loops_of_one_depth_are_two(tmp_path: Path) -> None:
    lines = ["   0 : { x }", " 0x1 LB: > { x }", " 0x2 : {}", " 0x3 LB: > { x }", " 0x4 PF: { x }"]
    path = tmp_path / "listing.txt"
    path.write_text("\n".join(lines))
    assert parse_loops(path) == Loop(2, [Loop(2), Loop(1)])


@pytest.mark.parametrize("text", ["", "no bundle\n", f" 0x1 LB: {'>' * 40} {{ x }}\n"])
def test_what_is_no_listing_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "listing.txt"
    path.write_text(text)
    with pytest.raises(ListingError):
        parse_loops(path)


def test_a_listing_that_lost_its_end_is_refused(listings: Path, tmp_path: Path) -> None:
    from autotune.tpu.loops import read_loops

    kept = listings / "v6e"
    whole = read_loops(kept, "ragged_paged_attention_kernel")
    assert whole.total == sum(read_schedule(kept, "ragged_paged_attention_kernel").cycles)
    for path in kept.iterdir():
        text = path.read_bytes()
        cut = len(text) // 2 if path.name.endswith("-final_bundles.txt") else len(text)
        (tmp_path / path.name).write_bytes(text[:cut])
    with pytest.raises(ListingLost, match="bundles of"):
        read_loops(tmp_path, "ragged_paged_attention_kernel")
