"""Device times from a profile: the XSpace that jax.profiler writes, read through jax.profiler.ProfileData.

A TPU's plane is called '/device:TPU:n'. Its line 'XLA Modules' has an event for each run of a program, named
after the jitted function, 'jit_rpa_p8_q32(fingerprint)'; its line 'XLA Ops' has the operations inside, a
Pallas kernel under the name it was given. Host planes, and lines of other names, are passed over.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

MODULES_LINE = "XLA Modules"
OPS_LINE = "XLA Ops"

# What a row's column `timer` says.
KERNEL_EVENTS = "device trace"
MODULE_EVENTS = "device trace of the whole program"  # the trace has no event of the kernel itself
WALL_CLOCK = "wall clock"

_PLANE = re.compile(r"/device:TPU:([0-9]{1,9})")
# An operation is called by its HLO text, '%kernel.1 = bf16[...] custom-call(...)', or by its name alone.
_OPERATION = re.compile(r"%?([^\s=(]+)")


class TraceError(Exception):
    """The bytes are not a profile that can be read."""


class ModuleTimes(NamedTuple):
    """Seconds of each run of one program, in the order in which they ran.

    whole: of all of it. kernel: of the kernel's own events inside; 0.0 for a run that has none.
    """

    whole: tuple[float, ...]
    kernel: tuple[float, ...]


class _Event(NamedTuple):
    """start: nanoseconds since 1970 as a float, and so only to 256 ns; seconds: its duration, exactly."""

    name: str
    start: float
    seconds: float


def module_times(xspace: bytes, kernel_name: str) -> dict[int, dict[str, ModuleTimes]]:
    """By the number of the device, and by the jitted function's name, how long its runs took.

    kernel_name: the operation whose events are the kernel's. A profile without a TPU's plane gives {}.

    Raises:
      TraceError: the bytes are empty, cut short, or no XSpace.
    """
    from jax.profiler import ProfileData

    if not xspace:
        raise TraceError("the profile is empty: the profiler wrote no bytes")
    try:
        planes = list(ProfileData.from_serialized_xspace(xspace).planes)
    except Exception as error:  # RuntimeError in jax 0.10 and 0.12
        raise TraceError(
            f"the profile of {len(xspace)} bytes cannot be read ({error}): it was cut short, or is no XSpace"
        ) from None
    found = {}
    for plane in planes:
        if match := _PLANE.fullmatch(plane.name):
            found[int(match[1])] = _plane_times(plane, kernel_name)
    return found


def _plane_times(plane: Any, kernel_name: str) -> dict[str, ModuleTimes]:
    lines = {line.name: line for line in plane.lines if line.name in (MODULES_LINE, OPS_LINE)}
    modules = sorted(_events(lines.get(MODULES_LINE)), key=lambda event: event.start)
    starts = [module.start for module in modules]
    kernel = [0.0] * len(modules)
    for event in _events(lines.get(OPS_LINE)):
        # One program runs at a time: an operation is of the last one that had started.
        at = bisect.bisect_right(starts, event.start) - 1
        if at >= 0 and _is_kernel(event.name, kernel_name):
            kernel[at] += event.seconds
    whole: dict[str, list[float]] = {}
    inside: dict[str, list[float]] = {}
    for module, seconds in zip(modules, kernel, strict=True):
        name = module.name.partition("(")[0].removeprefix("jit_")
        whole.setdefault(name, []).append(module.seconds)
        inside.setdefault(name, []).append(seconds)
    return {name: ModuleTimes(tuple(whole[name]), tuple(inside[name])) for name in whole}


def _events(line: Any) -> Iterator[_Event]:
    if line is not None:
        for event in line.events:
            yield _Event(event.name, event.start_ns, event.duration_ns * 1e-9)


def _is_kernel(event_name: str, kernel_name: str) -> bool:
    """Whether an operation is the kernel: XLA numbers the operations that share a name."""
    match = _OPERATION.match(event_name)
    return match is not None and match[1].partition(".")[0] == kernel_name
