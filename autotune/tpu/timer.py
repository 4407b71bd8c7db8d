"""Times programs on the device of this process: from a profile of the device, or by the wall clock.

One timer lives as long as the process that owns the device, and keeps to one way of timing: the first
profiles decide whether this device leaves events in them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from autotune.files import scratch
from autotune.tpu.trace import (
    KERNEL_EVENTS,
    MODULE_EVENTS,
    WALL_CLOCK,
    ModuleTimes,
    TraceError,
    module_times,
)

# A device whose first profiles hold no event of it (a CPU, or a profiler that does not work) is timed by the
# wall clock from then on.
EMPTY_PROFILES = 2
MAX_PROFILE_BYTES = 1 << 28
# A batch of calls between two readings of the wall clock lasts about this long: readings cost microseconds.
BATCH_SECONDS = 0.005
MAX_BATCH = 32

Name = TypeVar("Name")
Call = Callable[[], Any]


class Timings(NamedTuple):
    """Seconds of each call by the program's name, which may be none; how they were taken; what went wrong."""

    seconds: dict[str, list[float]]
    timer: str
    note: str | None = None


class Timer:
    """Times calls on one device.

    kernel_name: the operation whose events count. device: its number in a profile. wait: blocks until a
    call's result is there, as jax.block_until_ready does.
    """

    def __init__(self, kernel_name: str, device: int, wait: Callable[[Any], Any]) -> None:
        self._kernel_name = kernel_name
        self._device = device
        self._wait = wait
        self._empty = 0
        self._timer: str | None = None

    def time(self, calls: Mapping[str, Call], order: Sequence[str], began: Callable[[str], None]) -> Timings:
        """One timing for each name in `order`, in that order.

        calls: by the name of the jitted function, all of them run at least once before. began: told of each
        name before its call is made, so that whoever watches knows which one did it.
        """
        if self._timer is None and self._empty >= EMPTY_PROFILES:
            self._timer = WALL_CLOCK
        if self._timer == WALL_CLOCK:
            return self._by_clock(calls, order, began)
        note = "the profile holds no event of these programs"
        try:
            times = self._profiled(calls, order, began)
        except TraceError as error:
            times, note = {}, str(error)
        if self._timer is None and times:
            has_kernel = all(all(found.kernel) for found in times.values())
            self._timer = KERNEL_EVENTS if has_kernel else MODULE_EVENTS
        if self._timer == KERNEL_EVENTS:
            seconds = {name: list(found.kernel) for name, found in times.items() if all(found.kernel)}
        else:
            seconds = {name: list(found.whole) for name, found in times.items()}
        if not seconds:
            # Once there were events, an empty profile is an accident (jax issue 23446): that round is lost,
            # rather than timed in another way than the rounds before.
            self._empty += 1
        return Timings(seconds, self._timer or KERNEL_EVENTS, None if seconds else note)

    def _profiled(
        self, calls: Mapping[str, Call], order: Sequence[str], began: Callable[[str], None]
    ) -> dict[str, ModuleTimes]:
        import jax

        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # only the device's events are looked at, and host events slow it
        options.host_tracer_level = 0
        with scratch("autotune-profile-") as folder:
            with jax.profiler.trace(folder, profiler_options=options):
                for name in order:
                    began(name)
                    self._wait(calls[name]())
            times = module_times(_profile_bytes(folder), self._kernel_name)
        # One visible chip may keep its number of the host: a profile of one device is of ours.
        mine = times.get(self._device) or (next(iter(times.values())) if len(times) == 1 else {})
        return {name: mine[name] for name in calls if name in mine}

    def _by_clock(
        self, calls: Mapping[str, Call], order: Sequence[str], began: Callable[[str], None]
    ) -> Timings:
        seconds: dict[str, list[float]] = {}
        for name in order:
            began(name)
            seconds.setdefault(name, []).append(call_seconds(calls[name], self._wait))
        return Timings(seconds, WALL_CLOCK)


def call_seconds(call: Call, wait: Callable[[Any], Any]) -> float:
    """Wall-clock seconds of one call, the cost of starting and of waiting for a batch taken out.

    A batch of n calls takes a + n * b, with a the same for every n: two batches, of n and of 2 n calls, give
    b as their difference over n. For calls much shorter than `a` it is noisy, and may even be negative.
    """
    start = time.perf_counter()
    wait(call())
    single = time.perf_counter() - start
    size = max(1, min(MAX_BATCH, math.ceil(BATCH_SECONDS / max(single, 1e-9))))
    return (_batch_seconds(call, wait, 2 * size) - _batch_seconds(call, wait, size)) / size


def _batch_seconds(call: Call, wait: Callable[[Any], Any], count: int) -> float:
    start = time.perf_counter()
    result = None
    for _ in range(count):
        result = call()
    wait(result)
    return time.perf_counter() - start


def _profile_bytes(folder: Path) -> bytes:
    """The one profile below a folder that jax.profiler wrote to.

    Raises:
      TraceError: there is none, or it is larger than 256 MiB.
    """
    paths = list(folder.rglob("*.xplane.pb"))
    if len(paths) != 1:
        raise TraceError(f"the profiler wrote {len(paths)} profiles, not one")
    if paths[0].stat().st_size > MAX_PROFILE_BYTES:
        raise TraceError(f"the profile is larger than {MAX_PROFILE_BYTES} bytes")
    return paths[0].read_bytes()
