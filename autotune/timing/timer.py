"""Times programs on the device of this process: from a profile of the device, or by the wall clock.

One timer lives as long as the process that owns the device, and keeps to one clock: the first profiles decide
which, as soon as they say enough.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from autotune.errors import first_line
from autotune.io.files import FULL, scratch
from autotune.results.schema import KERNEL_EVENTS, MODULE_EVENTS, WALL_CLOCK
from autotune.timing.profile import Run, TraceError, contents, runs

# A device whose first profiles hold no event of it (a CPU, or a profiler that does not work) is timed by the
# wall clock from then on. One whose profiles have programs but never a kernel is timed by whole programs.
# Profiles lose events, so one of them decides neither.
EMPTY_PROFILES = 2
KERNELLESS_PROFILES = 2
KERNELLESS_RUNS = 6  # in these profiles together, at least
MAX_PROFILE_BYTES = 1 << 28
# A batch of calls between two readings of the wall clock lasts about this long: readings cost microseconds.
BATCH_SECONDS = 0.005
MAX_BATCH = 32
# How often a section's mark runs. All of them must be lost from a profile to lose the section.
MARKS = 3

# Only the TensorCores' programs and operations: SparseCores would fill the profile, and events be dropped
# (tpu-inference pull requests 2538 and 2698). Names and values as in JAX's page on profiling.
PROFILER_OPTIONS = {
    "tpu_trace_mode": "TRACE_ONLY_XLA",
    "tpu_num_sparse_cores_to_trace": 0,
    "tpu_num_sparse_core_tiles_to_trace": 0,
}

Call = Callable[[], Any]


class NoRoom(Exception):
    """There is no room for a profile; the message says which."""


class Step(NamedTuple):
    """One call to time: of which section (calls of one section have the same arguments), and the program."""

    section: int
    name: str


class Timings(NamedTuple):
    """Seconds of each call, by step; how they were taken; what went wrong.

    seconds: may lack a step, or some of its calls: those whose events were lost. timer: None while no clock
    is decided on; there are no seconds then.
    """

    seconds: dict[Step, list[float]]
    timer: str | None
    note: str | None = None


class Timer:
    """Times calls on one device.

    kernel_name: the operation whose events count. mark: runs a program called `mark_name(section)`, which
    tells sections of a profile apart. wait: blocks until a call's result is there, as jax.block_until_ready.
    profile: the bytes of a profile of what it calls. clock: seconds, as time.perf_counter.
    """

    def __init__(
        self,
        kernel_name: str,
        mark: Callable[[int], Any],
        wait: Callable[[Any], Any],
        profile: Callable[[Callable[[], None]], bytes] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._kernel_name = kernel_name
        self._mark = mark
        self._wait = wait
        self._profile = profile or profiled
        self._clock = clock
        self._empty = 0
        self._kernelless = 0
        self._kernelless_runs = 0
        self._timer: str | None = None

    def time(
        self,
        call: Callable[[Step], Any],
        order: Sequence[Step],
        began: Callable[[Step], None],
        ended: Callable[[], None] = lambda: None,
    ) -> Timings:
        """One timing for each step in `order`, in that order; steps of one section follow one another.

        call: runs a step, whose program has run at least once before. began: told of each step before its
        call is made, so that whoever watches knows which one did it. ended: told when all calls are done.

        Raises:
          NoRoom: there is no room for a profile.
        """
        if self._timer == WALL_CLOCK:
            seconds: dict[Step, list[float]] = {}
            for step in order:
                began(step)
                sample = call_seconds(functools.partial(call, step), self._wait, self._clock)
                seconds.setdefault(step, []).append(sample)
            return Timings(seconds, WALL_CLOCK)
        note = "the profile holds no event of these programs"
        sections = list(dict.fromkeys(step.section for step in order))
        marks = set(map(mark_name, sections))
        found: list[Run] = []
        try:
            profile = self._profile(lambda: self._run(call, order, began, ended))
            found = runs(profile, self._kernel_name, marks | {step.name for step in order})
            if not self._timer and not any(run.kernel_seconds for run in found):
                note = f"the profile holds no kernel of these programs, but {contents(profile)}"
        except TraceError as error:
            note = str(error)
        self._decide([run for run in found if run.name not in marks])
        seconds = {}
        for section, run in by_section(found, sections):
            value = run.kernel_seconds if self._timer == KERNEL_EVENTS else run.seconds
            if self._timer and value is not None:
                seconds.setdefault(Step(section, run.name), []).append(value)
        return Timings(seconds, self._timer, None if seconds else note)

    def _decide(self, found: Sequence[Run]) -> None:
        """Settle on a clock, once the profiles so far say enough."""
        if self._timer:
            return
        if any(run.kernel_seconds is not None for run in found):
            self._timer = KERNEL_EVENTS
            return
        self._empty += not found
        self._kernelless += bool(found)
        self._kernelless_runs += len(found)
        if self._kernelless >= KERNELLESS_PROFILES and self._kernelless_runs >= KERNELLESS_RUNS:
            self._timer = MODULE_EVENTS
        elif self._empty >= EMPTY_PROFILES:
            self._timer = WALL_CLOCK

    def _run(
        self,
        call: Callable[[Step], Any],
        order: Sequence[Step],
        began: Callable[[Step], None],
        ended: Callable[[], None],
    ) -> None:
        for section, steps in itertools.groupby(order, key=lambda step: step.section):
            for _ in range(MARKS):
                self._wait(self._mark(section))
            for step in steps:
                began(step)
                self._wait(call(step))
        ended()


def mark_name(section: int) -> str:
    """What the jitted function is called that marks the start of a section."""
    return f"autotune_section_{section}"


def by_section(found: Iterable[Run], sections: Sequence[int]) -> list[tuple[int, Run]]:
    """The runs, each with the section that it is of.

    found: runs of programs and of marks, in the order in which they ran. sections: in the order in which they
    were run. Where all marks of a section were lost, the runs before it cannot be told from its own: these
    are left out.
    """
    at = {mark_name(section): place for place, section in enumerate(sections)}
    pieces: dict[int, list[Run]] = {}
    place = -1
    for run in found:
        if run.name in at:
            place = at[run.name]
            pieces.setdefault(place, [])
        elif place >= 0:
            pieces[place].append(run)
    sure = [p for p in pieces if p + 1 in pieces or p + 1 == len(sections)]
    return [(sections[p], run) for p in sure for run in pieces[p]]


def call_seconds(
    call: Call, wait: Callable[[Any], Any], clock: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds of one call by the host's clock, the cost of starting and of waiting for a batch taken out.

    A batch of n calls takes a + n * b, with a the same for every n: two batches, of n and of 2 n calls, give
    b as their difference over n. For calls much shorter than `a` it is noisy, and may even be negative.
    """

    def batch(count: int) -> float:
        start = clock()
        result = None
        for _ in range(count):
            result = call()
        wait(result)
        return clock() - start

    size = max(1, min(MAX_BATCH, math.ceil(BATCH_SECONDS / max(batch(1), 1e-9))))
    return (batch(2 * size) - batch(size)) / size


@contextlib.contextmanager
def _profiler_errors(what: str) -> Iterator[None]:
    """The profiler's own failures, which say nothing of what it profiles."""
    try:
        yield
    except Exception as error:
        if any(os.strerror(code) in str(error) for code in FULL):
            raise NoRoom(first_line(error)) from None
        raise TraceError(f"the profiler could not {what}: {first_line(error)}") from None


def profiled(run: Callable[[], None]) -> bytes:
    """A profile, as jax.profiler takes it, of the device's events while `run` runs.

    Raises:
      TraceError: the profiler failed, wrote none, or one that is larger than 256 MiB.
      NoRoom: there is no room for its files.
    """
    import jax

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # only the device's events are looked at, and host events slow it
    options.host_tracer_level = 0
    options.advanced_configuration = PROFILER_OPTIONS
    with scratch("autotune-profile-") as folder:
        with _profiler_errors("start"):
            jax.profiler.start_trace(folder, profiler_options=options)
        try:
            run()
        except BaseException:
            with contextlib.suppress(Exception):
                jax.profiler.stop_trace()
            raise
        with _profiler_errors("write its profile"):
            jax.profiler.stop_trace()
        paths = list(folder.rglob("*.xplane.pb"))
        if len(paths) != 1:
            raise TraceError(f"the profiler wrote {len(paths)} profiles, not one")
        if paths[0].stat().st_size > MAX_PROFILE_BYTES:
            raise TraceError(f"the profile is larger than {MAX_PROFILE_BYTES} bytes")
        return paths[0].read_bytes()
