from __future__ import annotations

import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from autotune.kernel.jax_rpa.call import scratch_bytes
from autotune.tpu import compiler
from autotune.tpu.compiler import KERNEL_NAME
from autotune.tpu.generations import GENERATIONS
from autotune.tpu.schedule import ListingError, ListingLost, parse_allocations, parse_bundles, read_schedule
from tests.conftest import program

# Depth-3 bundles of q8 kv2 page128 bfloat16 at blocks (8, 32), with libtpu 0.0.42.
DEPTH_3 = {"v4": 3154, "v5e": 1879, "v5p": 1932, "v6e": 1645, "v7x": 1621}


@pytest.mark.parametrize("name", GENERATIONS)
def test_listing_of_each_generation(listings: Path, name: str) -> None:
    folder = listings / name
    schedule = read_schedule(folder, KERNEL_NAME)
    assert len(schedule.cycles) == 4
    assert schedule.cycles[3] == pytest.approx(DEPTH_3[name], rel=0.03)
    [analysis] = folder.glob(f"*{KERNEL_NAME}*schedule-analysis_final_bundles.txt")
    counted = re.search(r"total scheduled bundles:\s+(\d+)", analysis.read_text())
    assert counted, "the compiler no longer counts its own bundles"
    assert sum(schedule.cycles) == int(counted[1])


@pytest.mark.parametrize("name", GENERATIONS)
def test_allocations_hold_at_least_the_scratch(listings: Path, name: str) -> None:
    schedule = read_schedule(listings / name, KERNEL_NAME)
    lower_bound = scratch_bytes(program(8, 32, q_heads=8, kv_heads=2, page_size=128))
    assert lower_bound <= schedule.vmem_bytes <= 2 * lower_bound
    assert 128 * 128 * 4 < schedule.smem_bytes < 80_000  # the page table's padded rows, and a little


def test_a_missing_listing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ListingLost, match="is not there"):
        read_schedule(tmp_path, KERNEL_NAME)


@pytest.mark.parametrize("lost", ["removed", "cut", "empty"])
def test_a_listing_that_is_lost_is_no_verdict(
    listings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """As by a cleaner of temporary files, or a full disk, between the compile and its reading."""
    folder = shutil.copytree(listings / "v6e", tmp_path / "dump")
    [path] = folder.glob(f"*{KERNEL_NAME}*-final_bundles.txt")
    read_schedule(folder, KERNEL_NAME)
    data = path.read_bytes()
    path.unlink()
    if lost != "removed":
        path.write_bytes(data[: len(data) // 2] if lost == "cut" else b"")
    with pytest.raises(ListingLost):
        read_schedule(folder, KERNEL_NAME)
    monkeypatch.setattr(compiler, "clear", lambda folder: None)
    monkeypatch.setattr(compiler, "prepared_device", lambda generation: None)
    monkeypatch.setattr(compiler, "lower", lambda generation, program: SimpleNamespace(compile=lambda: None))
    with pytest.raises(compiler.MachineFault, match="was it removed, or is the disk full"):
        compiler.compile_program(GENERATIONS["v6e"], program(8, 32), folder)


def test_two_listings_of_one_kernel_are_an_error(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"{number}-{KERNEL_NAME}.1-01-final_bundles.txt").write_text("0x1 : { nop }\n")
    with pytest.raises(ListingError, match="wrote 2 listings"):
        read_schedule(tmp_path, KERNEL_NAME)


@pytest.mark.parametrize("content", [b"", b"\xff\x00garbage\n" * 100, b"= control target key start\n"])
def test_text_that_is_no_listing_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(content)
    with pytest.raises(ListingError, match="no bundle"):
        parse_bundles(path)
    with pytest.raises(ListingError, match="no VMEM allocation"):
        parse_allocations(path)


def test_bundles_are_counted_by_depth(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text(
        "LH: loop header\n\n     0   :  { a }\n   0x1   :  { b\n hlo: not a bundle\n */ }\n"
        "   0x2 LB: > { c }\n   0x3   : >> { d }\n   0x4 PF: >> { e }\n"
    )
    assert parse_bundles(path) == (2, 1, 2)
