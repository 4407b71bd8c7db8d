"""Profiles built to the documented proto, read through the installed JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.profiler import ProfileData

from autotune.tpu.trace import ModuleTimes, TraceError, module_times
from tests.tpu.xspace import xspace

KERNEL = "ragged_paged_attention_kernel"
# As XLA names the operation in a program that it compiled for v6e.
OPERATION = f"%{KERNEL}.1 = bf16[1024,8,128]{{2,1,0:T(8,128)(2,1)}} custom-call(%a, %b)"
COPY = "%copy.1 = s32[128]{0:T(128)} copy(%c)"

TWO_CANDIDATES = {
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


def microseconds(times: tuple[float, ...]) -> list[float]:
    return [round(seconds * 1e6, 3) for seconds in times]


def test_candidates_are_told_apart_by_their_programs_names() -> None:
    times = module_times(xspace([("/device:TPU:0", TWO_CANDIDATES)]), KERNEL)
    assert list(times) == [0]
    assert {name: microseconds(found.kernel) for name, found in times[0].items()} == {
        "rpa_p4_q32": [90, 100],
        "rpa_p8_q32": [50, 60],
    }
    assert microseconds(times[0]["rpa_p4_q32"].whole) == [100, 110]


def test_a_second_chip_is_kept_apart() -> None:
    second = {"XLA Modules": [("jit_rpa_p4_q32(17)", 0, 900)], "XLA Ops": [(OPERATION, 10, 800)]}
    times = module_times(xspace([("/device:TPU:0", TWO_CANDIDATES), ("/device:TPU:3", second)]), KERNEL)
    assert microseconds(times[3]["rpa_p4_q32"].kernel) == [800]
    assert microseconds(times[0]["rpa_p4_q32"].kernel) == [90, 100]


def test_host_planes_and_planes_of_parts_of_a_chip_are_ignored() -> None:
    others = [
        "/host:CPU",
        "/host:metadata",
        "/device:GPU:0",
        "/device:TPU:0 SparseCore 1",
        "/device:TPU_SYSTEM:0",
    ]
    assert module_times(xspace([(name, TWO_CANDIDATES) for name in others]), KERNEL) == {}


def test_a_profile_with_no_event_of_a_device() -> None:
    assert module_times(xspace([("/host:CPU", {})]), KERNEL) == {}
    assert module_times(xspace([("/device:TPU:0", {})]), KERNEL) == {0: {}}


def test_a_run_without_the_kernels_event_is_seen() -> None:
    lines = {"XLA Modules": TWO_CANDIDATES["XLA Modules"], "XLA Ops": TWO_CANDIDATES["XLA Ops"][:3]}
    times = module_times(xspace([("/device:TPU:0", lines)]), KERNEL)[0]
    assert microseconds(times["rpa_p4_q32"].kernel) == [90, 0]
    no_ops = module_times(
        xspace([("/device:TPU:0", {"XLA Modules": TWO_CANDIDATES["XLA Modules"]})]), KERNEL
    )[0]
    assert no_ops["rpa_p8_q32"] == ModuleTimes(tuple(pytest.approx(s) for s in (60e-6, 70e-6)), (0.0, 0.0))


@pytest.mark.parametrize(
    ("operation", "counts"),
    [(KERNEL, True), (f"{KERNEL}.12", True), (f"%{KERNEL}_v2.1 = x", False), (f"%my_{KERNEL}.1", False)],
)
def test_which_operation_is_the_kernel(operation: str, counts: bool) -> None:
    lines = {"XLA Modules": [("jit_f(1)", 0, 10)], "XLA Ops": [(operation, 1, 8)]}
    times = module_times(xspace([("/device:TPU:0", lines)]), KERNEL)[0]["f"]
    assert microseconds(times.kernel) == [8 if counts else 0]


def test_order_of_events_in_the_bytes_does_not_matter() -> None:
    backwards = {name: events[::-1] for name, events in TWO_CANDIDATES.items()}
    straight = module_times(xspace([("/device:TPU:0", TWO_CANDIDATES)]), KERNEL)
    assert module_times(xspace([("/device:TPU:0", backwards)]), KERNEL) == straight


def test_bytes_that_were_cut_short() -> None:
    whole = xspace([("/device:TPU:0", TWO_CANDIDATES)])
    for size in (1, len(whole) // 2, len(whole) - 1):
        with pytest.raises(TraceError, match=f"of {size} bytes cannot be read.*cut short"):
            module_times(whole[:size], KERNEL)
    with pytest.raises(TraceError, match="no XSpace"):
        module_times(b"PK\x03\x04 not a profile", KERNEL)
    with pytest.raises(TraceError, match="is empty"):
        module_times(b"", KERNEL)


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
    assert module_times(path.read_bytes(), KERNEL) == {}
