"""The timer: on profiles that hold what a test says, and on this CPU, whose profiles hold no TPU's event."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autotune.results.schema import KERNEL_EVENTS, MODULE_EVENTS, WALL_CLOCK
from autotune.timing.profile import TraceError
from autotune.timing.timer import EMPTY_PROFILES, Step, Timer, call_seconds, mark_name, profiled
from tests.timing.xspace import Event, xspace

KERNEL = "kernel"


def marks(section: int) -> Any:
    return jnp.zeros(())


def test_falls_back_to_the_wall_clock_where_profiles_stay_empty() -> None:
    x = jnp.ones((400, 400))
    small = jax.jit(lambda: x @ x)
    large = jax.jit(lambda: x @ x @ x @ x @ x @ x @ x @ x @ x)
    calls = {"small": small, "large": large}
    for call in calls.values():
        jax.block_until_ready(call())
    timer = Timer(KERNEL, marks, jax.block_until_ready)
    began: list[Step] = []
    names = ["small", "large", "large", "small", "small", "large", "small", "large", "large", "small"]
    order = [Step(0, name) for name in names]
    for number in range(EMPTY_PROFILES):
        found = timer.time(lambda step: calls[step.name](), order, began.append)
        decided = WALL_CLOCK if number == EMPTY_PROFILES - 1 else None
        assert (found.seconds, found.timer) == ({}, decided)
        assert found.note is not None and found.note.startswith("the profile holds no kernel of these")
    assert began == order * EMPTY_PROFILES
    found = timer.time(lambda step: calls[step.name](), order, began.append)
    assert found.timer == WALL_CLOCK and found.note is None
    assert {step: len(seconds) for step, seconds in found.seconds.items()} == {
        Step(0, "small"): 5,
        Step(0, "large"): 5,
    }
    seconds = found.seconds
    assert sorted(seconds[Step(0, "large")])[2] > 2 * sorted(seconds[Step(0, "small")])[2] > 0


def run(name: str, microseconds: float, at: float, kernel: bool = True) -> dict[str, list[Event]]:
    operations: list[Event] = [(f"%{KERNEL}.1 = x", at + 1, microseconds)] if kernel else []
    return {"XLA Modules": [(f"jit_{name}(1)", at, microseconds + 2)], "XLA Ops": operations}


def profile(*names: str, kernel: bool = True, lost: Collection[int] = ()) -> bytes:
    """Runs of these names, the n-th of 10 n us; `lost`: the places of those that left no event."""
    lines: dict[str, list[Event]] = {"XLA Modules": [], "XLA Ops": []}
    for place, name in enumerate(names):
        if place not in lost:
            events = run(name, 10.0 * place, 1000.0 * place, kernel and not name.startswith("autotune"))
            for line, new in events.items():
                lines[line] += new
    return xspace([("/device:TPU:3", lines)])


def timer_of(*profiles: bytes) -> Timer:
    left = iter(profiles)

    def take(run: Callable[[], None]) -> bytes:
        run()
        return next(left)

    return Timer(KERNEL, lambda section: None, lambda result: result, take)


def times(timer: Timer, *order: Step) -> tuple[dict[Step, list[float]], str | None]:
    found = timer.time(lambda step: None, order, lambda step: None)
    return {s: [round(x * 1e6, 3) for x in seconds] for s, seconds in found.seconds.items()}, found.timer


FIRST, SECOND = (mark_name(0), mark_name(0), mark_name(0)), (mark_name(1), mark_name(1), mark_name(1))
ORDER = [Step(0, "a"), Step(0, "b"), Step(1, "a"), Step(1, "b")]
WHOLE = (*FIRST, "a", "b", *SECOND, "a", "b")  # places 3, 4 and 8, 9


def test_sections_of_a_profile_are_told_apart() -> None:
    found, clock = times(timer_of(profile(*WHOLE)), *ORDER)
    assert clock == KERNEL_EVENTS
    assert found == {
        Step(0, "a"): [30],
        Step(0, "b"): [40],
        Step(1, "a"): [80],
        Step(1, "b"): [90],
    }


def test_a_section_survives_the_loss_of_marks_but_the_last() -> None:
    whole = times(timer_of(profile(*WHOLE)), *ORDER)
    assert times(timer_of(profile(*WHOLE, lost=(0, 1, 5, 7))), *ORDER) == whole


def test_runs_that_may_be_of_two_sections_are_left_out() -> None:
    """All marks of the second section are lost: its runs look like the first's, and none of both counts."""
    found, clock = times(timer_of(profile(*WHOLE, lost=(5, 6, 7))), *ORDER)
    assert found == {} and clock == KERNEL_EVENTS
    found, _ = times(timer_of(profile(*WHOLE, lost=(0, 1, 2))), *ORDER)
    assert found == {Step(1, "a"): [80], Step(1, "b"): [90]}


def test_sections_are_those_of_the_order_in_which_they_ran() -> None:
    second_first = [*ORDER[2:], *ORDER[:2]]
    names = (*SECOND, "a", "b", *FIRST, "a", "b")
    found, _ = times(timer_of(profile(*names)), *second_first)
    assert found[Step(1, "a")] == [30] and found[Step(0, "a")] == [80]
    assert times(timer_of(profile(*names, lost=(5, 6, 7))), *second_first)[0] == {}


def test_one_kernel_event_is_enough_to_choose_the_kernels_clock() -> None:
    """The first profile lost all other kernels' events."""
    modules = profile(*FIRST, "a", "a", "a", "a", "a", "a", kernel=False)
    one = profile(*FIRST, "a")
    timer = timer_of(modules, one, modules)
    assert times(timer, *[Step(0, "a")] * 6) == ({}, None)
    assert times(timer, Step(0, "a")) == ({Step(0, "a"): [30]}, KERNEL_EVENTS)
    assert times(timer, *[Step(0, "a")] * 6) == ({}, KERNEL_EVENTS)  # and it stays with it


def test_programs_without_kernels_in_two_profiles_are_timed_as_a_whole() -> None:
    modules = profile(*FIRST, "a", "a", "a", kernel=False)
    timer = timer_of(modules, modules)
    assert times(timer, *[Step(0, "a")] * 3) == ({}, None)
    assert times(timer, *[Step(0, "a")] * 3) == ({Step(0, "a"): [32, 42, 52]}, MODULE_EVENTS)


def test_a_profiler_that_does_not_start_is_no_fault_of_what_it_profiles(tmp_path: Path) -> None:
    ran = []
    with jax.profiler.trace(tmp_path), pytest.raises(TraceError, match="the profiler could not start: "):
        profiled(lambda: ran.append(1))  # there may be one profile at a time
    assert ran == []
    with pytest.raises(ZeroDivisionError):
        profiled(lambda: 1 // 0)
    assert isinstance(profiled(lambda: None), bytes)  # it was stopped


def test_what_a_profile_holds_is_told_where_the_kernel_is_not_found() -> None:
    """As for a TPU whose profiles call things otherwise than is known here."""
    lines: dict[str, list[Event]] = {"XLA Modules": [("jit_other(1)", 0, 9)], "Ops": [("fusion.1", 0, 5)] * 3}
    timer = timer_of(xspace([("/host:CPU", {}), ("/device:TPU:0", lines)]))
    found = timer.time(lambda step: None, ORDER, lambda step: None)
    assert found.note == (
        "the profile holds no kernel of these programs, but '/host:CPU', '/device:TPU:0' with "
        "'XLA Modules' (1: jit_other(1)); 'Ops' (3: fusion.1)"
    )


def test_profiles_that_cannot_be_read_are_as_empty_ones() -> None:
    timer = timer_of(b"", b"", profile(*WHOLE))
    assert times(timer, *ORDER) == ({}, None)
    found = timer.time(lambda step: None, ORDER, lambda step: None)
    assert found.timer == WALL_CLOCK and found.note is not None and "wrote no bytes" in found.note


@pytest.mark.parametrize("overhead", [0.0, 0.02])
def test_the_wall_clock_takes_the_cost_of_waiting_out(overhead: float) -> None:
    """A device that needs 4 ms a call, and a host that needs 20 ms to learn that a batch is done."""

    def wait(result: object) -> None:
        time.sleep(overhead)

    samples = sorted(call_seconds(lambda: time.sleep(0.004), wait) for _ in range(5))
    # A busy host sleeps longer than it is told to; one batch of two calls alone would say 14 ms and more. And
    # its short batch may be the one that is disturbed: then a sample is less than the call.
    assert samples[2] < 0.012
    assert samples[-1] > 0.003
