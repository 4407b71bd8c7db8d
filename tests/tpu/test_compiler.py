"""Verdicts of the real compiler, in the worker processes that a sweep uses."""

from __future__ import annotations

import dataclasses

import pytest

from autotune.compile.local_pool import CompilePool
from autotune.compile.pool import Task
from autotune.kernel.jax_rpa.call import compile_total_pages, scratch_bytes
from autotune.kernel.problem import LOOP_DEPTHS, Program
from autotune.tpu.compiler import Compiled, failed, judged
from autotune.tpu.generations import GENERATIONS, MIB, hardware
from autotune.tpu.schedule import Schedule
from tests.conftest import each, layout, program

SMALL = {"q_heads": 8, "kv_heads": 2, "page_size": 128}
TASKS = {
    "v6e": Task("v6e", program(8, 32, **SMALL)),
    "again": Task("v6e", program(8, 32, vmem_limit_bytes=64 * MIB, **SMALL)),
    "no room": Task("v6e", program(8, 32, vmem_limit_bytes=MIB, **SMALL)),
    "v4 no room": Task("v4", program(16, 256, q_heads=8, kv_heads=1, page_size=256)),
    "v4 fp8": Task("v4", program(8, 32, kv_dtype="float8_e5m2", **SMALL)),
    "v5e fp8": Task("v5e", program(8, 32, kv_dtype="float8_e5m2", **SMALL)),
    "v5e e4m3": Task("v5e", program(8, 32, kv_dtype="float8_e4m3fn", **SMALL)),
    "v5e f32": Task("v5e", program(8, 32, kv_dtype="float32", q_dtype="float32", **SMALL)),
    "v5e bf16": Task("v5e", program(8, 32, **SMALL)),
    "v7x small pool": Task("v7x", program(4, 32, q_heads=8, kv_heads=1, page_size=32)),
    "untileable": Task("v6e", program(8, 32, q_heads=12, kv_heads=6)),
}


@pytest.fixture(scope="module")
def verdicts() -> dict[str, Compiled]:
    with CompilePool(2, 300.0) as pool:
        found = dict(pool.run(each(TASKS.values())))
    return {name: found[task] for name, task in TASKS.items()}


def test_a_program_that_fits(verdicts: dict[str, Compiled]) -> None:
    verdict = verdicts["v6e"]
    assert verdict.status == "ok"
    assert verdict.schedule
    assert verdict.schedule.cycles[3] == pytest.approx(1645, rel=0.03)
    assert verdict.seconds
    assert verdict.error is None


def test_a_small_pool_on_v7x_has_the_schedule_that_the_model_knows(verdicts: dict[str, Compiled]) -> None:
    verdict = verdicts["v7x small pool"]
    assert verdict.status == "ok" and verdict.schedule and len(verdict.schedule.cycles) == LOOP_DEPTHS


def test_the_limit_does_not_change_a_schedule_that_fits(verdicts: dict[str, Compiled]) -> None:
    assert verdicts["again"].schedule == verdicts["v6e"].schedule


def test_an_overflow_says_what_is_needed_and_what_there_is(verdicts: dict[str, Compiled]) -> None:
    verdict = verdicts["no room"]
    assert verdict.status == "vmem_oom"
    assert verdict.limit_bytes == MIB
    assert verdict.needed_bytes
    needed = scratch_bytes(TASKS["no room"].program)
    assert needed * 0.9 < verdict.needed_bytes < needed * 2
    assert verdict.schedule is None


def test_v4_says_it_in_other_words(verdicts: dict[str, Compiled]) -> None:
    verdict = verdicts["v4 no room"]
    assert (verdict.status, verdict.limit_bytes) == ("vmem_oom", 16 * MIB)
    assert verdict.needed_bytes
    assert verdict.needed_bytes > 16 * MIB


def test_what_the_compiler_cannot_do_is_told_in_its_own_words(verdicts: dict[str, Compiled]) -> None:
    verdict = verdicts["v4 fp8"]
    assert verdict.status == "compile_error"
    assert verdict.error
    assert "Unsupported matmul RHS type" in verdict.error
    assert "\n" not in verdict.error


def test_8_bit_kv_costs_cycles(verdicts: dict[str, Compiled]) -> None:
    cycles = {}
    for name in ("v5e bf16", "v5e f32", "v5e fp8", "v5e e4m3"):
        schedule = verdicts[name].schedule
        assert schedule, verdicts[name]
        cycles[name] = schedule.cycles[3]
    native = max(cycles["v5e bf16"], cycles["v5e f32"])
    assert native < cycles["v5e fp8"] < cycles["v5e e4m3"]


def test_a_shape_that_the_kernel_refuses(verdicts: dict[str, Compiled]) -> None:
    verdict = verdicts["untileable"]
    assert verdict.status == "invalid"
    assert "can not be XLA fully tiled" in (verdict.error or "")


@pytest.mark.slow
def test_the_default_limit_refuses_what_100_mib_takes() -> None:
    big: Program = program(128, 128, q_heads=32, kv_heads=8, page_size=16)
    roomy = dataclasses.replace(big, settings=dataclasses.replace(big.settings, vmem_limit_bytes=100 * MIB))
    tasks = [Task("v5e", big), Task("v5e", roomy)]
    with CompilePool(2, 900.0) as pool:
        found = {task.program: verdict for task, verdict in pool.run(each(tasks))}
    assert found[big].status == "vmem_oom"
    assert found[big].needed_bytes == pytest.approx(22.04 * MIB, rel=0.001)
    assert found[big].limit_bytes == 16 * MIB
    assert found[roomy].status == "ok"


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("std::bad_alloc")])
def test_a_machine_without_memory_is_no_verdict_on_a_program(error: Exception) -> None:
    verdict = failed(error, 1.0)
    assert verdict.status == "crashed" and "out of memory" in (verdict.error or "")


def test_a_schedule_of_another_depth_is_a_failure_that_says_so() -> None:
    """As of v7x where the pool lay in VMEM: a loop more, and the cost model has no term for it."""
    known = Schedule((50, 100, 20, 900), vmem_bytes=1, smem_bytes=1)
    assert judged(known, 1.5) == Compiled(status="ok", schedule=known, seconds=1.5)
    verdict = judged(Schedule((50, 100, 20, 900, 8), vmem_bytes=1, smem_bytes=1), 1.5)
    assert (verdict.status, verdict.schedule, verdict.seconds) == ("compile_error", None, 1.5)
    assert verdict.error == "the schedule has 5 loop depths, not 4: the cost model does not know it"


def test_the_pool_of_the_compile_shape_fits_no_vmem() -> None:
    for page_size in (1, 8, 16, 32, 64, 128, 256):
        for kv_heads, kv_dtype in ((1, "bfloat16"), (2, "float8_e5m2"), (1, "int4"), (16, "float32")):
            small = layout(q_heads=kv_heads, kv_heads=kv_heads, page_size=page_size, kv_dtype=kv_dtype)
            pool = compile_total_pages(small) * page_size * small.kv_bytes_per_token
            assert all(pool >= 2 * hardware(generation).vmem_bytes for generation in GENERATIONS.values())


# Small pages and few heads: where a pool once fitted the VMEM.
CORNERS = [
    Task(generation, program(pages, 32, q_heads=q_heads, kv_heads=kv_heads, page_size=page_size))
    for generation in GENERATIONS
    for page_size in (16, 32, 64, 128, 256)
    for q_heads, kv_heads, pages in ((8, 1, 4), (4, 2, 1))
]


@pytest.mark.slow
def test_every_corner_of_small_pools_has_the_schedule_that_the_model_knows() -> None:
    with CompilePool(2, 300.0) as pool:
        verdicts = dict(pool.run(each(CORNERS)))
    assert {task: verdict.error for task, verdict in verdicts.items() if verdict.status != "ok"} == {}
