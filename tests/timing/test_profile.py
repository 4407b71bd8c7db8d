"""Profiles built to the documented proto, read through the installed JAX."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.profiler import ProfileData

from autotune.timing.profile import TraceError, runs
from tests.timing.xspace import Event, xspace

KERNEL = "ragged_paged_attention_kernel"
# As XLA names the operation in a program that it compiled for v6e.
OPERATION = f"%{KERNEL}.1 = bf16[1024,8,128]{{2,1,0:T(8,128)(2,1)}} custom-call(%a, %b)"
COPY = "%copy.1 = s32[128]{0:T(128)} copy(%c)"

TWO_CANDIDATES: dict[str, list[Event]] = {
    "XLA Modules": [
        ("jit_rpa_p4_q32(17)", 0, 100),
        ("jit_rpa_p8_q32(18)", 200, 60),
        ("jit_rpa_p4_q32(17)", 300, 110),
        ("jit_rpa_p8_q32(18)", 500, 70),
    ],
    "XLA Ops": [
        (COPY, 0, 5),
        (OPERATION, 5, 90),
        (OPERATION, 205, 50),
        (OPERATION, 305, 100),
        (COPY, 405, 5),
        (OPERATION, 505, 60),
    ],
    "Steps": [("jit_rpa_p4_q32(17)", 0, 5000)],
    "Async XLA Ops": [(OPERATION, 0, 7000)],
}


NAMES = ("rpa_p4_q32", "rpa_p8_q32")


def read(*planes: tuple[str, Any], names: Collection[str] = NAMES) -> list[tuple[str, float, float | None]]:
    """Name, microseconds of the whole run, and of its kernel, of each run."""
    return [
        (run.name, round(run.seconds * 1e6, 3), run.kernel_seconds and round(run.kernel_seconds * 1e6, 3))
        for run in runs(xspace(planes), KERNEL, names)
    ]


def without(line: str, *places: int) -> dict[str, list[Event]]:
    """TWO_CANDIDATES, some events of a line lost."""
    kept = [event for place, event in enumerate(TWO_CANDIDATES[line]) if place not in places]
    return {**TWO_CANDIDATES, line: kept}


WHOLE = [
    ("rpa_p4_q32", 100, 90),
    ("rpa_p8_q32", 60, 50),
    ("rpa_p4_q32", 110, 100),
    ("rpa_p8_q32", 70, 60),
]


def test_candidates_are_told_apart_by_their_programs_names() -> None:
    assert read(("/device:TPU:0", TWO_CANDIDATES)) == WHOLE


def test_the_plane_with_our_programs_is_read_whatever_its_number() -> None:
    other = {"XLA Modules": [("jit_step(17)", 0, 900)] * 9, "XLA Ops": [(OPERATION, 10, 800)]}
    for number in (0, 2, 7):
        planes = [("/device:TPU:1", other), (f"/device:TPU:{number}", TWO_CANDIDATES)]
        assert read(*planes) == read(*planes[::-1]) == WHOLE


def test_other_programs_on_our_plane_are_left_out() -> None:
    assert read(("/device:TPU:0", TWO_CANDIDATES), names=("rpa_p8_q32",)) == WHOLE[1::2]


def test_host_planes_and_planes_of_parts_of_a_chip_are_ignored() -> None:
    others = [
        "/host:CPU",
        "/host:metadata",
        "/device:GPU:0",
        "/device:TPU:0 SparseCore 1",
        "/device:TPU_SYSTEM:0",
    ]
    assert read(*((name, TWO_CANDIDATES) for name in others)) == []


def test_a_profile_with_no_event_of_a_device() -> None:
    assert read(("/host:CPU", {})) == read(("/device:TPU:0", {})) == []


def test_a_run_whose_kernels_event_was_lost_has_no_kernel_time() -> None:
    lost = [
        (name, whole, None if place == 2 else kernel) for place, (name, whole, kernel) in enumerate(WHOLE)
    ]
    assert read(("/device:TPU:0", without("XLA Ops", 3))) == lost
    no_operations = {"XLA Modules": TWO_CANDIDATES["XLA Modules"]}
    assert read(("/device:TPU:0", no_operations)) == [(name, whole, None) for name, whole, _ in WHOLE]


@pytest.mark.parametrize("lost", range(4))
def test_a_kernel_whose_programs_event_was_lost_is_no_other_programs(lost: int) -> None:
    found = read(("/device:TPU:0", without("XLA Modules", lost)))
    assert found == [run for place, run in enumerate(WHOLE) if place != lost]


def test_a_run_with_two_kernel_events_has_no_kernel_time() -> None:
    twice = {**TWO_CANDIDATES, "XLA Ops": [*TWO_CANDIDATES["XLA Ops"], (OPERATION, 210, 20)]}
    assert read(("/device:TPU:0", twice))[1] == ("rpa_p8_q32", 60, None)


def test_events_count_to_the_rounding_of_their_starts() -> None:
    """ProfileData gives starts to 256 ns: an operation may seem to begin before its program."""
    lines = {"XLA Modules": [("jit_f(1)", 0.3, 8)], "XLA Ops": [(KERNEL, 0.1, 8.4)]}
    assert read(("/device:TPU:0", lines), names=("f",)) == [("f", 8, 8.4)]


@pytest.mark.parametrize(
    ("operation", "counts"),
    [(KERNEL, True), (f"{KERNEL}.12", True), (f"%{KERNEL}_v2.1 = x", False), (f"%my_{KERNEL}.1", False)],
)
def test_which_operation_is_the_kernel(operation: str, counts: bool) -> None:
    lines = {"XLA Modules": [("jit_f(1)", 0, 10)], "XLA Ops": [(operation, 1, 8)]}
    assert read(("/device:TPU:0", lines), names=("f",)) == [("f", 10, 8 if counts else None)]


def test_order_of_events_in_the_bytes_does_not_matter() -> None:
    backwards = {name: events[::-1] for name, events in TWO_CANDIDATES.items()}
    assert read(("/device:TPU:0", backwards)) == WHOLE


def test_bytes_that_were_cut_short() -> None:
    whole = xspace([("/device:TPU:0", TWO_CANDIDATES)])
    for size in (1, len(whole) // 2, len(whole) - 1):
        with pytest.raises(TraceError, match=f"of {size} bytes cannot be read.*cut short"):
            runs(whole[:size], KERNEL, NAMES)
    with pytest.raises(TraceError, match="no XSpace"):
        runs(b"PK\x03\x04 not a profile", KERNEL, NAMES)
    with pytest.raises(TraceError, match="is empty"):
        runs(b"", KERNEL, NAMES)


def test_the_encoder_writes_what_jax_reads(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """Against JAX's own encoder, from the text form of the proto."""
    text = """planes { name: "/device:TPU:1" lines { name: "XLA Modules" timestamp_ns: 1700000000000000000
        events { metadata_id: 1 offset_ps: 2000000 duration_ps: 3000000 } }
        event_metadata { key: 1 value { id: 1 name: "jit_f(1)" } } }"""
    mine = xspace([("/device:TPU:1", {"XLA Modules": [("jit_f(1)", 2, 3)]})])
    assert mine == ProfileData.text_proto_to_serialized_xspace(text)


def test_a_profile_of_this_host_has_no_device(tmp_path) -> None:  # type: ignore[no-untyped-def]
    with jax.profiler.trace(tmp_path):
        jax.block_until_ready(jax.jit(lambda x: x + 1)(jnp.ones(8)))
    (path,) = tmp_path.rglob("*.xplane.pb")
    assert runs(path.read_bytes(), KERNEL, ("<lambda>",)) == []
