"""Device times from a profile: the XSpace that jax.profiler writes, read through jax.profiler.ProfileData.

A TPU's plane is called '/device:TPU:n'. Its line 'XLA Modules' has an event for each run of a program, named
after the jitted function, 'jit_rpa_p8_q32(fingerprint)'; its line 'XLA Ops' has the operations inside, a
Pallas kernel under the name it was given. Host planes, and lines of other names, are passed over.

Profiles lose events. Whatever is left must not be read as something else, so a run counts only where its
module has exactly one event of the kernel inside its own span.
"""

from __future__ import annotations

import bisect
import re
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

MODULES_LINE = "XLA Modules"
OPS_LINE = "XLA Ops"

NAMES_SHOWN = 4  # of a line's events
MAX_NAME_CHARS = 40

_PLANE = re.compile(r"/device:TPU:([0-9]{1,9})")
# An operation is called by its HLO text, '%kernel.1 = bf16[...] custom-call(...)', or by its name alone.
_OPERATION = re.compile(r"%?([^\s=(]+)")
# ProfileData gives starts as float nanoseconds since 1970, which are exact to 256 ns.
_ROUNDING_NS = 512.0


class TraceError(Exception):
    """The bytes are not a profile that can be read."""


class Run(NamedTuple):
    """One run of a program.

    name: of the jitted function. seconds: of all of it. kernel_seconds: of the kernel's event inside; None
    where there is none, or more than one.
    """

    name: str
    seconds: float
    kernel_seconds: float | None


class _Event(NamedTuple):
    """start: nanoseconds since 1970; seconds: its duration, exactly."""

    name: str
    start: float
    seconds: float

    @property
    def end(self) -> float:
        return self.start + self.seconds * 1e9


def runs(xspace: bytes, kernel_name: str, names: Collection[str]) -> list[Run]:
    """The runs of these programs on one device, in the order in which they ran.

    kernel_name: the operation whose event is the kernel's. names: of the jitted functions. Of several devices
    it is the one with the most of these runs. A profile without any gives [].

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
    devices = [_plane_runs(plane, kernel_name, names) for plane in planes if _PLANE.fullmatch(plane.name)]
    return max(devices, key=len, default=[])


def contents(xspace: bytes) -> str:
    """What a profile holds, for a person who looks for the kernel: planes; of devices lines and events."""
    from jax.profiler import ProfileData

    found = []
    for plane in ProfileData.from_serialized_xspace(xspace).planes:
        lines = []
        for line in plane.lines if plane.name.startswith("/device:") else ():
            if events := Counter(event.name[:MAX_NAME_CHARS] for event in line.events):
                names = ", ".join(name for name, _ in events.most_common(NAMES_SHOWN))
                lines.append(f"{line.name!r} ({events.total()}: {names})")
        found.append(f"{plane.name!r} with {'; '.join(lines)}" if lines else repr(plane.name))
    return ", ".join(found) or "no plane"


def _plane_runs(plane: Any, kernel_name: str, names: Collection[str]) -> list[Run]:
    lines = {line.name: line for line in plane.lines if line.name in (MODULES_LINE, OPS_LINE)}
    modules = sorted(_events(lines.get(MODULES_LINE)), key=lambda event: event.start)
    starts = [module.start for module in modules]
    inside: list[list[float]] = [[] for _ in modules]
    for event in _events(lines.get(OPS_LINE)):
        if not _is_kernel(event.name, kernel_name):
            continue
        at = bisect.bisect_right(starts, event.start + _ROUNDING_NS) - 1
        if at >= 0 and event.end <= modules[at].end + _ROUNDING_NS:
            inside[at].append(event.seconds)
    found = []
    for module, kernels in zip(modules, inside, strict=True):
        name = module.name.partition("(")[0].removeprefix("jit_")
        if name in names:
            found.append(Run(name, module.seconds, kernels[0] if len(kernels) == 1 else None))
    return found


def _events(line: Any) -> Iterator[_Event]:
    if line is not None:
        for event in line.events:
            if event.duration_ns > 0:  # a damaged profile can hold others
                yield _Event(event.name, event.start_ns, event.duration_ns * 1e-9)


def _is_kernel(event_name: str, kernel_name: str) -> bool:
    """Whether an operation is the kernel: XLA numbers the operations that share a name."""
    match = _OPERATION.match(event_name)
    return match is not None and match[1].partition(".")[0] == kernel_name
