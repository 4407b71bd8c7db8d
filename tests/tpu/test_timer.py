"""The timer on this machine's CPU, whose profiles hold no event of a TPU."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import pytest

from autotune.tpu.timer import EMPTY_PROFILES, Timer, call_seconds
from autotune.tpu.trace import KERNEL_EVENTS, WALL_CLOCK


def test_falls_back_to_the_wall_clock_where_profiles_stay_empty() -> None:
    x = jnp.ones((400, 400))
    small = jax.jit(lambda: x @ x)
    large = jax.jit(lambda: x @ x @ x @ x @ x @ x @ x @ x @ x)
    calls = {"small": small, "large": large}
    for call in calls.values():
        jax.block_until_ready(call())
    timer = Timer("kernel", 0, jax.block_until_ready)
    began: list[str] = []
    order = ["small", "large", "large", "small", "small", "large", "small", "large", "large", "small"]
    for _ in range(EMPTY_PROFILES):
        found = timer.time(calls, order, began.append)
        assert found == ({}, KERNEL_EVENTS, "the profile holds no event of these programs")
    assert began == order * EMPTY_PROFILES
    found = timer.time(calls, order, began.append)
    assert found.timer == WALL_CLOCK and found.note is None
    assert {name: len(seconds) for name, seconds in found.seconds.items()} == {"small": 5, "large": 5}
    assert sorted(found.seconds["large"])[2] > 2 * sorted(found.seconds["small"])[2] > 0


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
